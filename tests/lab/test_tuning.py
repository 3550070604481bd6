"""The search for settings: what is drawn, what is discarded, what is chosen, and going on."""

import sys

import pytest
from rich.console import Console

from moiety.lab.driver import run_study
from moiety.lab.sampling import BATCH, random_batches
from moiety.lab.store import Store, Trial
from moiety.lab.study import Metric, Scale, Study
from moiety.lab.tuning import FIRST_SEED, Choice, Integers, LogUniform, Search, Tuner, Uniform

LR = {"lr": LogUniform(1e-4, 1e-1)}
METRICS = {
    "accuracy": Metric("Accuracy"),
    "valid": Metric("Validation accuracy", split="validation"),
    "error": Metric("Validation error", better="lower", split="validation"),
}


def study_of(search, arms=("a", "b"), block=1, **words):
    run = {"run_block": list} if block > 1 else {"run": dict}
    return Study(
        name="test/tuning",
        title="",
        question="",
        arms={arm: {"arm": arm} for arm in arms},
        metrics=METRICS,
        scales={"small": Scale(seeds=2)},
        search=search,
        block=block,
        **{**run, **words},
    )


def tuner_of(search, **words):
    def make(arm, seed, tuned):
        return Trial("test/tuning", arm, seed, {**tuned, "stage": "tune"})

    return Tuner(study_of(search, **words), scale="small", make=make)


def search_of(trials=6, metric="valid", **words):
    return Search(**{"space": LR, "trials": trials, "metric": metric, **words})


def finish(store, trial, value, **extra):
    metrics = {} if value is None else {"valid": value, "error": value}
    store.finish(trial, metrics, duration=1, versions={}, extra=extra)


def run(tuner, store, value, limit=10**9):
    """Run the search, or its first `limit` trials; return the trials that were run, in order."""
    ran = []
    while blocks := tuner.next(store):
        done = store.finished()
        for trial in (t for block in blocks for t in block if t.key not in done):
            if len(ran) == limit:
                return ran
            finish(store, trial, value(trial))
            ran.append(trial)
    return ran


def drawn(trials, arm, name="lr"):
    return [trial.settings.get(name) for trial in trials if trial.arm == arm]


# -- where is searched ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "first", "middle", "last", "text"),
    [
        (Choice([0.1, 1, "off"]), 0.1, 1, "off", "one of 0.1, 1, off"),
        (Uniform(-1, 3), -1, 1, 3, "-1 to 3"),
        (LogUniform(1e-4, 1), 1e-4, 1e-2, 1, "0.0001 to 1, log"),
        (Integers(2, 4), 2, 3, 4, "2 to 4, whole"),
    ],
)
def test_a_range_goes_from_one_end_to_the_other(values, first, middle, last, text):
    found = values.at(0.0), values.at(0.5), values.at(1 - 1e-9)
    assert found == (first, middle, last)
    assert str(values) == text


def test_a_number_has_the_four_digits_that_a_page_prints():
    values = [LogUniform(1e-5, 1e-1).at(u / 97) for u in range(97)]
    assert all(float(f"{value:.4g}") == value for value in values)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Choice([]), "at least one value"),
        (lambda: Uniform(1, 1), "smaller than the second"),
        (lambda: Integers(3, 2), "smaller than the second"),
        (lambda: LogUniform(0, 1), "above 0"),
        (lambda: search_of(space={"lr": [1, 2]}), "give a Choice"),
        (lambda: search_of(sampler="grid"), "one of random, optuna, not 'grid'"),
        (lambda: search_of(seeds=0), "at least one seed"),
        (lambda: tuner_of(search_of(trials=0)), "no trials at scale 'small'"),
        (lambda: tuner_of(search_of(trials={"full": 9})), "no trials at scale 'small'"),
        (lambda: tuner_of(search_of(metric="accuracy")), "on validation data only"),
        (lambda: tuner_of(search_of(metric="valide")), "there are accuracy, valid"),
        (lambda: tuner_of(search_of(spaces={"c": LR})), "the arm 'c'; there are a, b"),
        (lambda: tuner_of(search_of(space={"arm": Choice([1])})), "arm 'a' fixes 'arm'"),
    ],
)
def test_what_is_wrong_is_one_sentence(make, said):
    with pytest.raises(ValueError, match=said):
        make()


# -- what is drawn -------------------------------------------------------------------------------


def test_every_arm_gets_the_same_number_of_trials_and_the_same_draws(tmp_path):
    own = {"b": {"entropy": Choice([0.1, 1.0, 10.0])}}
    ran = run(tuner_of(search_of(8, spaces=own)), Store(tmp_path), lambda trial: 0.5)
    assert len(drawn(ran, "a")) == len(drawn(ran, "b")) == 8
    assert drawn(ran, "a") == drawn(ran, "b")
    assert len(set(drawn(ran, "a"))) == 8
    assert set(drawn(ran, "a", "entropy")) == {None}
    assert len(set(drawn(ran, "b", "entropy"))) > 1
    assert {trial.seed for trial in ran} == {FIRST_SEED}


def test_an_arm_with_a_range_of_its_own_is_drawn_at_the_same_place(tmp_path):
    search = search_of(spaces={"b": {"lr": LogUniform(1e-2, 10)}})
    ran = run(tuner_of(search), Store(tmp_path), lambda trial: 0.5)
    assert drawn(ran, "b") == pytest.approx([100 * lr for lr in drawn(ran, "a")], rel=1e-3)


def test_more_trials_keep_the_first_ones_and_another_seed_changes_them():
    space = {**LR, "momentum": Uniform(0, 1)}
    (few,), (many,) = random_batches(space, 0, 4), random_batches(space, 0, 9)
    assert many[:4] == few
    (other,) = random_batches(space, 1, 4)
    assert not any(a["lr"] == b["lr"] for a, b in zip(few, other))


def test_draws_fill_the_range_evenly():
    (draws,) = random_batches(LR, 0, 1000)
    counts = [sum(low <= d["lr"] < 10 * low for d in draws) for low in (1e-4, 1e-3, 1e-2)]
    assert sum(counts) == 1000
    assert all(250 < count < 420 for count in counts)  # 333 each; the spread is 15


def test_a_setting_drawn_again_runs_with_new_seeds_and_counts_with_the_first(tmp_path):
    # Value 1 wins by its best trial, value 2 by its mean.
    search = search_of(12, space={"x": Choice([1, 2])}, seeds=2)
    store, tuner = Store(tmp_path), tuner_of(search, arms=["a"])
    lucky = {1: [1.0, 0.1], 2: [0.8, 0.8]}
    ran = run(tuner, store, lambda trial: lucky[trial.settings["x"]][trial.seed % 2])
    assert len({trial.key for trial in ran}) == 24
    for x in (1, 2):
        seeds = [trial.seed for trial in ran if trial.settings["x"] == x]
        assert seeds == list(range(FIRST_SEED, FIRST_SEED + len(seeds)))
    assert tuner.chosen(store) == {"a": {"x": 2}}
    assert tuner.account(store)["arms"]["a"]["best"][-1] == pytest.approx(0.8)


# -- what is chosen ------------------------------------------------------------------------------


@pytest.mark.parametrize(("metric", "pick"), [("valid", max), ("error", min)])
def test_the_best_on_validation_is_chosen_in_the_direction_of_the_metric(tmp_path, metric, pick):
    tuner, store = tuner_of(search_of(metric=metric)), Store(tmp_path)
    ran = run(tuner, store, lambda trial: trial.settings["lr"])
    best = pick(drawn(ran, "a"))
    assert tuner.chosen(store) == {"a": {"lr": best}, "b": {"lr": best}}
    running = tuner.account(store)["arms"]["a"]["best"]
    assert running == [pick(drawn(ran, "a")[: n + 1]) for n in range(6)]


def test_the_mean_over_seeds_counts(tmp_path):
    search = search_of(2, seeds=3)
    tuner, store = tuner_of(search, arms=["a"]), Store(tmp_path)
    ran = run(tuner, store, lambda trial: float(trial.seed - FIRST_SEED))
    assert len(ran) == 6
    assert tuner.account(store)["arms"]["a"]["best"] == [1.0, 1.0]


def test_a_rule_discards_and_its_reasons_are_counted(tmp_path):
    # Digest 2: a setting whose selectors did not become binary is discarded, however good.
    def binary(record):
        return "selectors are not binary" if record["settings"]["lr"] > 1e-3 else None

    tuner, store = tuner_of(search_of(10, rule=binary)), Store(tmp_path)
    ran = run(tuner, store, lambda trial: trial.settings["lr"])
    left = [lr for lr in drawn(ran, "a") if lr <= 1e-3]
    assert 0 < len(left) < 10
    assert tuner.chosen(store)["a"] == {"lr": max(left)}
    account = tuner.account(store)["arms"]["a"]
    assert account["tried"] == 10
    assert account["discarded"] == {"selectors are not binary": 10 - len(left)}
    first = next(i for i, lr in enumerate(drawn(ran, "a")) if lr <= 1e-3)
    assert account["best"][:first] == [None] * first
    assert account["best"][-1] == max(left)


def test_one_discarded_seed_discards_its_setting(tmp_path):
    search = search_of(4, seeds=2, rule=lambda r: "odd" if r["seed"] % 2 else None)
    tuner, store = tuner_of(search, arms=["a"]), Store(tmp_path)
    run(tuner, store, lambda trial: 0.5)
    assert tuner.chosen(store) == {"a": None}


def test_where_all_of_an_arm_is_discarded_the_others_go_on(tmp_path):
    search = search_of(3, rule=lambda r: "too many experts" if r["arm"] == "a" else None)
    tuner, store = tuner_of(search), Store(tmp_path)
    ran = run(tuner, store, lambda trial: 0.5)
    assert tuner.chosen(store) == {"a": None, "b": {"lr": drawn(ran, "b")[0]}}  # first of equals
    arms = tuner.account(store)["arms"]
    assert arms["a"]["failure"].startswith("no setting of a is left of 3 (3 × too many experts)")
    assert arms["a"]["chosen"] is None and arms["a"]["best"] == [None] * 3
    assert "failure" not in arms["b"]


def test_a_trial_that_raised_or_has_no_value_is_discarded_and_not_run_again(tmp_path):
    tuner, store = tuner_of(search_of(3), arms=["a"]), Store(tmp_path)
    (one,), (two,), (three,) = tuner.next(store)
    store.fail(one, "Traceback …\nValueError: the loss is nan", duration=1, versions={})
    finish(store, two, None)
    finish(store, three, 0.1)
    assert tuner.next(store) == []
    assert tuner.chosen(store) == {"a": {"lr": three.settings["lr"]}}
    discarded = tuner.account(store)["arms"]["a"]["discarded"]
    assert discarded == {"raised ValueError": 1, "has no valid": 1}


def test_nothing_is_chosen_before_the_end(tmp_path):
    tuner, store = tuner_of(search_of()), Store(tmp_path)
    run(tuner, store, lambda trial: 0.5, limit=5)
    with pytest.raises(ValueError, match="has not ended"):
        tuner.chosen(store)
    assert tuner.account(store)["arms"]["a"]["tried"] == 5


def test_the_space_is_told_as_text(tmp_path):
    search = search_of(2, spaces={"b": {"entropy": Choice([0.1, 1])}})
    account = tuner_of(search).account(Store(tmp_path))
    assert account["space"] == {"lr": "0.0001 to 0.1, log", "entropy (b)": "one of 0.1, 1"}
    assert account["arms"]["b"]["space"] == {"lr": "0.0001 to 0.1, log", "entropy": "one of 0.1, 1"}


# -- going on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["random", "optuna"])
@pytest.mark.parametrize("limit", [1, BATCH, BATCH + 3])
def test_a_killed_search_goes_on_to_the_same_trials(tmp_path, sampler, limit):
    if sampler == "optuna":
        pytest.importorskip("optuna")
    search = search_of(2 * BATCH, sampler=sampler)
    whole = run(tuner_of(search), Store(tmp_path / "whole"), lambda trial: trial.settings["lr"])
    store, ran = Store(tmp_path / "killed"), []
    while part := run(tuner_of(search), store, lambda trial: trial.settings["lr"], limit):
        ran += part
    assert {trial.key for trial in ran} == {trial.key for trial in whole}
    assert len(ran) == len(whole) == 4 * BATCH
    assert tuner_of(search).chosen(store) == tuner_of(search).chosen(Store(tmp_path / "whole"))


def test_blocks_of_settings_are_fixed(tmp_path):
    tuner, store = tuner_of(search_of(5), arms=["a"], block=3), Store(tmp_path)
    before = tuner.next(store)
    assert [len(block) for block in before] == [3, 2]
    finish(store, before[0][1], 0.5)
    assert tuner.next(store) == before  # whole, also where one of it has ended
    finish(store, before[0][0], 0.5)
    finish(store, before[0][2], 0.5)
    assert tuner.next(store) == before[1:]


def test_optuna_hears_of_what_was_found_and_of_what_was_discarded(tmp_path):
    pytest.importorskip("optuna")
    search = search_of(BATCH + 4, sampler="optuna")

    def second(name, value, **words):
        tuner = tuner_of(search_of(3 * BATCH, sampler="optuna", **words), arms=["a"])
        return drawn(run(tuner, Store(tmp_path / name), value), "a")

    high = second("high", lambda trial: trial.settings["lr"])
    low = second("low", lambda trial: -trial.settings["lr"])
    error = second("error", lambda trial: trial.settings["lr"], metric="error")
    lost = second("lost", lambda trial: trial.settings["lr"], rule=lambda record: "no")
    assert high[:BATCH] == low[:BATCH] == lost[:BATCH]
    assert sum(high[-BATCH:]) > 2 * sum(low[-BATCH:])  # each goes where it was better
    assert error == low
    assert lost[BATCH:] != high[BATCH:]
    assert len(tuner_of(search).next(Store(tmp_path / "new"))) == 2 * BATCH  # a batch for each arm


def test_optuna_searches_every_kind_of_range(tmp_path):
    pytest.importorskip("optuna")
    space = {**LR, "u": Uniform(0, 1), "n": Integers(1, 3), "c": Choice([[1, 2], "off"])}
    tuner = tuner_of(search_of(12, space=space, sampler="optuna"), arms=["a"])
    ran = run(tuner, Store(tmp_path), lambda trial: trial.settings["u"])
    assert {type(value) for value in drawn(ran, "a", "n")} == {int}
    assert all(value in ([1, 2], "off") for value in drawn(ran, "a", "c"))
    assert all(1e-4 <= lr <= 1e-1 for lr in drawn(ran, "a"))


def test_a_missing_optuna_is_one_sentence_that_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"moiety\[lab\]"):
        tuner_of(search_of(sampler="optuna")).next(Store(tmp_path))


# -- with the driver -----------------------------------------------------------------------------

FILE = """
from moiety.lab.study import Metric, Scale, Study
from moiety.lab.tuning import LogUniform, Search


def run(running):
    running.extra["binary"] = running.arm == "b"
    return {"accuracy": 0.5, "valid": running.settings["lr"]}


def binary(record):
    return None if record["extra"]["binary"] else "selectors are not binary"


study = Study(
    name="test/search", title="", question="", run=run, arms={"a": {}, "b": {}},
    metrics={"accuracy": Metric("A"), "valid": Metric("V", split="validation")},
    scales={"smoke": Scale(seeds=2)},
    search=Search(space={"lr": LogUniform(1e-4, 1)}, trials=3, metric="valid", rule=binary),
)
"""


def test_a_study_ends_with_the_arms_that_a_search_left(tmp_path):
    (tmp_path / "search.py").write_text(FILE)
    result = run_study(
        str(tmp_path / "search.py"),
        scale="smoke",
        out=tmp_path / "out",
        console=Console(quiet=True),
    )
    lost, arm = result["arms"]
    best = max(values[0] for values in _validated(Store(tmp_path / "out"), "b"))
    assert (arm["name"], arm["settings"]["lr"]) == ("b", best)
    assert (lost["name"], lost["finished"], lost["failed"]) == ("a", 0, 0)
    assert result["tuning"]["arms"]["a"]["failure"].startswith("no setting of a is left of 3")


def _validated(store, arm):
    """What the records of a search hold: validation values alone."""
    tried = [r for r in store.finished().values() if r["settings"]["stage"] == "tune"]
    assert all(record["metrics"].keys() == {"valid"} for record in tried)
    return [list(record["metrics"].values()) for record in tried if record["arm"] == arm]
