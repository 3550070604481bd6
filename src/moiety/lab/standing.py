"""How a run stands: what is done, what is left, how long that takes. Nothing is written."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from .plan import estimate
from .run import Run


@dataclass(frozen=True)
class Standing:
    """The trials of one arm."""

    arm: str
    settings: dict[str, Any]
    planned: int
    done: int
    failed: int
    metrics: dict[str, float]  # means over the trials that are done


def standings(run: Run) -> list[Standing]:
    """How each arm of the plan stands."""
    done, failed = run.store.finished(), run.store.failed()
    trials = run.planned(run.plan["arms"])
    rows = []
    for arm in run.plan["arms"]:
        mine = [trial for trial in trials or () if trial.arm == arm]
        records = [done[trial.key] for trial in mine if trial.key in done]
        settings = dict(run.study.arms[arm])
        if budget := run.plan.get("budget"):
            settings["examples"] = budget["arms"][arm]["examples"]
        rows.append(
            Standing(
                arm=arm,
                settings=settings,
                planned=run.plan["seeds"] if trials is None else len(mine),
                done=len(records),
                failed=sum(trial.key in failed for trial in mine),
                metrics=_means(run, records),
            )
        )
    return rows


def searched(run: Run) -> tuple[int, int] | None:
    """How many settings were tried, of how many; None where nothing is searched."""
    if not run.study.search:
        return None
    account = run.tuner(run.plan["arms"]).account(run.store)
    arms = account["arms"].values()
    return sum(arm["tried"] for arm in arms), account["trials"] * len(arms)


def time_left(run: Run) -> float | None:
    """The seconds that the pending trials take with this run's executor; None: not known yet."""
    rows = standings(run)
    left = {row.arm: row.planned - row.done for row in rows}
    if run.plan.get("budget"):
        seconds = [estimate(run.plan["budget"], arm) * count for arm, count in left.items()]
    else:
        ended = [r for r in run.store.finished().values() if r["settings"]["stage"] == "main"]
        known = {arm: [r["duration"] for r in ended if r["arm"] == arm] for arm in left}
        if any(left[arm] and not known[arm] for arm in left):
            return None
        seconds = [fmean(known[arm]) * count for arm, count in left.items() if count]
    return sum(seconds) / run.executor.lanes(run.job([]))


def _means(run: Run, records: list[dict[str, Any]]) -> dict[str, float]:
    means = {}
    for name in run.study.metrics:
        values = [r["metrics"][name] for r in records if r["metrics"].get(name) is not None]
        if values:
            means[name] = fmean(values)
    return means
