"""The result of a study: one JSON value, from the records of its trials (schema 1).

    result = summarise(study, store, trials, scale="small", plan=plan, looks=looks, command=command)
    io.write_json("looks.json", result["looks"])      # first: a look that was taken is paid for
    io.write_json("result.json", result)

`trials` are those of the present plan, all ended; other records of the folder are not read into it.
`result["looks"]` is the list of looks with the present one. What needs two seeds (an interval, the
smallest detectable effect) is None where there is one; a mean is None where there is none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np

from .claims import Claim
from .judging import judge, would_change
from .looks import claims_sha256, next_look, now, trials_sha256
from .plan import asked_by_pilot
from .schema import SCHEMA, check_result
from .statistics import paired, t_interval
from .store import Store, Trial
from .study import Metric, Study
from .task_gates import mean_gates, mean_similarity
from .tuning import without_settings

POINTS = 200  # of a curve, at most
NOT_THE_ARM = ("stage", "scale", "device", "examples")  # settings that the driver adds
Record = dict[str, Any]


def summarise(
    study: Study,
    store: Store,
    trials: Sequence[Trial],
    *,
    scale: str,
    plan: Mapping[str, Any],
    looks: Sequence[Mapping[str, Any]],
    command: str,
    device: str = "cpu",
    tuning: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Put together the result of the main trials of a study, all of which have ended."""
    done, failed = _ended(store, trials)
    seeds, versions = len({trial.seed for trial in trials}), _versions(done | failed)
    arms = {arm: [t for t in trials if t.arm == arm] for arm in study.arms}
    lost = without_settings(tuning)
    arms = {arm: mine for arm, mine in arms.items() if mine or arm in lost}
    records = {arm: [done[t.key] for t in mine if t.key in done] for arm, mine in arms.items()}
    metrics = {name: asdict(metric) for name, metric in study.metrics.items()}
    claims = [claim for claim in study.claims if {claim.a, claim.b} <= arms.keys()]
    hashes = {"trials_sha256": trials_sha256(done | failed)}
    hashes["claims_sha256"] = claims_sha256(map(asdict, claims), metrics)
    look, taken = next_look(looks, seeds, **hashes)
    result = {
        "schema": SCHEMA,
        "study": study.name,
        "title": study.title,
        "question": study.question,
        "notes": list(study.notes),
        "paper": study.paper,
        "scale": scale,
        "command": command,
        "when": now(),
        "machine": _machine(device, study.threads, versions.pop("gpu", None)),
        "versions": versions,
        "seeds": seeds,
        "planned": {"seeds": plan["seeds"], "from": plan["from"], **_pilot(plan)},
        "varies": list(study.varies),
        "along": study.along,
        "deviations": list(study.deviations),
        "budget": plan.get("budget"),
        "spent": spent_by_stage([*store.finished().values(), *failed.values()]),
        "looks": taken,
        "trials_sha256": hashes["trials_sha256"],
        "main": study.main,
        "metrics": metrics,
        "arms": [_arm(study, arm, mine, records[arm], scale) for arm, mine in arms.items()],
        "claims": _claims(claims, study.metrics, records, failed, look, lost),
        "failures": [_failure(record) for record in failed.values()],
        "tuning": dict(tuning) if tuning else None,
        "curves": _curves({arm: _rows(store, mine, done) for arm, mine in arms.items()}),
        "loads": _present({arm: _first(mine, "loads") for arm, mine in records.items()}),
        "trajectories": _present({arm: _trajectories(mine) for arm, mine in records.items()}),
        **_of_tasks(records),
    }
    check_result(result)
    return result


# -- parts of the result ---------------------------------------------------------------------------


def _ended(store: Store, trials: Sequence[Trial]) -> tuple[dict[str, Record], dict[str, Record]]:
    """The records of these trials, done and failed, in the order of the trials."""
    done, failed = store.finished(), store.failed()
    keys = [trial.key for trial in trials]
    if missing := [key for key in keys if key not in done and key not in failed]:
        raise ValueError(
            f"{len(missing)} of {len(trials)} trials have not ended ({missing[0]}); "
            "run the study again to finish it"
        )
    return {k: done[k] for k in keys if k in done}, {k: failed[k] for k in keys if k in failed}


def spent_by_stage(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Trials and their seconds, of a search, of a pilot and of what is measured."""
    stages: dict[str, list[float]] = {}
    for record in records:
        stages.setdefault(record["settings"]["stage"], []).append(seconds_of(record))
    return {
        stage: {"trials": len(times), "seconds": round(sum(times), 1)}
        for stage, times in sorted(stages.items(), reverse=True)
    }


def seconds_of(record: Record) -> float:
    """What a trial took: as it says itself where it was made before, and else its duration."""
    return record["extra"].get("seconds", record["duration"])


def _pilot(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What a pilot asked for."""
    if plan["from"] != "pilot" or not plan.get("pilot"):
        return {}
    return {"pilot": plan["pilot"]["seeds"], "asked": asked_by_pilot(plan)}


def _machine(device: str, threads: int, gpu: str | None) -> dict[str, Any]:
    """Where the trials ran; the GPU as they name it, since the driver of a cluster has none."""
    return {"device": gpu or device, "cores": os.cpu_count() or 1, "threads": threads}


def _versions(records: Mapping[str, Record]) -> dict[str, str]:
    """Of each package, all versions that trials ran with: a study may go on after an update."""
    found: dict[str, set[str]] = {}
    for record in records.values():
        for name, version in record["versions"].items():
            found.setdefault(name, set()).add(version)
    return {name: ", ".join(sorted(all_)) for name, all_ in found.items()}


def _arm(
    study: Study, arm: str, trials: Sequence[Trial], records: Sequence[Record], scale: str
) -> dict[str, Any]:
    """What was found of an arm; it has no trials where a search left it without settings."""
    settings = trials[0].settings if trials else {**study.scale(scale).settings, **study.arms[arm]}
    return {
        "name": arm,
        "settings": {name: value for name, value in settings.items() if name not in NOT_THE_ARM},
        "metrics": {name: _summary(_values(records, name)) for name in study.metrics},
        "examples": settings.get("examples"),
        "cost": {
            "flops": _most(records, "flops"),
            "parameters": _most(records, "parameters"),
            "memory": _most(records, "memory"),
            "seconds": fmean(map(seconds_of, records)) if records else None,
        },
        "finished": len(records),
        "failed": len(trials) - len(records),
    }


def _values(records: Sequence[Record], metric: str) -> dict[int, float]:
    """A metric by seed, without the trials that have no value for it."""
    found = {record["seed"]: record["metrics"].get(metric) for record in records}
    return {seed: value for seed, value in sorted(found.items()) if value is not None}


def _summary(values: Mapping[int, float]) -> dict[str, Any]:
    numbers = list(values.values())
    low, high = t_interval(numbers) if len(numbers) > 1 else (None, None)
    return {
        "mean": fmean(numbers) if numbers else None,
        "low": low,
        "high": high,
        "n": len(numbers),
        "values": {str(seed): value for seed, value in values.items()},
    }


def _most(records: Sequence[Record], name: str) -> float | None:
    """The largest cost over seeds; most are the same for all."""
    found = [record["extra"][name] for record in records if record["extra"].get(name) is not None]
    return max(found, default=None)


def _claims(
    claims: Sequence[Claim],
    metrics: Mapping[str, Metric],
    records: Mapping[str, Sequence[Record]],
    failed: Mapping[str, Record],
    look: int,
    lost: Mapping[str, str],
) -> list[dict[str, Any]]:
    """The claims on arms of the plan, with their verdicts, corrected over this study."""
    rows = [_evidence(claim, metrics[claim.metric], records, failed) for claim in claims]
    rows = [{**row, "look": look} for row in rows]
    for row, verdict in zip(rows, judge(rows)):
        form = metrics[row["metric"]].format
        row["verdict"] = verdict
        row["would_change"] = would_change(row, verdict, form=form, claims=len(rows), lost=lost)
    return rows


def _evidence(
    claim: Claim,
    metric: Metric,
    records: Mapping[str, Sequence[Record]],
    failed: Mapping[str, Record],
) -> dict[str, Any]:
    """A claim with its differences over shared seeds; positive is in favour of arm a."""
    a, b = _values(records[claim.a], claim.metric), _values(records[claim.b], claim.metric)
    first, second = (b, a) if metric.better == "lower" else (a, b)
    return {
        **asdict(claim),
        "differences": paired(first, second),
        "a_seeds": len(a),
        "b_seeds": len(b),
        "failed": sum(record["arm"] in (claim.a, claim.b) for record in failed.values()),
    }


def _failure(record: Record) -> dict[str, Any]:
    lines = record["extra"].get("traceback", "").strip().splitlines() or ["unknown"]
    return {"arm": record["arm"], "seed": record["seed"], "error": lines[-1].strip()}


# -- for the page ----------------------------------------------------------------------------------


def _rows(
    store: Store, trials: Sequence[Trial], done: Mapping[str, Record]
) -> list[dict[int, dict[str, Any]]]:
    """The curve of each finished trial of an arm, by step."""
    return [
        {row["step"]: row for row in store.curve(trial).rows()}
        for trial in trials
        if trial.key in done
    ]


def _curves(arms: Mapping[str, Sequence[Mapping[int, Mapping[str, Any]]]]) -> dict[str, Any]:
    """Means with intervals over seeds, by value and arm."""
    names = {
        name: None
        for seeds in arms.values()
        for rows in seeds
        for row in rows.values()
        for name in row
        if name != "step"
    }
    curves = {name: {arm: _curve(seeds, name) for arm, seeds in arms.items()} for name in names}
    return _present({name: _present(by_arm) for name, by_arm in curves.items()})


def _curve(seeds: Sequence[Mapping[int, Mapping[str, Any]]], name: str) -> dict[str, Any]:
    """One value over the steps that all seeds have.

    A mean over fewer and fewer seeds would jump when one ends, and would then be that of the
    seeds which happened to last.
    """
    columns = [
        {step: row[name] for step, row in rows.items() if row.get(name) is not None}
        for rows in seeds
    ]
    if not columns:
        return {}
    steps = _thin(sorted(set.intersection(*(set(column) for column in columns))))
    points = [_summary(dict(enumerate(column[step] for column in columns))) for step in steps]
    parts = ("mean", "low", "high")  # five digits: more than a plot shows, and a file stays small
    curve = {part: [_digits(point[part]) for point in points] for part in parts}
    return {"step": steps, **curve} if steps else {}


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")  # an interval of one seed has no ends


def _thin(items: Sequence[Any]) -> list[Any]:
    """At most POINTS of them, evenly chosen, with the first and the last."""
    chosen = np.linspace(0, len(items) - 1, min(POINTS, len(items))).round().astype(int)
    return [items[i] for i in chosen]


def _first(records: Sequence[Record], name: str) -> dict[str, Any]:
    """What the first seed that tells it says of its experts.

    No mean over seeds: expert 3 of one seed has nothing to do with expert 3 of another, and seeds
    that each collapse to another expert would look balanced together.
    """
    return next((r["extra"][name] for r in records if r["extra"].get(name)), {})


def _trajectories(records: Sequence[Record]) -> dict[str, dict[str, list[Any]]]:
    return {
        label: {"step": _thin(course["step"]), "values": _thin(course["values"])}
        for label, course in _first(records, "trajectories").items()
    }


def _of_tasks(records: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
    """What the gates of several tasks do, where trials tell it."""
    found = {
        "similarity": {arm: mean_similarity(mine) for arm, mine in records.items()},
        "gates": {arm: mean_gates(mine) for arm, mine in records.items()},
    }
    return _present({name: _present(arms) for name, arms in found.items()})


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}
