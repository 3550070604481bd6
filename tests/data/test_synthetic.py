"""The synthetic problems: sizes and statistics of the recipe, and labels that their truth gives."""

import pytest
import torch

from moiety.data.synthetic import expert_recovery, multitask_regression

FEW = (300, 100, 100)


@pytest.mark.parametrize(("tasks", "experts"), [(16, 4), (32, 8), (64, 16), (128, 32)])
def test_there_is_one_expert_to_four_tasks(tasks, experts):
    problem = multitask_regression(tasks, counts=FEW)
    assert [len(split) for split in problem.splits.values()] == list(FEW)
    assert len(problem.targets) == len(problem.train.targets) == tasks
    assert problem.experts.shape == (experts, 10, 4)
    assert problem.weights.shape == (tasks, 4)
    assert problem.groups.bincount().tolist() == [16] * (tasks // 16)


def test_the_full_size_is_that_of_the_paper():
    problem = multitask_regression(16)
    assert [len(split) for split in problem.splits.values()] == [100_000, 20_000, 20_000]
    x = torch.cat([split.inputs["numbers"] for split in problem.splits.values()])
    assert x.shape == (140_000, 10)
    assert x.mean(0).abs().max() < 0.02
    assert (x.T.cov() - torch.eye(10)).abs().max() < 0.02


def test_the_weights_of_a_group_are_correlated_and_those_of_two_groups_are_not():
    drawn = [multitask_regression(128, seed, counts=(1, 1, 1)).weights for seed in range(200)]
    # Tasks beside groups, seeds and experts: the correlation is one of tasks.
    w = torch.stack(drawn).view(200, 8, 16, 4)
    same = w.permute(2, 0, 1, 3).flatten(1).corrcoef()
    assert abs(same[~torch.eye(16, dtype=torch.bool)].mean() - 0.8) < 0.02
    assert abs(w.mean()) < 0.05
    assert abs(w.std() - 1) < 0.05
    other = w[:, :, 0].permute(1, 0, 2).flatten(1).corrcoef()  # the first task of every group
    assert other[~torch.eye(8, dtype=torch.bool)].abs().max() < 0.15


@pytest.mark.parametrize("combine", ["gaussian", "convex"])
def test_a_task_is_the_mixture_of_the_experts_of_its_group(combine):
    problem = multitask_regression(32, seed=3, counts=FEW, combine=combine)
    x = problem.validation.inputs["numbers"]
    for task in (0, 15, 16, 31):
        first = 4 * int(problem.groups[task])
        expected = sum(
            problem.weights[task, i] * (x @ problem.experts[first + i]).relu().sum(1)
            for i in range(4)
        )
        torch.testing.assert_close(problem.validation.targets[f"task-{task}"], expected)


def test_convex_weights_are_the_softmax_of_the_gaussian_ones():
    gaussian, convex = (
        multitask_regression(16, counts=FEW, combine=word) for word in ("gaussian", "convex")
    )
    torch.testing.assert_close(convex.weights, gaussian.weights.softmax(1))
    assert gaussian.weights.min() < 0  # which no gate has


def test_more_tasks_keep_the_first_and_fewer_examples_are_the_first():
    small, large = multitask_regression(16, counts=FEW), multitask_regression(32, counts=FEW)
    assert torch.equal(small.test.targets["task-7"], large.test.targets["task-7"])
    more = multitask_regression(16, counts=(400, 1, 1))
    assert torch.equal(more.train.inputs["numbers"][:300], small.train.inputs["numbers"])
    other = multitask_regression(16, seed=1, counts=FEW)
    assert not torch.equal(other.weights, small.weights)
    assert not torch.equal(other.train.inputs["numbers"], small.train.inputs["numbers"])


def test_a_task_does_not_carry_the_others_along():
    train = multitask_regression(32, counts=FEW).train
    for values in (train.inputs["numbers"], train.targets["task-3"]):
        assert values.is_contiguous()
        assert values.untyped_storage().nbytes() == 4 * values.numel()


# -- expert recovery -------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["first", "shuffled"])
def test_the_experts_at_the_true_places_give_every_label(placement):
    problem = expert_recovery(seed=2, placement=placement)
    assert [len(split) for split in problem.splits.values()] == [10_000] * 3
    experts = problem.modules()
    assert len(experts) == 16
    assert not any(p.requires_grad for p in experts.parameters())
    assert experts[0][0].weight.shape == (4, 10)
    for split in problem.splits.values():
        x = split.inputs["numbers"]
        logits = torch.stack([experts[i](x) for i in problem.places]).mean(0) @ problem.head
        # Rounding may turn a logit that is zero but for it.
        agree = (logits > 0).long() == split.targets["label"]
        assert agree[logits.abs() > 1e-5].all()
        wrong = torch.stack([experts[i](x) for i in range(16)]).mean(0) @ problem.head
        assert ((wrong > 0).long() == split.targets["label"]).float().mean() < 0.95


def test_placement_moves_the_experts_and_nothing_else():
    first, shuffled = (expert_recovery(5, placement=word) for word in ("first", "shuffled"))
    assert first.places == [0, 1, 2, 3]
    assert shuffled.places != first.places
    assert torch.equal(first.train.targets["label"], shuffled.train.targets["label"])
    rows = {tuple(expert.flatten().tolist()) for expert in first.experts[:4]}
    assert rows == {tuple(e.flatten().tolist()) for e in shuffled.experts[shuffled.places]}


def test_both_classes_are_common_for_every_seed():
    for seed in range(50):
        share = expert_recovery(seed, counts=(5000, 1, 1)).train.targets["label"].float().mean()
        assert 0.37 < share < 0.63


def test_seeds_shuffle_to_different_places():
    problems = [expert_recovery(s, placement="shuffled", counts=(5, 5, 5)) for s in range(100)]
    counts = torch.tensor([problem.places for problem in problems]).flatten().bincount(minlength=16)
    assert counts.sum() == 400
    assert counts.min() > 8  # 25 each on average


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: multitask_regression(20), "groups of 16; got 20"),
        (lambda: multitask_regression(0), "groups of 16; got 0"),
        (lambda: multitask_regression(16, combine="sum"), "combine must be gaussian or convex"),
        (lambda: multitask_regression(16, counts=(5, 5)), "counts are of train, validation and"),
        (lambda: expert_recovery(placement="last"), "placement must be first or shuffled"),
        (lambda: expert_recovery(true=17), "17 true experts among 16"),
        (lambda: expert_recovery(counts=(5, 0, 5)), "1 or more; got"),
    ],
)
def test_what_cannot_be_drawn_says_why(call, said):
    with pytest.raises(ValueError, match=said):
        call()
