"""What the gates tell: experts, overlap between tasks, and how they moved."""

import itertools

import pytest
import torch
from samples import DIM, EXPERTS, TASKS, gated, make_binary, problem

from moiety.multitask import (
    SharedBottom,
    Trajectory,
    describe_gates,
    gate_table,
    jaccard,
    jaccard_by_group,
    overlap,
    random_jaccard,
    similarity,
)


def chosen():
    model = make_binary(gated(), [(1, 2), (2, 2), (4, 5)])
    with torch.no_grad():
        for router in model.routers:
            router.alpha.copy_(torch.tensor([0.0, 0.0]))
    return model


def test_static_gates_without_data():
    first, second, third = describe_gates(chosen())
    assert (first.task, first.router) == ("a", "dselect-k-static")
    assert (first.selected, first.count, first.mean_selected) == ([1, 2], 2, 2.0)
    assert first.is_binary and first.weights == pytest.approx([0, 0.5, 0.5, 0, 0, 0])
    assert (second.selected, third.selected) == ([2], [4, 5])
    fresh = describe_gates(gated())[0]
    assert fresh.is_binary is False and fresh.count == EXPERTS
    assert describe_gates(gated("softmax-static"))[0].is_binary is None


@pytest.mark.parametrize("name", ["top-k", "dselect-k"])
def test_gates_by_example_are_means_over_examples(name):
    model, (x, _) = gated(name), problem()
    found = describe_gates(model, x)[1]
    routing = model.routers[1](x)
    assert found.weights == pytest.approx(routing.dense().mean(0).tolist())
    assert found.mean_selected == pytest.approx(routing.choice().sum(1).float().mean().item())
    assert model.training and model.routers[0].training
    with pytest.raises(ValueError, match="decide by example: give examples"):
        describe_gates(model)


def test_looking_changes_nothing():
    model, (x, _) = gated("dselect-k", log=(4, 1)), problem()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    describe_gates(model, x)
    model.flops(x)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_the_table_names_every_task():
    lines = gate_table(chosen()).splitlines()
    assert len(lines) == 4 and "1: 0.500, 2: 0.500" in lines[1] and "yes" in lines[1]
    with pytest.raises(ValueError, match="only a MultiGate has gates"):
        gate_table(SharedBottom(TASKS, torch.nn.Identity(), width=DIM))


def test_similarity_is_the_cosine_of_the_gates():
    found = similarity(chosen())
    assert found["tasks"] == ["a", "type", "c.d"]
    root = 0.5**0.5
    want = torch.tensor([[1, root, 0], [root, 1, 0], [0, 0, 1.0]])
    torch.testing.assert_close(torch.tensor(found["values"]), want)


def test_jaccard_by_hand():
    assert jaccard({0, 1}, {1, 2}) == pytest.approx(1 / 3)
    assert jaccard([], []) == 1 and jaccard([1], []) == 0
    within, between = jaccard_by_group([{0, 1}, {1, 2}, {2}], ["g", "g", "h"])
    assert within == pytest.approx(1 / 3) and between == pytest.approx((0 + 1 / 2) / 2)
    assert jaccard_by_group([{0}], ["g"]) == (None, None)
    with pytest.raises(ValueError, match="3 tasks, but the groups of 1"):
        jaccard_by_group([{0}] * 3, ["g"])


@pytest.mark.parametrize(("tasks", "want"), [(16, 1.0), (32, 0.3555), (64, 0.1580), (128, 0.0750)])
def test_a_random_gate_is_known_exactly(tasks, want):
    assert random_jaccard(tasks // 4, 4) == pytest.approx(want, abs=5e-5)


def test_a_random_gate_by_counting_all_pairs():
    sets = list(itertools.combinations(range(5), 2))
    pairs = [jaccard(a, b) for a in sets for b in sets]
    assert random_jaccard(5, 2) == pytest.approx(sum(pairs) / len(pairs))
    with pytest.raises(ValueError, match="k must lie in"):
        random_jaccard(4, 5)


def test_overlap_of_groups_beside_chance():
    found = overlap(chosen(), {"a": 0, "type": 0, "c.d": 1})
    assert found["within"] == pytest.approx(0.5) and found["between"] == 0
    assert found["random"] == pytest.approx(random_jaccard(EXPERTS, 2))
    with pytest.raises(ValueError, match=r"groups lacks task 'c\.d'"):
        overlap(chosen(), {"a": 0, "type": 0})


def test_a_trajectory_counts_jumps_and_tells_the_binary_step():
    model, names = gated(), [task.name for task in TASKS]
    found = Trajectory(names, every=5)
    found.step(0, model)
    make_binary(model, [(1, 2), (2, 2), (4, 5)])
    for step in range(1, 11):
        found.step(step, model)
    make_binary(model, [(1, 2), (2, 2), (0, 3)])
    found.step(15, model)
    assert found.steps == [0, 5, 10, 15]
    assert found.jumps() == {"a": 1, "type": 1, "c.d": 2}
    assert found.jumps(size=0.9) == {"a": 0, "type": 0, "c.d": 0}
    assert found.binary_step == {"a": 5, "type": 5, "c.d": 5}
    values = found.values()
    assert values["type"]["step"] == found.steps
    assert values["type"]["values"][-1] == pytest.approx([0, 0, 1, 0, 0, 0])


def test_a_gate_that_leaves_its_plateau_is_not_binary():
    model = chosen()
    found = Trajectory([task.name for task in TASKS])
    found.step(0, model)
    torch.nn.init.zeros_(model.routers[0].z)
    found.step(1, model)
    assert found.binary_step == {"a": None, "type": 0, "c.d": 0}


def test_the_log_is_what_the_gates_did():
    model, (x, _) = gated("top-k", log=(2, 2)), problem()
    seen = []
    for _ in range(5):
        outputs = model(x)
        seen.append([r.dense().mean(0) for r in outputs.routings.values()])
        torch.nn.init.normal_(model.routers[0].weight)
    model.eval()(x)  # evaluation leaves no trace
    found = Trajectory.of(model)
    assert found.steps == [0, 2] and int(model.log.seen) == 5
    want = torch.stack([torch.stack(seen[0]), torch.stack(seen[2])])
    torch.testing.assert_close(found.weights(), want)
    with pytest.raises(ValueError, match="kept no log"):
        Trajectory.of(gated())
    with pytest.raises(ValueError, match="nothing was recorded"):
        Trajectory(["a"]).weights()
    with pytest.raises(ValueError, match="every must be"):
        Trajectory(["a"], every=0)
