"""What a run is fixed to before its first result: the number of seeds, and examples from a time.

    plan.json    {"arms": [...], "seeds": 5, "from": "given" | "pilot" | "scale", "pilot": {...},
                  "budget": {"seconds": 600, "equal": "flops", "per_trial": 3e12, "arms": {...}}}

A time budget is turned once into a number of examples per arm and trial, and stored: resuming,
on a machine that is busier or with more seeds, trains every trial as long as those before it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .executors.base import Executor, Job
from .study import Settings, Speed, Study

EQUAL = ("flops", "examples", "time")
SAFETY = 0.85  # of the time is planned with: workers share caches and memory, and have to start
PILOT_SEED = 1_000_000  # pilot trials are never among the main ones
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}

Plan = dict[str, Any]


def parse_time(text: str | float) -> float:
    """Seconds of "90s", "5m", "1h" or "1h30m"."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", str(text))
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    if isinstance(text, int | float):
        seconds = float(text)
    elif "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"a time is written like 90s, 5m or 1h30m, not {text!r}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"a budget must be longer than nothing, not {text!r}")
    return seconds


# -- seeds -----------------------------------------------------------------------------------------


def fix_seeds(
    plan: Plan, looks: Sequence[Mapping[str, Any]], given: int | None, default: int
) -> None:
    """Settle the number of seeds: the one given, or the one stored, or the scale's."""
    if given is None:
        if "seeds" not in plan:
            plan.update(seeds=default, **{"from": "scale"})
        return
    seen = max((look["seeds"] for look in looks), default=0)
    if given < max(seen, 1):
        raise ValueError(
            f"{given} seeds are too few: verdicts on {seen} have been seen here; give more seeds, "
            "or another folder"
            if seen
            else f"the number of seeds must be at least 1, not {given}"
        )
    if given != plan.get("seeds"):
        plan.update(seeds=given, **{"from": "given"})


def check_pilot(study: Study, looks: Sequence[Any], pilot: int, seeds: int | None) -> None:
    """Refuse a pilot that cannot fix the number of seeds."""
    if seeds is not None:
        raise ValueError("give the number of seeds, or a pilot that finds it, not both")
    if pilot < 2:
        raise ValueError(f"a pilot needs at least 2 seeds, not {pilot}")
    if not study.claims:
        raise ValueError(f"study {study.name!r} has no claims, so a pilot has nothing to plan for")
    if looks:
        raise ValueError("verdicts have been seen here, so a pilot comes too late; add --seeds")


def seeds_from_pilot(
    study: Study,
    records: Sequence[Mapping[str, Any]],
    pilot: int,
    family: int,
    most: int | None = None,
) -> Plan:
    """How many seeds decide every claim, from the spread over the seeds of a pilot.

    family: how many claims are corrected together, those of all studies of a paper. most: seeds
    that there is time for; claims that ask for more may then stay undecided.
    """
    from .statistics import (
        FEWEST,
        paired,
        seeds_needed,
    )  # scipy, which most runs need only at their end

    needed: list[dict[str, Any]] = []
    for claim in study.claims:
        values = [
            {r["seed"]: r["metrics"][claim.metric] for r in records if r["arm"] == arm}
            for arm in (claim.a, claim.b)
        ]
        if not all(values):  # an arm that does not run
            continue
        pairs = paired(*({s: v for s, v in each.items() if v is not None} for each in values))
        if len(pairs) < 2:
            raise ValueError(
                f"the pilot gave {len(pairs)} pairs of {claim.metric!r} for {claim.a} and "
                f"{claim.b}, of which two are needed: give more seeds, or mend the study"
            )
        said = {"claim": f"{claim.a} {claim.kind} {claim.b}, {claim.metric}"}
        try:
            seeds: int | None = seeds_needed(pairs, claim.margin, family)
        except ValueError as error:  # more than any study would run
            if most is None:
                raise ValueError(f"{said['claim']}: {error}, or --most seeds") from None
            seeds = None
        needed.append({**said, "margin": claim.margin, "seeds": seeds})
    if not needed:
        raise ValueError("no claim is about two of the chosen arms: a pilot needs both")
    asked = max(entry["seeds"] or math.inf for entry in needed)
    seeds = int(min(asked, max(most or asked, FEWEST)))
    return {"seeds": seeds, "from": "pilot", "pilot": {"seeds": pilot, "needed": needed}}


def asked_by_pilot(plan: Mapping[str, Any]) -> int | None:
    """How many seeds the claim that needs most asked for; None: no pilot, or more than a study has.

    More than the plan has, where only so many could be run.
    """
    needed = [entry["seeds"] for entry in (plan.get("pilot") or {}).get("needed", [])]
    return None if None in needed else max(needed, default=None)


# -- budget ----------------------------------------------------------------------------------------


def fix_budget(
    plan: Plan,
    study: Study,
    arms: Mapping[str, Settings],
    *,
    seconds: float | None,
    equal: str | None,
    executor: Executor,
    job: Job,
    tune: int = 0,
) -> None:
    """Settle the examples of each arm: from what is stored, or by calibrating once.

    executor: on whose machine the speed is measured, for jobs like `job`. tune: how many trials
    per arm a search adds.
    """
    if equal not in (*EQUAL, None):
        raise ValueError(f"arms are made equal in {', '.join(EQUAL)}, not {equal!r}")
    budget = plan.setdefault("budget", None)
    if budget is None and seconds is None:
        if equal is not None:
            raise ValueError(f"arms are made equal in {equal} by a time budget: give one too")
        return
    if study.speed is None:
        raise ValueError(f"study {study.name!r} has no `speed`, which a time budget needs")
    if budget is None:
        assert seconds is not None
        budget = {"seconds": seconds, "equal": equal or "flops", "device": job.device, "arms": {}}
        plan["budget"] = budget
        _measure(budget, arms, executor, job)
        lanes, each = executor.lanes(job), plan["seeds"] + tune
        share = seconds * SAFETY * _together(study, lanes, each, len(arms)) / each
        budget.update(lanes=lanes, per_trial=_per_trial(budget, share))
    else:
        _check_same(budget, seconds, equal, job.device)
        _measure(budget, arms, executor, job)
    for arm, speed in budget["arms"].items():
        speed["examples"] = _examples(budget, speed, arm)


def estimate(budget: Mapping[str, Any], arm: str) -> float:
    """The seconds of a trial at the calibrated speed."""
    speed = budget["arms"][arm]
    return speed["start"] + speed["examples"] * speed["seconds"]


def _together(study: Study, lanes: int, seeds: int, arms: int) -> float:
    """How many jobs run at once on average: in the last round some lanes are empty."""
    jobs = arms * math.ceil(seeds / (study.block if study.run_block else 1))
    return jobs / math.ceil(jobs / lanes)


def _measure(
    budget: dict[str, Any], arms: Mapping[str, Settings], executor: Executor, job: Job
) -> None:
    """Measure the speed of the arms that are new or changed."""
    digests = {arm: _digest(settings) for arm, settings in arms.items()}
    new = [a for a in arms if budget["arms"].get(a, {}).get("settings") != digests[a]]
    if not new:
        return
    for arm, speed in zip(new, executor.speeds(job, [arms[arm] for arm in new])):
        _check_speed(arm, speed, budget["equal"])
        budget["arms"][arm] = {
            "seconds": speed.seconds,
            "flops": speed.flops,
            "start": speed.start,
            "settings": digests[arm],
        }


def _digest(settings: Settings) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _check_speed(arm: str, speed: Speed, equal: str) -> None:
    good = speed.seconds > 0 and speed.start >= 0 and (speed.flops > 0 or equal != "flops")
    if not good:
        raise ValueError(f"arm {arm!r}: `speed` gave {speed}; seconds and flops must be positive")


def _per_trial(budget: Mapping[str, Any], share: float) -> float:
    """What each trial gets, in FLOPs, examples or seconds.

    share: seconds for one trial of every arm together.
    """
    speeds = list(budget["arms"].values())
    if budget["equal"] == "time":
        return share / len(speeds)
    left = share - sum(speed["start"] for speed in speeds)
    unit = "flops" if budget["equal"] == "flops" else None
    return left / sum(speed["seconds"] / (speed[unit] if unit else 1) for speed in speeds)


def _examples(budget: Mapping[str, Any], speed: Mapping[str, float], arm: str) -> int:
    """How many examples of training an arm gets in each trial."""
    per_trial = budget["per_trial"]
    examples = {
        "flops": per_trial / (speed["flops"] or 1),
        "examples": per_trial,
        "time": (per_trial - speed["start"]) / speed["seconds"],
    }[budget["equal"]]
    if examples < 1:
        raise ValueError(
            f"{budget['seconds']:g} seconds leave no time to train arm {arm!r}: give a longer "
            "budget, fewer seeds or fewer arms"
        )
    return int(examples)


def _check_same(
    budget: Mapping[str, Any], seconds: float | None, equal: str | None, device: str
) -> None:
    """Refuse a budget other than the stored one."""
    asked = {"seconds": seconds, "equal": equal, "device": device}
    for name, value in asked.items():
        if value is not None and value != budget[name]:
            raise ValueError(
                f"the budget here was calibrated with {name} {budget[name]}, not {value}; give "
                "the same, or another folder by --out"
            )
