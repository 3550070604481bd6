"""What trials tell of the gates of their tasks, in the result: means, shares, few numbers."""

import pytest
from simulated import make_study, make_trials

from moiety.lab.result import summarise
from moiety.lab.schema import check_result
from moiety.lab.shapes import EXTRA, check
from moiety.lab.store import Store
from moiety.lab.task_gates import WEIGHED, mean_gates, mean_similarity

PLAN = {"seeds": 2, "from": "given"}


def told(**extra):
    return {"extra": extra}


def gate(selected, binary, step, weights=(0.25, 0.75)):
    return {"selected": selected, "binary": binary, "binary_step": step, "weights": list(weights)}


def alike(value, tasks=("a", "b")):
    return {"tasks": list(tasks), "values": [[1.0, value], [value, 1.0]]}


def test_similarity_is_a_mean_over_the_seeds_that_tell_it():
    records = [told(similarity=alike(0.2)), told(), told(similarity=alike(0.6))]
    assert mean_similarity(records) == alike(0.4)
    other = told(similarity=alike(0.0, ("a", "c")))  # other tasks: not of this mean
    assert mean_similarity([*records, other]) == alike(0.4)
    assert mean_similarity([told(), told(similarity={"tasks": [], "values": []})]) == {}


def test_a_gate_over_seeds():
    seeds = [gate(2.0, True, 100), gate(4.0, False, None, (1.0, 0.0)), gate(3.0, True, 300)]
    found = mean_gates([told(gates={"a": each, "b": gate(8.0, None, None)}) for each in seeds])
    # The weights are those of the first seed: expert 0 of another seed is another expert.
    assert found["a"] == {
        "selected": 3.0,
        "binary": pytest.approx(2 / 3),
        "binary_step": 200.0,
        "weights": [0.25, 0.75],
    }
    assert found["b"]["binary"] is None and found["b"]["binary_step"] is None
    assert mean_gates([told()]) == {}


def test_many_tasks_keep_the_file_small():
    gates = {f"task {i}": gate(2.0, True, 1) for i in range(128)}
    found = mean_gates([told(gates=gates)])
    assert len(found) == 128
    assert sum(bool(each["weights"]) for each in found.values()) == WEIGHED


def test_the_result_has_them_only_where_there_are_any(tmp_path):
    study, store = make_study(), Store(tmp_path)
    trials = make_trials(study, 2)
    for trial in trials:
        extra = {"similarity": alike(trial.seed / 2), "gates": {"a": gate(2.0, True, trial.seed)}}
        metrics = {"accuracy": 0.9 + trial.seed / 100, "loss": None}
        extra = extra if trial.arm == "a" else {}
        store.finish(trial, metrics, duration=1.0, versions={}, extra=extra)
    about = {"scale": "small", "plan": PLAN, "looks": [], "command": "moiety study run"}
    result = summarise(study, store, trials, **about)
    assert result["similarity"] == {"a": alike(0.25)} and list(result["gates"]) == ["a"]
    for name in ("similarity", "gates"):
        del result[name]
        check_result(result)  # results of before have neither
    with pytest.raises(ValueError, match=r"result.similarity.a must be the names of tasks"):
        check_result({**result, "similarity": {"a": {"tasks": ["a"], "values": [[1.0, 2.0]]}}})
    with pytest.raises(ValueError, match=r"other names than the schema: surprise"):
        check_result({**result, "surprise": 1})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("similarity", {"tasks": ["a"], "values": [[float("nan")]]}, "extra.similarity must be"),
        ("similarity", {"tasks": ["a", "b"], "values": [[1.0, 0.0]]}, "a row and a column"),
        ("similarity", {"tasks": [1], "values": [[1.0]]}, "the names of tasks"),
        ("similarity", [[1.0]], "the names of tasks"),
        ("gates", {"a": gate(2.0, 0.5, None)}, "extra.gates.a.binary must be true or false"),
        ("gates", {"a": gate(2.0, True, 1.5)}, "extra.gates.a.binary_step must be an integer"),
        ("gates", {"a": {"selected": 1.0}}, "extra.gates.a has other names"),
    ],
)
def test_what_a_trial_tells_wrongly_is_said_when_it_ends(name, value, said):
    with pytest.raises(ValueError, match=said):
        check(value, EXTRA[name], f"extra.{name}")
