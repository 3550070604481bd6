"""Every built-in study runs at its smallest scale; what our own two are made of."""

import io

import pytest
import torch
from rich.console import Console

from moiety.data import digits
from moiety.lab.driver import run_study
from moiety.lab.loading import list_studies, load_study
from moiety.lab.schema import check_result
from moiety.lab.store import Store, Trial
from moiety.lab.study import Running
from moiety.studies.lab import on_digits, optimizers, routers

CPU = torch.device("cpu")


def smoke(name, folder, **words):
    """Run a study at its smallest scale; return the result and what was printed."""
    console = Console(file=io.StringIO(), width=120)
    result = run_study(name, scale="smoke", out=folder, console=console, **words)
    return result, console.file.getvalue()


# Others of the family run the same code, or tests of their own do; these run with `-m slow`.
LONG = {
    "adapt/ablation",
    "adapt/ablation-text",
    "adapt/gap",
    "adapt/low-resource",
    "adapt/moe",
    "adapt/rounds",
    "adapt/steps",
    "adapt/text",
    "adapt/weight",
    "anytime/cifar",
    "anytime/language",
    "anytime/replay",
    "anytime/routers",
    "anytime/sequential",
    "cosine/rates",
    "cosine/worst-case",
    "dselect-k/census",
    "dselect-k/convergence",
    "dselect-k/movielens",
    "dselect-k/multi-fashion",
    "dselect-k/multi-mnist",
    "dselect-k/recovery",
    "dselect-k/synthetic",
    "robust/adversarial-training",
    "robust/attribution",
    "robust/autopgd",
    "robust/auxiliary",
    "robust/experts",
    "robust/routers",
    "robust/routing-change",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in list_studies()],
)
def test_a_study_runs_to_its_verdicts_and_then_has_nothing_to_do(name, tmp_path):
    study = load_study(name)
    result, _ = smoke(name, tmp_path)
    check_result(result)
    assert result["failures"] == []
    seeds = study.scale("smoke").seeds
    assert {arm["name"]: arm["finished"] for arm in result["arms"]} == dict.fromkeys(
        study.arms, seeds
    )
    assert len(result["claims"]) == len(study.claims)
    assert len(result["curves"]["loss"]) == len(study.arms)
    assert all(len(curve["step"]) >= 2 for curve in result["curves"]["loss"].values())

    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "trials").iterdir()}
    again, printed = smoke(name, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "trials").iterdir()} == written
    assert again["claims"] == result["claims"] and again["looks"] == result["looks"]
    assert "seed 0" not in printed  # no line of a trial


@pytest.mark.parametrize("name", list_studies())
def test_a_study_has_the_three_scales_and_reasons(name):
    study = load_study(name)
    assert study.name == name
    assert list(study.scales)[:3] == ["smoke", "small", "full"]
    assert study.scale("small").seeds >= 5
    assert study.varies and study.question.endswith("?")
    assert all(claim.reason and claim.quote for claim in study.claims)


# -- lab/routers ---------------------------------------------------------------------------------


def running(study, arm, folder, seed=0, **settings):
    own = {**study.scale("smoke").settings, **study.arms[arm], **settings}
    trial, store = Trial(study.name, arm, seed, own), Store(folder)
    return Running(trial, CPU, store.curve(trial), store.checkpoint(trial), lambda share: None)


@pytest.mark.parametrize("arm", ["dense", "noisy-top-k"])  # the second draws noise as it trains
def test_a_killed_trial_of_the_routers_goes_on_to_the_same_bits(arm, tmp_path):
    whole = running(routers.study, arm, tmp_path / "whole", steps=45)
    want = routers.run(whole)

    def die(share):
        if share > 0.5:
            raise KeyboardInterrupt

    killed = running(routers.study, arm, tmp_path / "killed", steps=45)
    killed.tick = die
    with pytest.raises(KeyboardInterrupt):
        routers.run(killed)
    assert killed.checkpoint.load()["step"] == 30
    resumed = running(routers.study, arm, tmp_path / "killed", steps=45)
    assert routers.run(resumed) == want
    assert resumed.curve.rows() == whole.curve.rows()
    assert [row["step"] for row in whole.curve.rows()] == [15, 30, 45]


def test_a_trial_of_the_routers_tells_its_cost_and_its_loads(tmp_path):
    one = running(routers.study, "top-k", tmp_path)
    found = routers.run(one)
    _, test = digits()
    dense = on_digits.active_flops(on_digits.build(routers.MODELS["dense"], 0), test)
    assert one.extra["flops"] == pytest.approx(dense, rel=0.03)
    assert one.extra["parameters"] > 50_000
    assert len(one.extra["loads"]) == on_digits.DEPTH
    assert all(sum(load) == pytest.approx(1) for load in one.extra["loads"].values())
    assert 0 < found["balance"] <= 1 and found["accuracy"] * len(test) == pytest.approx(
        round(found["accuracy"] * len(test))
    )


def test_a_budget_decides_the_steps():
    settings = {"steps": 99, "lr": 1e-3}
    assert routers.recipe(settings).steps == 99
    assert routers.recipe({**settings, "examples": 640}).steps == 10
    assert routers.recipe({**settings, "examples": 1}).steps == 1


def test_the_speed_of_an_arm_is_that_of_its_training():
    speed = routers.speed({"router": "dense"}, CPU)
    assert 1e-6 < speed.seconds < 0.1
    assert 0 < speed.start < 30
    assert speed.flops == pytest.approx(2.2e6, rel=0.02)


def test_no_image_is_in_two_splits():
    parts = [{x.numpy().tobytes() for x in split.tensors[0]} for split in on_digits.splits()]
    assert [len(split) for split in on_digits.splits()] == [1000, 347, 450]
    assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]


# -- lab/optimizers ------------------------------------------------------------------------------


def test_optimizers_are_tuned_on_validation_alone_and_run_with_what_was_chosen(tmp_path):
    result, _ = smoke("lab/optimizers", tmp_path)
    arms, records = result["tuning"]["arms"], Store(tmp_path).finished().values()
    assert {arm["tried"] for arm in arms.values()} == {2}
    for record in records:
        if record["settings"]["stage"] == "tune":
            assert record["metrics"].keys() == {"validation accuracy"}
            assert record["seed"] >= 2_000_000
        else:
            chosen = arms[record["arm"]]["chosen"]
            assert {name: record["settings"][name] for name in chosen} == chosen
    for name, arm in arms.items():
        values = [
            record["metrics"]["validation accuracy"]
            for record in records
            if record["arm"] == name and record["settings"]["stage"] == "tune"
        ]
        assert arm["best"][-1] == max(values)
    assert arms["sgd"]["chosen"].keys() == {"lr", "weight_decay", "momentum"}


def test_each_copy_of_a_block_is_trained_with_settings_of_its_own(tmp_path):
    rates = 1e-6, 1e-2  # the first is too low to learn anything
    runs = [running(optimizers.study, "adam", tmp_path, lr=lr, weight_decay=0.0) for lr in rates]
    low, good = optimizers.run_block(runs)
    assert good["accuracy"] > 0.5 > low["accuracy"]
    assert good["validation accuracy"] > low["validation accuracy"]
    rows = runs[1].curve.rows()
    assert [row["step"] for row in rows] == [20, 40]
    assert rows[1]["loss"] < rows[0]["loss"]


def test_a_copy_that_diverges_leaves_the_others_alone(tmp_path):
    runs = [
        running(optimizers.study, "sgd", tmp_path, lr=lr, weight_decay=0.0, momentum=0.9)
        for lr in (0.1, 1e30)
    ]
    good, lost = optimizers.run_block(runs)
    assert good["accuracy"] > 0.4 > lost["accuracy"]
    assert runs[1].curve.rows()[-1]["loss"] is None
