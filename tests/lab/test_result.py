"""A result says what the records say, is checked to the last number, and looks are paid for."""

import copy
import json
import math

import numpy as np
import pytest
from simulated import CLAIMS, WORDS, Memory, make_record, make_result, make_study, make_trials

from moiety.io import write_atomic
from moiety.lab.claims import greater
from moiety.lab.looks import next_look, trials_sha256
from moiety.lab.result import summarise
from moiety.lab.schema import check_result
from moiety.lab.statistics import LEVEL, spent, t_interval
from moiety.lab.store import Store
from moiety.lab.study import Metric

VALUES = {
    "a": [0.95, 0.96, 0.94, 0.955, 0.945],
    "b": [0.90, 0.91, 0.90, 0.900, 0.900],
    "c": [0.90, 0.90, 0.91, 0.905, 0.895],
}
PLAN = {"seeds": 5, "from": "pilot", "budget": {"seconds": 600}}


def whole(tmp_path, **how):
    return make_result(make_study(), VALUES, tmp_path, **how)


def arm(result, name):
    return next(arm for arm in result["arms"] if arm["name"] == name)


# -- what it says ----------------------------------------------------------------------------------


def test_a_result_from_a_store_on_disk(tmp_path):
    study, store = make_study(), Store(tmp_path)
    trials = make_trials(study, 3)
    for trial in trials:
        rows = [{"step": i, "loss": i + trial.seed, "rare": None} for i in range(0, 1000, 2)]
        write_atomic(store.curve(trial).path, "".join(f"{json.dumps(row)}\n" for row in rows))
        extra = {"flops": 100.0, "parameters": 7 + trial.seed, "loads": {"block 1": [0.25, 0.75]}}
        extra["trajectories"] = {"gate": {"step": list(range(500)), "values": [[0.0, 1.0]] * 500}}
        metrics = {"accuracy": 0.9 + trial.seed / 100, "loss": None}
        about = {"duration": 2.0, "versions": {"torch": f"2.{trial.seed}"}, "extra": extra}
        store.finish(trial, metrics, **about)
    other = make_trials(make_study(arms={"a": {"k": 9}, "b": {}, "c": {}}), 3)[0]
    store.finish(other, {"accuracy": 0.0}, duration=1.0, versions={})  # of settings before

    about = {"scale": "small", "plan": PLAN, "looks": [], "command": "moiety study run"}
    result = summarise(study, store, trials, **about)
    check_result(json.loads(json.dumps(result)))
    assert result["notes"] == ["table: 10 rows"]
    assert result["planned"] == {"seeds": 5, "from": "pilot"} and result["seeds"] == 3
    assert result["budget"] == {"seconds": 600} and result["versions"] == {"torch": "2.0, 2.1, 2.2"}
    first = arm(result, "a")
    assert first["settings"] == {"steps": 10, "k": 1} and first["finished"] == 3
    assert first["cost"] == {"flops": 100.0, "parameters": 9, "memory": None, "seconds": 2.0}
    accuracy = first["metrics"]["accuracy"]
    assert accuracy["values"] == {"0": 0.9, "1": 0.91, "2": 0.92} and accuracy["n"] == 3
    assert (accuracy["low"], accuracy["high"]) == t_interval([0.9, 0.91, 0.92])
    assert first["metrics"]["loss"] == {"mean": None, "low": None, "high": None} | {
        "n": 0,
        "values": {},
    }
    assert result["loads"]["b"] == {"block 1": [0.25, 0.75]}
    assert len(result["trajectories"]["c"]["gate"]["step"]) == 200
    curve = result["curves"]["loss"]["a"]
    assert list(result["curves"]) == ["loss"]
    assert len(curve["step"]) == 200 and (curve["step"][0], curve["step"][-1]) == (0, 998)
    assert curve["mean"] == [step + 1 for step in curve["step"]]
    assert (curve["low"][0], curve["high"][0]) == pytest.approx(t_interval([0, 1, 2]), rel=1e-4)
    assert result["spent"]["main"]["trials"] == len(store.finished()) + len(store.failed())


def test_what_was_trained_before_counts_as_long_as_it_took(tmp_path):
    study, store = make_study(), Store(tmp_path)
    trials = make_trials(study, 2)
    for trial in trials:
        words = {"duration": 0.1, "versions": {}, "extra": {"seconds": 60.0 + trial.seed}}
        store.finish(trial, {"accuracy": 0.9, "loss": None}, **words)
    about = {"scale": "small", "plan": PLAN, "looks": [], "command": "moiety study run"}
    result = summarise(study, store, trials, **about)
    assert arm(result, "a")["cost"]["seconds"] == 60.5
    assert result["spent"]["main"]["seconds"] == 60.5 * len(trials)


def test_a_curve_has_the_steps_that_all_seeds_have(tmp_path):
    study, store = make_study(), Store(tmp_path)
    trials = make_trials(study, 2, ["a", "b"])
    for trial in trials:
        for step in range(1 + trial.seed, 5 + trial.seed):
            store.curve(trial).append(step, loss=0.5)
        store.finish(trial, {"accuracy": 0.5}, duration=1.0, versions={})
    about = {"scale": "small", "plan": PLAN, "looks": [], "command": ""}
    assert summarise(study, store, trials, **about)["curves"]["loss"]["a"]["step"] == [2, 3, 4]


def test_differences_are_signed_by_what_is_better(tmp_path):
    (claim,) = [greater("a", "b", 0.01, **{**WORDS, "metric": "loss"})]
    study = make_study([claim])
    values = {"a": [0.1, 0.2, 0.3], "b": [0.6, 0.8, 0.7]}
    (said,) = make_result(study, values, tmp_path, metric="loss")["claims"]
    assert said["differences"] == pytest.approx([0.5, 0.6, 0.4])
    assert said["verdict"]["word"] == "holds"
    study = make_study([claim], metrics={"loss": Metric("Loss", "higher")})
    (said,) = make_result(study, values, tmp_path, metric="loss")["claims"]
    assert said["verdict"]["word"] == "reversed"


def test_failed_trials_are_counted_and_pairs_are_of_shared_seeds(tmp_path):
    values = {"a": [None, *VALUES["a"][1:]], "b": [*VALUES["b"][:4], None], "c": VALUES["c"]}
    result = make_result(make_study(), values, tmp_path)
    first, second = result["claims"]
    assert first["differences"] == pytest.approx([0.05, 0.04, 0.055])
    assert (first["failed"], first["a_seeds"], first["b_seeds"]) == (2, 4, 4)
    assert second["failed"] == 1
    assert result["failures"] == [
        {"arm": "a", "seed": 0, "error": "OSError: full"},
        {"arm": "b", "seed": 4, "error": "OSError: full"},
    ]
    assert (arm(result, "a")["finished"], arm(result, "a")["failed"]) == (4, 1)


def test_an_arm_that_always_failed_leaves_its_claims_undecided(tmp_path):
    result = make_result(make_study(), {**VALUES, "b": [None] * 5}, tmp_path)
    assert [claim["verdict"]["word"] for claim in result["claims"]] == ["undecided"] * 2
    assert arm(result, "b")["cost"]["seconds"] is None


def test_claims_on_arms_that_were_not_run_are_left_out(tmp_path):
    result = make_result(make_study(), {arm: VALUES[arm] for arm in "ab"}, tmp_path)
    assert [claim["b"] for claim in result["claims"]] == ["b"]


def test_one_seed_makes_a_result_without_intervals(tmp_path):
    result = make_result(make_study(), {arm: [0.5] for arm in "abc"}, tmp_path)
    assert arm(result, "a")["metrics"]["accuracy"]["low"] is None
    assert result["claims"][0]["verdict"]["effect"] == 0


def test_the_curve_of_one_seed_has_no_band(tmp_path):
    study, store = make_study([]), Store(tmp_path)
    (trial,) = make_trials(study, 1, ["a"])
    store.finish(trial, {"accuracy": 0.5}, duration=1.0, versions={})
    store.curve(trial).append(1, loss=0.5)
    about = {"scale": "small", "plan": PLAN, "looks": [], "command": ""}
    curve = summarise(study, store, [trial], **about)["curves"]["loss"]["a"]
    assert curve == {"step": [1], "mean": [0.5], "low": [None], "high": [None]}


def test_trials_that_have_not_ended_are_named(tmp_path):
    study = make_study()
    about = {"scale": "small", "plan": PLAN, "looks": [], "command": ""}
    with pytest.raises(ValueError, match="15 of 15 trials have not ended"):
        summarise(study, Store(tmp_path), make_trials(study, 5), **about)


def test_the_gpu_is_named_by_the_trials_that_ran_on_it(tmp_path):
    study = make_study([])
    trials = make_trials(study, 2, ["a"])
    said = {"versions": {"torch": "2", "gpu": "NVIDIA H200"}}
    ended = {trial.key: make_record(trial, {"accuracy": 0.5}, **said) for trial in trials}
    about = {"scale": "small", "plan": PLAN, "looks": [], "command": "", "device": "cuda"}
    result = summarise(study, Memory(tmp_path, ended), trials, **about)
    assert result["machine"]["device"] == "NVIDIA H200" and result["versions"] == {"torch": "2"}


# -- looks -----------------------------------------------------------------------------------------


def numbers(*looks):
    """The number of each look at (seeds, trials), one after the other."""
    kept, said = [], []
    for seeds, sha in looks:
        number, kept = next_look(kept, seeds, trials_sha256=sha)
        said.append(number)
    return said


def test_looks_are_counted():
    assert numbers((5, "A")) == [1]
    assert numbers((5, "A"), (5, "A"), (5, "A")) == [1, 1, 1]
    assert numbers((5, "A"), (10, "B"), (20, "C")) == [1, 2, 3]
    # Fewer seeds after more, or the same number with other settings, are no new first look.
    assert numbers((10, "A"), (5, "B"), (5, "C")) == [1, 2, 3]
    # What was looked at before keeps its number.
    assert numbers((5, "A"), (10, "B"), (5, "A"), (10, "B"), (15, "C")) == [1, 2, 1, 2, 3]


def test_a_look_is_recorded_once_and_leaves_the_given_list_alone():
    before = [{"look": 1, "seeds": 5, "trials_sha256": "A", "when": "then"}]
    assert next_look(before, 5, trials_sha256="A") == (1, before)
    number, after = next_look(before, 8, trials_sha256="B")
    assert number == 2 and after[0] == before[0] and len(before) == 1
    assert (after[1]["look"], after[1]["seeds"]) == (2, 8)


def test_more_seeds_pay_for_the_second_look(tmp_path):
    first = whole(tmp_path)
    again = whole(tmp_path, looks=first["looks"])
    assert again["looks"] == first["looks"] and again["claims"] == first["claims"]
    more = {name: values + values for name, values in VALUES.items()}
    second = make_result(make_study(), more, tmp_path, looks=first["looks"])
    assert [look["seeds"] for look in second["looks"]] == [5, 10]
    assert {claim["look"] for claim in second["claims"]} == {2}
    assert second["claims"][0]["verdict"]["level"] == spent(2) < spent(1)


@pytest.mark.parametrize(
    ("claims", "look"),
    [
        ([greater("a", "b", 0.01, **WORDS | {"quote": "said otherwise"}), CLAIMS[1]], 1),
        (CLAIMS[::-1], 1),
        ([greater("a", "b", 0.005, **WORDS), CLAIMS[1]], 2),
        ([greater("b", "a", 0.01, **WORDS), CLAIMS[1]], 2),
        (CLAIMS[:1], 2),
    ],
)
def test_claims_that_are_changed_when_results_are_known_pay_too(tmp_path, claims, look):
    first = whole(tmp_path)
    again = make_result(make_study(claims), VALUES, tmp_path, looks=first["looks"])
    assert again["trials_sha256"] == first["trials_sha256"]
    assert {claim["look"] for claim in again["claims"]} == {look}
    assert len(again["looks"]) == look


def test_the_hash_is_of_keys_and_metrics_in_any_order():
    one, two = make_trials(make_study(), 2, ["a"])
    records = {one.key: make_record(one, {"x": 1.0, "y": 2.0}), two.key: make_record(two, {})}
    turned = {two.key: records[two.key], one.key: make_record(one, {"y": 2.0, "x": 1.0})}
    turned[one.key]["duration"] = 99.0
    assert trials_sha256(records) == trials_sha256(turned)
    turned[one.key] = make_record(one, {"x": 1.0, "y": 2.5})
    assert trials_sha256(records) != trials_sha256(turned)
    assert trials_sha256(records) != trials_sha256({one.key: records[one.key]})


# -- the schema ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", 2, "schema 1, got 2: run the study again"),
        ("schema", True, "schema 1, got True"),
        ("title", 3, "result.title must be text"),
        ("title", ..., "other names than the schema: title"),
        ("more", 1, "other names than the schema: more"),
        ("seeds", 0, "result.seeds must be an integer from 1 on"),
        ("machine.cores", 1.5, "machine.cores must be an integer"),
        ("planned.from", "guess", "one of 'given', 'pilot', 'scale'"),
        ("trials_sha256", "xyz", "64 hexadecimal"),
        ("main", "auc", "none of the metrics"),
        ("metrics.accuracy.better", "up", "one of 'higher', 'lower', ''"),
        ("arms", {}, "result.arms must be a list"),
        ("arms.0.metrics.loss", ..., "must have the metrics of the result"),
        ("arms.0.metrics.accuracy.mean", 0.9, "mean of accuracy of a is 0.9, and follows as 0.95"),
        ("arms.0.metrics.accuracy.mean", math.nan, "mean must be a finite number"),
        ("arms.0.metrics.accuracy.low", 0.5, "low of accuracy of a"),
        ("arms.0.metrics.accuracy.n", 4, "n of accuracy of a"),
        ("arms.0.metrics.accuracy.values.0", 0.99, "of accuracy of a is"),
        ("arms.0.cost.flops", math.inf, "flops must be a finite number"),
        ("arms.1.name", "z", "the claim on a and b names an arm that is not there: 'b'"),
        ("claims.0.metric", "auc", "names a metric that is not there: 'auc'"),
        ("claims.1.metric", "auc", "names a metric that is not there: 'auc'"),
        ("claims.0.margin", 0, "margin must be a positive number"),
        ("claims.0.margin", 0.2, "look of the claim on a and b is 1, and follows as None"),
        ("claims.0.tier", "rough", "one of 'exact'"),
        ("claims.0.differences.0", 0.5, "differences of the claim on a and b"),
        ("claims.0.differences", [], "differences of the claim on a and b"),
        ("claims.0.look", 2, "look of the claim on a and b is 2, and follows as 1"),
        ("claims.0.verdict.word", "true", "one of 'holds'"),
        ("claims.0.verdict.word", "undecided", "word of the verdict.*follows as 'holds'"),
        ("claims.0.verdict.effect", 0.5, "effect of the verdict"),
        ("claims.0.verdict.interval", [0.0, 1.0], "interval of the verdict"),
        ("claims.0.verdict.interval", [0.0], "interval of the verdict"),
        ("claims.0.verdict.p", 1e-9, "p of the verdict"),
        ("claims.0.verdict.p", 2.0, "p must be a number from 0 to 1"),
        ("claims.0.verdict.level", 0.5, "level of the verdict"),
        ("claims.0.verdict.detectable", None, "detectable of the verdict"),
        ("looks", [], "look of the claim"),
        ("failures", [{"arm": "a"}], "other names"),
        ("loads", {"a": [1.0]}, "loads.a must be a JSON object"),
        ("curves", {"loss": {"a": {"step": [1]}}}, "other names"),
    ],
)
def test_what_breaks_the_schema_is_said_in_a_sentence(tmp_path, path, value, message):
    result = copy.deepcopy(whole(tmp_path))
    check_result(result)
    *outer, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = result
    for part in outer:
        place = place[part]
    if value is ...:
        del place[last]
    elif isinstance(place, dict):
        place[str(last)] = value
    else:
        place[last] = value
    with pytest.raises(ValueError, match=message) as caught:
        check_result(result)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [None, [], "result", {}, {"schema": "1"}])
def test_what_is_no_result_at_all(value):
    with pytest.raises(ValueError, match="a result has schema 1"):
        check_result(value)


# -- calibration of the whole path -----------------------------------------------------------------


def simulate(tmp_path, truth, seeds=5, repeats=300):
    """The words for the claims of simulated studies, from records to result."""
    draws, study = np.random.default_rng(0), make_study()
    said = []
    for _ in range(repeats):
        base = draws.normal(0.9, 0.02, seeds)  # what a seed does to every arm
        values = {name: base + truth[name] + draws.normal(0, 0.005, seeds) for name in "abc"}
        result = make_result(study, values, tmp_path)
        said.append([claim["verdict"]["word"] for claim in result["claims"]])
    return np.array(said)


def test_from_records_to_words_a_false_word_is_rare(tmp_path):
    """Both claims are just false: a leads b by δ, and b and c differ by δ."""
    words = simulate(tmp_path, {"a": CLAIMS[0].margin, "b": 0.0, "c": CLAIMS[1].margin})
    false = (words == "holds").any(1).mean()
    # What 300 studies show where the true rate is 2.5 %, but for two standard errors.
    assert false <= LEVEL + 2 * math.sqrt(LEVEL * (1 - LEVEL) / 300)


def test_from_records_to_words_what_is_true_is_found(tmp_path):
    words = simulate(tmp_path, {"a": 0.05, "b": 0.0, "c": 0.0}, repeats=60)
    assert ((words == "holds").mean(0) >= 0.8).all()
    assert (simulate(tmp_path, {"a": -0.05, "b": 0.0, "c": 0.09}, repeats=60) == "reversed").all()
