"""Studies whose truth is known, without a trial being run."""

import dataclasses

from moiety.lab.claims import equivalent, greater
from moiety.lab.result import summarise
from moiety.lab.store import Curve, Trial
from moiety.lab.study import Metric, Scale, Study

WORDS = {"metric": "accuracy", "quote": "better", "reason": "matters", "tier": "scaled down"}
CLAIMS = [greater("a", "b", 0.01, **WORDS), equivalent("b", "c", 0.02, **WORDS)]


def make_study(claims=CLAIMS, name="paper/digits", **changes):
    about = {
        "name": name,
        "title": "Digits",
        "question": "Which?",
        "notes": ("table: 10 rows",),
        "run": dict,
        "arms": {"a": {"k": 1}, "b": {"k": 2}, "c": {"k": 3}},
        "metrics": {"accuracy": Metric("Accuracy", format=".1%"), "loss": Metric("Loss", "lower")},
        "scales": {"small": Scale(5, {"steps": 10})},
        "claims": claims,
        "varies": ("first weights",),
        "deviations": ("smaller",),
        "paper": "A paper",
    }
    return Study(**{**about, **changes})


def make_trials(study, seeds, arms=None):
    settings = {**study.scales["small"].settings, "stage": "main", "scale": "small"}
    return [
        Trial(study.name, arm, seed, {**settings, **study.arms[arm]})
        for arm in arms or study.arms
        for seed in range(seeds)
    ]


class Memory:
    """A store that holds its records, by key, in memory; curves stay on disk."""

    def __init__(self, folder, ended):
        self.folder = folder
        self.ended = ended

    def finished(self):
        return {key: record for key, record in self.ended.items() if record["status"] == "done"}

    def failed(self):
        return {key: record for key, record in self.ended.items() if record["status"] == "failed"}

    def curve(self, trial):
        return Curve(self.folder / f"{trial.key}.jsonl")


def make_record(trial, metrics, **changes):
    return {
        "status": "done",
        **dataclasses.asdict(trial),
        "metrics": metrics,
        "duration": 1.0,
        "versions": {"torch": "2"},
        "extra": {},
        **changes,
    }


def make_result(study, values, folder, *, looks=(), metric="accuracy"):
    """Summarise a study from values by arm, in the order of the seeds; None is a failed trial."""
    trials = make_trials(study, len(next(iter(values.values()))), values)
    ended = {}
    for trial in trials:
        value = values[trial.arm][trial.seed]
        if value is None:
            lost = {"status": "failed", "extra": {"traceback": "Traceback\n  x\nOSError: full\n"}}
            ended[trial.key] = make_record(trial, {}, **lost)
        else:
            ended[trial.key] = make_record(trial, {metric: float(value)})
    plan = {"seeds": 5, "from": "scale"}
    return summarise(
        study, Memory(folder, ended), trials, scale="small", plan=plan, looks=looks, command="run"
    )
