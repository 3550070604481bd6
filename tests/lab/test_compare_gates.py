"""Gates of several tasks on a table as a study: every arm, missing labels, what the gates did."""

import pytest
import torch

from lab.test_compare import CPU, made, run
from moiety import list_routers
from moiety.data.problem import Target
from moiety.lab.compare import AskedGates, from_toml, read_asked, write_asked
from moiety.lab.compare import study as study_file
from moiety.lab.compare.asked import GATES, UNGATED, gate_arms
from moiety.lab.compare.folder import command_line, refuse_other
from moiety.lab.compare.gate_task import GateTask
from moiety.lab.compare.gates import HIDDEN, GateComparison
from moiety.lab.compare.measure import flops
from moiety.lab.compare.study import make_comparison
from moiety.lab.shapes import EXTRA, check
from moiety.lab.store import Store
from moiety.lab.study import Running
from moiety.multitask import MISSING, MultiGate, SharedBottom, describe_gates


@pytest.fixture
def compared(monkeypatch):
    """A comparison of gates on a made-up table: `compared(k=1)`."""

    def make(problem=None, **words):
        monkeypatch.setattr(
            study_file, "load_problem", lambda *_, **__: problem or made("table", rows=120)
        )
        return make_comparison(AskedGates(data="table.csv", batch=16, **words))

    return make


def build(comparison, arm, **settings):
    return comparison.build({**comparison.settings, **comparison.arms[arm], **settings}, 0, CPU)


@pytest.mark.parametrize("arm", ["shared-bottom", *GATES])
def test_a_trial_of_every_arm(compared, arm, tmp_path):
    comparison = compared(lr=5e-3)
    metrics, running, ticks = run(comparison, arm, tmp_path, examples=640)
    assert isinstance(comparison, GateComparison)
    assert list(metrics) == list(comparison.study().metrics)
    assert metrics["score"] > 0.6 and ticks[-1] == 1.0
    parts = [metrics[name] for name in ("accuracy of colour", "accuracy of late", "r2 of size")]
    assert metrics["score"] == pytest.approx(sum(parts) / 3)
    assert 0.9 < metrics["auc of late"] <= 1 and "auc of colour" not in metrics
    extra = running.extra
    assert extra["flops"] > 0 and extra["memory"] > 4 * extra["parameters"]
    assert ("gates" in extra) == (arm not in UNGATED)
    for name in ("gates", "similarity", "trajectories"):
        if name in extra:
            check(extra[name], EXTRA[name], name)


def test_labels_name_as_many_targets_as_they_are_of(compared):
    comparison = compared()
    metrics = comparison.study().metrics
    assert metrics["score"].label == "Score (accuracy or R²), mean of 3 targets"
    assert metrics["macro_f1"].label == "Macro-F1, mean of 2 targets"  # a number has no F1
    assert "predict colour, late and size of" in comparison.question
    fewer = GateTask(comparison.task.targets[1:], comparison.task.splits)
    assert fewer.metrics()["macro_f1"].label == "Macro-F1 of late"


def test_what_the_gates_did_is_told(compared, tmp_path):
    comparison = compared()
    _, running, _ = run(comparison, "dselect-k-static", tmp_path, examples=1600)
    gates = running.extra["gates"]
    assert list(gates) == ["colour", "late", "size"] == running.extra["similarity"]["tasks"]
    for gate in gates.values():
        assert len(gate["weights"]) == 8 and sum(gate["weights"]) == pytest.approx(1, abs=1e-3)
        if gate["binary"]:  # two selectors: at most two experts, from some step on
            assert gate["selected"] <= 2 and 0 <= gate["binary_step"] <= 100
    assert any(gate["binary"] for gate in gates.values())  # its width falls as it trains
    course = running.extra["trajectories"]["gate of colour"]
    assert course["step"][0] == 0 and len(course["step"]) <= 61
    assert course["values"][0] != course["values"][-1]
    _, running, _ = run(comparison, "top-k-static", tmp_path, examples=160)
    assert {gate["selected"] for gate in running.extra["gates"].values()} == {2.0}
    assert {gate["binary"] for gate in running.extra["gates"].values()} == {None}


def test_capacity_is_that_of_the_shared_bottom_and_sparse_gates_cost_less(compared):
    comparison = compared()
    bottom, soft = build(comparison, "shared-bottom"), build(comparison, "softmax")
    sparse = build(comparison, "top-k-static")
    assert isinstance(bottom, SharedBottom) and isinstance(soft, MultiGate)
    assert soft.experts.experts * soft.experts.hidden == HIDDEN == bottom.bottom[0].out_features
    costs = [flops(model, comparison.task) for model in (soft, sparse)]
    assert costs[1] < costs[0]
    # Charged as dense: a gate that starts dense gets no more examples for what it will save.
    dense = flops(build(comparison, "dselect-k-static"), comparison.task)
    assert dense == pytest.approx(costs[0], rel=0.1)
    assert {part.backend for part in (soft, sparse)} == {"auto"}


def test_a_gate_by_example_is_charged_as_dense_too(compared, monkeypatch):
    monkeypatch.setattr(study_file, "TIMED", 0.05)
    comparison = compared()
    speeds = {
        arm: comparison.speed({**comparison.settings, **comparison.arms[arm]}, CPU)
        for arm in ("softmax", "dselect-k", "top-k-static")
    }
    assert speeds["dselect-k"].flops == pytest.approx(speeds["softmax"].flops, rel=0.05)
    assert speeds["top-k-static"].flops < 0.9 * speeds["softmax"].flops


def test_an_interrupted_trial_ends_in_the_same_bits(compared, tmp_path, monkeypatch):
    monkeypatch.setattr(study_file, "SAVE_EVERY", 0.0)
    comparison, arm = compared(), "dselect-k"
    whole, one, _ = run(comparison, arm, tmp_path / "whole", examples=960)

    def stop(done):
        if done > 0.5:
            raise KeyboardInterrupt

    store, trial = Store(tmp_path / "halved"), one.trial
    halved = Running(trial, CPU, store.curve(trial), store.checkpoint(trial), stop)
    with pytest.raises(KeyboardInterrupt):
        comparison.run(halved)
    again, two, ticks = run(comparison, arm, tmp_path / "halved", examples=960)
    assert len(ticks) < 30 and again == whole
    assert two.extra == one.extra and two.curve.rows() == one.curve.rows()


@pytest.mark.parametrize("name", list_routers())
def test_every_router_can_be_a_gate(compared, name, tmp_path):
    comparison = compared(arms=gate_arms([name]))
    metrics, _, _ = run(comparison, name, tmp_path, examples=64)
    assert metrics["score"] is not None


def test_options_of_an_arm_reach_its_gates(compared):
    arms = gate_arms(["softmax"]) | {
        "top-4": {"gate": "top-k-static", "k": 4},
        "sharp": {"gate": "dselect-k-static", "width": 0.5, "balance": {"entropy": 0.1}},
        "deep": {"gate": "ple", "levels": 3, "own": 1},
    }
    comparison = compared(arms=arms)
    assert {gate.count for gate in describe_gates(build(comparison, "top-4"))} == {4}
    sharp = build(comparison, "sharp", examples=1600)
    assert sharp.balance[0] == {"entropy": 0.1}
    assert {router.width for router in sharp.routers} == {0.5}
    assert {router.width_steps for router in sharp.routers} == {50}  # half of 100 steps
    assert len(build(comparison, "deep").levels) == 3
    large = build(comparison, "sharp", examples=1200, batch=1000)  # more than there are
    assert {router.width_steps for router in large.routers} == {5}  # half of 10 steps of 120
    assert {claim.a for claim in comparison.study().claims} == set(arms) - {"shared-bottom"}
    assert {claim.b for claim in comparison.study().claims} == {"shared-bottom"}


def test_an_option_that_needs_others_can_be_timed(compared, monkeypatch):
    monkeypatch.setattr(study_file, "TIMED", 0.01)
    arms = gate_arms(["softmax"]) | {"end": {"gate": "dselect-k-static", "width_end": 0.5}}
    comparison = compared(arms=arms)
    assert comparison.speed({**comparison.settings, **comparison.arms["end"]}, CPU).flops > 0
    gates = build(comparison, "end").routers.train()
    before = gates[0](torch.zeros(1, 64)).dense()
    torch.testing.assert_close(gates[0](torch.zeros(1, 64)).dense(), before)  # as it started


# -- missing labels --------------------------------------------------------------------------------


def gappy():
    """A problem in whose splits every third label of each target is missing."""
    problem = made("table", rows=120)
    for split in problem.splits.values():
        for place, (name, values) in enumerate(split.targets.items()):
            values = values.clone()
            values[place::3] = MISSING if values.dtype == torch.int64 else torch.nan
            split.targets[name] = values
    return problem


def test_missing_labels_are_masked_in_losses_and_measures(compared, tmp_path):
    comparison = compared(gappy())
    task = comparison.task
    model = build(comparison, "softmax")
    rows = torch.arange(30)
    loss = task.batch_loss(model, "train", rows).detach()
    outputs, total = model(task.inputs("train", rows)), 0.0
    for each in task.tasks:
        target = task.splits["train"].targets[each.name][rows]
        there = target != MISSING if each.kind == "classes" else ~target.isnan()
        own = outputs[each.name][there]
        if each.kind == "classes":
            total += torch.nn.functional.cross_entropy(own, target[there])
        else:
            total += (own[:, 0] - target[there]).square().mean()
    assert float(loss) == pytest.approx(total.item(), rel=1e-5)
    metrics, _, _ = run(comparison, "dselect-k-static", tmp_path, examples=640)
    assert all(value is not None for value in metrics.values()) and metrics["score"] > 0.6


def test_measures_count_the_labelled_only():
    task = GateTask.of(gappy())
    truth = task.splits["test"].targets
    logits = torch.zeros(60, 6)
    logits[torch.arange(60), truth["colour"].clamp(min=0)] = 1.0  # right wherever it is known
    found = task.measure(logits, "test")
    assert found["accuracy of colour"] == 1.0
    known = truth["late"][truth["late"] != MISSING]
    assert found["accuracy of late"] == pytest.approx(float((known == 0).double().mean()))
    size = truth["size"][~truth["size"].isnan()]
    # The answers are 0, and the scale of the target is two.
    assert found["rmse of size"] == pytest.approx(2 * float(size.square().mean().sqrt()))


def test_a_target_without_any_label_in_a_split_is_named():
    problem = gappy()
    problem.validation.targets["late"][:] = MISSING
    with pytest.raises(ValueError, match=r"no row of validation has the target 'late'"):
        GateTask.of(problem)


def test_a_measure_that_the_labels_do_not_define_is_none(compared, tmp_path):
    problem = made("table", rows=120)
    problem.test.targets["late"][:] = 0
    problem.test.targets["size"][:] = 1.0
    metrics, _, _ = run(compared(problem), "dselect-k-static", tmp_path, examples=64)
    assert [name for name, value in metrics.items() if value is None] == [
        "r2 of size",
        "auc of late",
    ]
    assert metrics["score"] == pytest.approx(
        (metrics["accuracy of colour"] + metrics["accuracy of late"]) / 2
    )


def test_a_split_in_which_nothing_can_be_scored_is_named():
    problem = made("table", rows=120)
    for split in problem.splits.values():
        split.targets["colour"] = split.targets.pop("late").float()
    problem.targets[:] = [Target("colour", "number", []), problem.targets[2]]
    GateTask.of(problem)
    for name in ("colour", "size"):
        problem.validation.targets[name][:] = 1.0
    with pytest.raises(ValueError, match="every target has one value only in the rows of valid"):
        GateTask.of(problem)


# -- what is asked ---------------------------------------------------------------------------------


def test_what_was_asked_comes_back_from_its_file(tmp_path):
    arms = gate_arms(["softmax"]) | {"sharp": {"gate": "dselect-k-static", "width": 0.5}}
    asked = AskedGates(data="a.csv", targets=["x", "y"], k=3, arms=arms)
    write_asked(tmp_path / "study.toml", asked)
    assert read_asked(tmp_path / "study.toml") == asked
    assert (tmp_path / "study.toml").read_text().startswith('compare = "gates"\n')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('targets = ["x"]', "at least two targets, such as --targets income,age; for one"),
        ('targets = ["x", "x"]', "at least two targets"),
        ('model = "mlp"', "no key 'model'"),
        ("k = 9", "k is 9, but there are only 8 experts"),
        ("arms = {}", "at least one gate"),
        ('[arms.a]\nrouter = "top-k"', "the arm 'a' must name its gate"),
        ('[arms.a]\ngate = "shared-botom"', "no gate 'shared-botom'; did you mean shared-bottom"),
        ('[arms.a]\ngate = "ple"\nlevel = 1', "ple has no option 'level'; did you mean levels"),
        ('[arms.a]\ngate = "single-task"\nk = 1', "single-task has no option 'k'"),
    ],
)
def test_a_wrong_file_says_in_one_sentence_what_to_change(tmp_path, text, said):
    path = tmp_path / "wrong.toml"
    path.write_text(f'compare = "gates"\ndata = "a.csv"\n{text}')
    with pytest.raises(ValueError) as raised:
        from_toml(path)
    assert said in str(raised.value) and str(path) in str(raised.value)


def test_only_what_can_be_compared(tmp_path):
    (tmp_path / "wrong.toml").write_text('compare = "cakes"\ndata = "a.csv"')
    with pytest.raises(ValueError, match="compare must be one of routers, gates, got 'cakes'"):
        from_toml(tmp_path / "wrong.toml")


def test_a_folder_of_routers_is_not_one_of_gates(tmp_path):
    (tmp_path / "study.toml").write_text('data = "a.csv"')
    with pytest.raises(ValueError, match="holds a comparison of routers, not of gates"):
        refuse_other(tmp_path / "study.toml", AskedGates(data="a.csv"))


def test_the_command_repeats_what_was_asked(tmp_path):
    asked = AskedGates(data="a.csv", targets=["x", "y"], arms=gate_arms(["softmax", "ple"]))
    said = command_line(asked, tmp_path, "cpu", 2)
    assert said.startswith("moiety compare gates --data a.csv --target x,y --arms softmax,ple ")


def test_a_table_with_one_target_says_what_to_name(compared):
    problem = made("table")
    problem.targets = problem.targets[:1]
    with pytest.raises(ValueError, match="there is only colour: name more with --targets"):
        compared(problem)
    with pytest.raises(ValueError, match=r"made text is text data.*use moiety compare routers"):
        compared(made("text"))
