"""The studies of DSelect-k on drawn problems, and what all of them share."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from moiety.experts import FeedForward
from moiety.lab.store import Store, Trial
from moiety.lab.study import Running
from moiety.multitask import MultiGate, Task, packed_loss
from moiety.studies.dselect_k import common, convergence, recovery, synthetic
from moiety.studies.dselect_k.facts import experts_used, gate_facts, look, not_binary

CPU = torch.device("cpu")
TUNED = {"lr": 0.01, "width": 5.0, "entropy": 0.01, "sparsity": 0.01, "temperature": 1e-3}
TUNED |= {"warm": 0.5}


def running(study, arm, folder, seed=0, stage="main", **settings):
    """One run at the smallest scale, with settings as a search would choose them."""
    own = {**study.scale("smoke").settings, **study.arms[arm], "scale": "smoke", "stage": stage}
    space = study.search.of(arm) if study.search else {}
    own |= {**{n: v for n, v in TUNED.items() if n in space}, **settings}
    trial, store = Trial(study.name, arm, seed, own), Store(folder)
    return Running(trial, CPU, store.curve(trial), store.checkpoint(trial), lambda share: None)


# -- what all share ------------------------------------------------------------------------------

TASKS = [Task("a", "number"), Task("b", "number")]
X = torch.randn(128, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :2].relu()
DATA = TensorDataset(X[:96], Y[:96]), TensorDataset(X[96:], Y[96:])


def error(outputs, y):
    return (torch.cat(list(outputs.values()), 1) - y).square().mean()


def gates(words, steps=1):
    experts = FeedForward(4, 6, 4, out_dim=1, activation=torch.relu)
    return MultiGate(TASKS, experts, log=(8, 1), tower=lambda _: nn.Identity(), **words)


def one(folder, seed=0, **settings):
    words = {"scale": "small", "stage": "main", "lr": 0.01, "epochs": 4, **settings}
    trial, store = Trial("x/y", "arm", seed, words), Store(folder)
    return Running(trial, CPU, store.curve(trial), store.checkpoint(trial), lambda share: None)


def train(runs, made=None, **words):
    def make(run, steps):
        if made is not None:
            made.append((run.settings, steps))
        return gates(common.gate(run.settings, steps=steps))

    words = {"loss": packed_loss(TASKS), "score": error, "batch": 32, **words}
    return common.train_block(runs, make, lambda run: DATA, **words)


SMOOTH = {"gate": "dselect-k-static", "k": 2, "width": 1.0, "entropy": 0.01}


def test_runs_of_other_shapes_come_back_in_their_order(tmp_path):
    ks, rates = (2, 1, 2, 1), (0.01, 0.01, 0.1, 0.1)
    runs = [one(tmp_path, **{**SMOOTH, "k": k, "lr": lr}) for k, lr in zip(ks, rates)]
    done = train(runs)
    assert [len(d.model.routers[0].alpha) for d in done] == list(ks)
    alone = train([runs[2]])[0]
    assert done[2].score == pytest.approx(alone.score, rel=1e-4)
    assert done[2].score != pytest.approx(done[0].score, rel=1e-3)


def test_a_search_trains_a_quarter_of_the_length(tmp_path):
    made = []
    done = train([one(tmp_path, **SMOOTH, stage="tune")], made)[0]
    assert done.steps == len(done.loss) == 3  # of 4 epochs of 3 batches
    assert {steps for _, steps in made} == {3}
    assert common.steps_of({"steps": 100, "stage": "tune"}, 10, 1) == 25
    assert common.steps_of({"steps": 100, "stage": "main"}, 10, 1) == 100


def test_a_copy_that_diverges_is_lost_and_the_others_are_not(tmp_path):
    for keep in ("best", "last"):
        runs = [one(tmp_path, gate="top-k-static", k=2, lr=lr) for lr in (0.01, 1e30)]
        good, lost = train(runs, keep=keep)
        assert good.score < 1 and not good.lost
        assert lost.lost and lost.score is None
        common.draw_curve(runs[1], lost)
        assert runs[1].curve.rows()[-1]["loss"] is None


def test_copies_that_nobody_asked_for_are_not_trained(tmp_path):
    made = []
    done = train([one(tmp_path, seed=s, **SMOOTH, copies=1) for s in range(3)], made)
    assert [d.lost for d in done] == [False, True, True] and len({id(s) for s, _ in made}) == 1


def test_a_checkpoint_that_keeps_the_rule_is_kept_though_another_is_better(tmp_path):
    # The entropy drives the gates to be binary fast; the error is lower before.
    run = one(tmp_path, **{**SMOOTH, "width": 0.1, "entropy": 1.0, "lr": 0.01})
    done = train([run], checks=12)[0]
    facts = gate_facts(run.settings, done.model, X)
    assert facts["allowed"] and facts["gates"]["a"]["binary"]
    assert min(done.validation) > 1  # the first checks broke the rule, and are not shown
    never = one(tmp_path, **{**SMOOTH, "width": 100.0, "entropy": 0.0})
    done = train([never])[0]
    assert not gate_facts(never.settings, done.model, X)["allowed"]
    assert math.isfinite(done.score) and done.score < 10


def record(extra, **settings):
    return {"extra": extra, "settings": {"scale": "small", **settings}}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("dselect-k-static", "a selector is not binary"),
        ("dselect-k", "more than k experts an example on average"),
        ("gumbel-static", "more than 4 experts expected"),
    ],
)
def test_the_rule_discards_by_gate(name, reason):
    assert not_binary(record({"allowed": False}, gate=name)) == reason
    assert not_binary(record({"allowed": True}, gate=name)) is None
    assert not_binary(record({}, gate="shared-bottom")) is None
    assert not_binary({"extra": {"allowed": False}, "settings": {"scale": "smoke"}}) is None


def test_the_rule_sees_what_gates_do():
    width = {"width": 1.0, "entropy": 0.1, "k": 2}
    loose = {"gate": "dselect-k-static", **width, "rule": common.AT_MOST_K}
    for settings, change, says in [
        ({"gate": "dselect-k-static", **width}, lambda r: r.z.fill_(9.0), True),
        ({"gate": "dselect-k-static", **width}, lambda r: r.z.zero_(), False),
        # One digit of each selector hovers, between the same two experts.
        ({"gate": "dselect-k-static", **width}, lambda r: r.z.fill_(9.0)[:, 0].zero_(), False),
        (loose, lambda r: r.z.fill_(9.0)[:, 0].zero_(), True),
        (loose, lambda r: r.z.zero_(), False),
        ({"gate": "dselect-k-static", **width, "warm": 1.0}, lambda r: r.z.fill_(9.0), False),
        ({"gate": "dselect-k", **width}, lambda r: r.z_bias.fill_(9.0), True),
        ({"gate": "dselect-k", **width}, lambda r: r.z_bias.zero_(), False),
        ({"gate": "top-k-static", "k": 2}, lambda r: None, True),
    ]:
        model = gates(common.gate(settings, steps=5))
        with torch.no_grad():
            for router in model.routers:
                change(router)
        assert gate_facts(settings, model, X)["allowed"] is says


def test_the_experts_used_are_those_of_largest_weight_or_what_selectors_lean_to():
    model = gates(common.gate({"gate": "softmax-static"}))
    with torch.no_grad():
        model.routers[0].weight.copy_(torch.tensor([1.0, 4.0, 2.0, 3.0]))
        model.routers[1].weight.copy_(torch.tensor([4.0, 1.0, 2.0, 3.0]))
    assert experts_used(model, look(model, X), 2) == [[1, 3], [0, 3]]
    words = {"gate": "softmax-selectors-static", "k": 3, "mode": "entropy", "entropy": 0.1}
    model = gates(common.gate(words))
    with torch.no_grad():
        for router in model.routers:
            router.weight.zero_()[2, :2] = 1.0
            router.weight[0, 2] = 1.0
    assert experts_used(model, look(model, X), 3) == [[0, 2], [0, 2]]


# -- recovery ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", recovery.ARMS)
def test_every_arm_of_recovery_gives_all_metrics(arm, tmp_path):
    runs = [running(recovery.study, arm, tmp_path, seed) for seed in (0, 1)]
    found = recovery.run_block(runs)
    smooth = arm.startswith("dselect-k")
    for own in found:
        assert own.keys() == recovery.study.metrics.keys()
        assert 0 <= own["recovered"] <= 4 and own["validation loss"] > 0
        assert (own["binary"] is None) is not smooth
    assert "trajectories" in runs[0].extra and "trajectories" not in runs[1].extra


def test_the_experts_of_recovery_are_frozen_and_those_of_the_problem(tmp_path):
    run = running(recovery.study, "dselect-k natural, shuffled", tmp_path)
    model, problem = recovery.build(run, 4), recovery.problem(run)
    x = problem.test.inputs["numbers"]
    mine = model.experts.answers(x, None, "dense")
    truth = torch.stack([expert(x) for expert in problem.modules()])
    torch.testing.assert_close(mine, truth)
    assert not any(p.requires_grad for p in model.experts.parameters())
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 4 + 16 + 5


def test_a_gate_on_the_true_experts_has_recovered_them(tmp_path):
    run = running(recovery.study, "top-k-static, shuffled", tmp_path)
    model = recovery.build(run, 4)
    with torch.no_grad():
        model.routers[0].weight.zero_()[recovery.problem(run).places] = 1.0
        for _ in range(3):
            model.train()(torch.zeros(2, 10))
    done = common.Done(model, [1.0] * 4, {4: 0.5}, 4, 4, False)
    found = recovery.tell(run, done, first=False)
    assert found["recovered"] == 4 and found["jumps"] == 0 and found["selected"] == 4


# -- synthetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", synthetic.GATES)
def test_every_gate_of_the_synthetic_tasks_gives_all_metrics(gate, tmp_path):
    runs = [running(synthetic.study, f"{gate}, 32 tasks", tmp_path, seed) for seed in (0, 1)]
    for own in synthetic.run_block(runs):
        assert own.keys() == synthetic.study.metrics.keys()
        assert own["log mse"] == pytest.approx(math.log(own["mse"]))
        assert 0 <= own["jaccard between"] <= 1 and own["validation mse"] > 0


def test_in_a_search_the_test_set_is_left_alone(tmp_path):
    run = running(synthetic.study, "top-k-static, 16 tasks", tmp_path, stage="tune")
    (found,) = synthetic.run_block([run])
    assert {name for name, value in found.items() if value is not None} == {"validation mse"}
    assert run.extra.keys() == {"selected", "allowed"}


def test_fewer_tasks_are_the_first_of_many_and_the_truth_has_no_error(tmp_path):
    many, few = (
        running(synthetic.study, f"top-k-static, {n} tasks", tmp_path, most=128) for n in (128, 16)
    )
    assert torch.equal(
        synthetic.sets(many)[0].tensors[1][:, :16], synthetic.sets(few)[0].tensors[1]
    )
    problem = synthetic.multitask_regression(
        128, common.FRESH + few.seed, counts=few.settings["counts"], combine="convex"
    )
    model = synthetic.build(few, 2)
    with torch.no_grad():
        model.experts.w_in.copy_(problem.experts[:4].transpose(1, 2))
        for router, weights in zip(model.routers, problem.weights):
            router.weight.copy_(weights.log())
    assert common.measure(model, synthetic.sets(few)[2], synthetic.squared_error) < 1e-8


# -- convergence ---------------------------------------------------------------------------------


def test_the_cost_of_a_gate_falls_when_it_is_binary(tmp_path):
    run = running(convergence.study, "dselect-k-static, recovery", tmp_path)
    run = convergence.whole(run, convergence.PROBLEMS["recovery"])
    model = recovery.build(run, 10)
    with torch.no_grad():
        model.routers[0].z.fill_(9.0)  # all selectors at the last expert, from the second call on
        model.train()(torch.zeros(2, 10))
    model.log.binary_G.fill_(5)
    done = common.Done(model, [1.0] * 10, {10: 0.5}, 10, 10, False)
    cost = convergence.Cost(torch.randn(8, 10))
    found = convergence.tell(run, done, cost, first=False)
    assert found["steps"] == 0.5 and found["binary"] == 1 and found["experts"] == 1
    assert found["flops"] == pytest.approx(0.5 + 0.5 * cost.shares[1])
    assert cost.shares[1] < 0.15  # one expert of 16, and the logistic unit
    model.log.binary_G.fill_(-1)
    found = convergence.tell(run, done, cost, first=False)
    assert found["steps"] == 1 and found["flops"] == 1 and found["binary"] == 0


@pytest.mark.parametrize("problem", ["16 tasks", "128 tasks", "recovery"])
def test_drawn_problems_of_convergence_give_all_metrics(problem, tmp_path):
    arm = f"dselect-k-static, {problem}"
    runs = [running(convergence.study, arm, tmp_path, seed) for seed in (0, 1)]
    for own in convergence.run_block(runs):
        assert own.keys() == convergence.study.metrics.keys()
        assert 0 < own["flops"] <= 1
