"""Waiting by a policy that sees results, against the best fixed waiting time in hindsight.

`plateau` waits twice as long after each phase that brought little on validation, and once again
one mega-batch where one brings much; `budget` trains whenever a phase as dear as the last one is
paid for by what every arrival earns. "best fixed" is the one fixed waiting time with the lowest
mean error over all seeds of a block: nobody knows it beforehand. (Ours; MNIST, single models.)
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch

from ...anytime.ledger import Line, summary
from ...lab.claims import Claim, equivalent, greater
from ...lab.study import Metric, Metrics, Running, Scale, Settings, Study
from . import mnist, vision
from .statements import POINT

BEST = "best fixed"
WIDTHS = {"small": mnist.SMALL, "large": mnist.LARGE}
FIXED = {f"w = {w}": {"wait": w} for w in mnist.WAITS}
GAIN, MOST = 0.02, 64  # of plateau; the most is an eighth of the stream at full scale


def arms_of() -> dict[str, Settings]:
    return {
        f"{name}, {size}": {"width": width, "policy": name, **own}
        for size, width in WIDTHS.items()
        for name, own in {**FIXED, BEST: {}, "plateau": {}, "budget": {}}.items()
    }


# -- a block ---------------------------------------------------------------------------------------


def run_block(runs: Sequence[Running]) -> list[Metrics]:
    """All seeds of one arm."""
    settings, device = runs[0].settings, runs[0].device
    asked = runs[: settings.get("copies")]
    seeds = tuple(run.seed for run in asked)
    by_seed = lines_of(settings, seeds, device)
    found: list[Metrics] = []
    for run, lines in zip(asked, by_seed):
        vision.draw(run, lines)
        mine = vision.metrics_of(lines, settings)
        phases = [line["t"] for line in lines if line["trained"]]
        found.append({**{name: mine[name] for name in KEPT}, "phases": len(phases)})
    return found + [dict.fromkeys(METRICS) for _ in runs[len(asked) :]]


def lines_of(settings: Settings, seeds: tuple[int, ...], device: torch.device) -> list[list[Line]]:
    """The ledgers of an arm, by seed."""
    if settings["policy"] == BEST:
        each = fixed(settings, seeds, device)
        return min(each, key=lambda by_seed: fmean(summary(one).average for one in by_seed))
    asked = settings if "wait" in settings else policy(settings, seeds, device)
    return vision.course_of(asked, seeds, device).lines["single"]


def fixed(settings: Settings, seeds: tuple[int, ...], device: torch.device) -> list[Any]:
    """The ledgers of all fixed waiting times, by seed."""
    asked = [{**settings, **own} for own in FIXED.values()]
    return [vision.course_of(one, seeds, device).lines["single"] for one in asked]


def policy(settings: Settings, seeds: tuple[int, ...], device: torch.device) -> Settings:
    """The settings of a policy, in words; each of its seeds is a program of its own."""
    each = fixed(settings, seeds, device) if settings["policy"] == "budget" else []
    return {**settings, "wait": policy_of(settings, each), "alone": True}


def policy_of(settings: Settings, each: Sequence[list[list[Line]]]) -> str:
    """The words of a policy at this scale."""
    if settings["policy"] == "plateau":
        most = max(1, round(MOST * settings["batches"] / settings["of"]))
        return f"plateau:{GAIN:g}:{most}"
    # As much as the middle waiting time of the fixed ones spends, spread evenly.
    middle = each[list(FIXED).index("w = 10")]
    spent = fmean(summary(one).comp + summary(one).comp_validation for one in middle)
    return f"budget:{spent / settings['batches']:g}"


# -- the study -------------------------------------------------------------------------------------

KEPT = (
    "average error",
    "final error",
    "early error",
    "compute",
    "compute, forward",
    "steps",
    "seconds",
)
METRICS = {
    **{name: vision.METRICS[name] for name in KEPT},
    "phases": Metric("Phases", better="", format=".1f", split=""),
}


def as_good(policy: str, size: str) -> Claim:
    return equivalent(
        f"{policy}, {size}",
        f"{BEST}, {size}",
        metric="average error",
        quote=f"{policy} comes as near to the best fixed waiting time as makes no difference",
        tier="our own",
        **POINT,
    )


def safer(policy: str, size: str) -> Claim:
    return greater(
        f"{policy}, {size}",
        f"w = 100, {size}",
        metric="average error",
        quote=f"{policy} is better than a fixed waiting time that is ten times too long",
        tier="our own",
        **POINT,
    )


def scale(name: str) -> Scale:
    base = mnist.SCALES[name]
    # Where programs are kept, those of anytime/mnist have the single models in them.
    alone = not base.settings.get("kept")
    return Scale(base.seeds, {**base.settings, "learner": "single", "alone": alone})


study = Study(
    name="anytime/adaptive-wait",
    title="Waiting by plateau or by budget against the best fixed waiting time",
    question="Does a policy that sees results come near the waiting time that was best?",
    run_block=run_block,
    block=mnist.study.block,
    arms=arms_of(),
    metrics=METRICS,
    scales={name: scale(name) for name in mnist.SCALES},
    claims=[
        claim(policy, size)
        for size in WIDTHS
        for policy in ("plateau", "budget")
        for claim in (as_good, safer)
    ],
    varies=mnist.study.varies,
    along="Mega-batch",
    notes=(
        "plateau: two points of validation accuracy are a gain; it waits at most for an eighth of "
        "the stream",
        "budget: every arrival earns the same, in all as many FLOPs as w = 10 spends, validation "
        "included; this is the only thing that it is told of the fixed ones. What it spends is not "
        "that: the next phase is priced like the last one, and may be dearer (column Comp)",
        "best fixed: one waiting time for the ten seeds of a block, and so for all of them at full "
        "scale, chosen by their mean error on the test; not the best one of each seed. It is "
        "favoured all the same",
        "training: as in anytime/mnist, single models; at full scale the fixed waiting times are "
        "its very runs",
        *vision.MACHINE,
    ),
)
