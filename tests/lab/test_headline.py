"""What a result says in plain words: the best arm, how sure that is, and its cost."""

from moiety.lab.headline import answers
from moiety.lab.result import _summary

DENSE = [0.80, 0.81, 0.79, 0.80]
BETTER = [0.90, 0.912, 0.89, 0.90]
COSTS = {"flops": 2e6, "parameters": 1000, "memory": 2048, "seconds": 1.5}


def result(values, words=None, *, better="higher", label="Accuracy", kind="greater", cost=COSTS):
    """A result with these values by arm and seed, and these verdicts."""
    arms = [
        {"name": name, "metrics": {"accuracy": _summary(dict(enumerate(own)))}, "cost": cost}
        for name, own in values.items()
    ]
    about = {"b": "dense", "kind": kind, "metric": "accuracy", "margin": 0.01}
    claims = [{"a": arm, **about, "verdict": {"word": word}} for arm, word in (words or {}).items()]
    metric = {"label": label, "better": better, "format": ".1%", "split": "test"}
    found = {"main": "accuracy", "metrics": {"accuracy": metric}, "arms": arms, "claims": claims}
    return found | {"seeds": 4}


def test_the_best_and_those_that_cannot_be_told_from_it():
    near = [0.90, 0.90, 0.91, 0.88]
    words = {"top-k": "holds", "switch": "holds"}
    said = answers(result({"dense": DENSE, "top-k": BETTER, "switch": near}, words))
    assert said["Best"].startswith("top-k: Accuracy 90.1% on test data (95\u00a0% interval 88.6%")
    assert said["How sure"] == (
        "With 4 seeds it cannot be told from switch. "
        "Shown to be better than dense by more than 1 point: top-k and switch."
    )


def test_no_router_beats_dense():
    words = {"a": "negligible", "b": "reversed", "c": "undecided"}
    said = answers(result({"dense": BETTER, "a": DENSE, "b": DENSE, "c": DENSE}, words))
    assert said["Best"].startswith("dense: ")
    assert "With 4 seeds it can be told from any other arm." in said["How sure"]
    assert said["How sure"].endswith(": none; worse: b; equal within that: a; 1 undecided.")


def test_no_arm_stands_out():
    said = answers(result({"dense": [0.8, 0.9], "a": [0.9, 0.8]}, {"a": "undecided"}))
    assert said["Best"].startswith("No arm stands out; ahead is dense: Accuracy 85.0%")
    assert "it cannot be told from any other arm" in said["How sure"]


def test_many_are_counted():
    near = {f"near {i}": BETTER for i in range(5)}
    said = answers(result({"dense": DENSE, "top-k": BETTER} | near))
    assert said["How sure"] == "With 4 seeds it can be told only from dense."
    far = {f"far {i}": DENSE for i in range(5)}
    said = answers(result({"top-k": BETTER} | far | near))
    assert said["How sure"] == "With 4 seeds it can be told only from 5 arms."


def test_lower_may_be_better_and_a_count_has_no_best():
    values = {"dense": DENSE, "a": BETTER}
    assert answers(result(values, better="lower"))["Best"].startswith("dense: ")
    said = answers(result(values, better=""))
    assert "Best" not in said and said["Found"].startswith("dense: Accuracy 80.0%")
    assert "Cost" not in said  # of which arm would it be?


def test_claims_that_are_not_about_dense_are_counted():
    said = answers(result({"dense": DENSE, "a": BETTER}, {"a": "holds"}, kind="equivalent"))
    assert said["How sure"].endswith("Verdicts on 1 claim: holds 1.")


def test_the_cost_is_beside_that_of_dense():
    said = answers(result({"dense": DENSE, "a": BETTER}))
    assert said["Cost"] == (
        "2.00 M (dense: 2.00 M) active FLOPs an example, 1.00 k (1.00 k) parameters, "
        "2.00 KiB (2.00 KiB) of memory and 1.5 s (1.5 s) a trial."
    )
    assert "dense" not in answers(result({"dense": BETTER, "a": DENSE}))["Cost"]
    assert "Cost" not in answers(result({"a": DENSE}, cost=dict.fromkeys(COSTS)))


def test_of_many_arms_of_which_none_is_better_a_few_are_named():
    values = {name: [0.5, 0.6, 0.7, 0.8, 0.9] for name in "abcdefg"}
    found = answers(result(values, better=""))["Found"]
    assert found.startswith("a: ") and "; d: " in found and "e: " not in found
    assert found.endswith("; 3 more below.")


def test_one_arm_one_seed_and_nothing():
    said = answers(result({"only": [0.9]}))
    assert said["Found"] == "only: Accuracy 90.0% on test data."
    assert said["How sure"].endswith("nothing to compare with.")
    assert "nothing to say" in answers(result({"dense": [], "a": []}))["Best"]


def test_what_a_metric_is_over_follows_its_value():
    said = answers(result({"dense": DENSE, "a": BETTER}, label="Accuracy, mean of 2 targets"))
    assert "a: Accuracy 90.1%, mean of 2 targets, on test data" in said["Best"]


def test_one_seed_tells_nothing_apart():
    said = answers({**result({"dense": DENSE[:1], "a": BETTER[:1]}), "seeds": 1})
    assert said["Best"] == "No arm stands out; ahead is a: Accuracy 90.0% on test data."
    assert said["How sure"] == "With 1 seed it cannot be told from any other arm."
