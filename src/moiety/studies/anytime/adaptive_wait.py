"""Waiting by a policy that sees results, against the best fixed waiting time in hindsight.

`plateau` waits twice as long after each phase that brought little on validation, and once again
one mega-batch where one brings much; `budget` trains whenever the next phase is paid for by what
every arrival earns. "best fixed" is the fixed waiting time with the lowest mean error over the
seeds: nobody knows it beforehand. (Ours; MNIST, single models.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from statistics import fmean

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
    course = functools.partial(vision.course_of, seeds=seeds, device=device)
    if "wait" in settings:
        return course(settings).lines["single"]
    each = [course({**settings, **own}).lines["single"] for own in FIXED.values()]
    if settings["policy"] == BEST:
        return min(each, key=lambda by_seed: fmean(summary(one).average for one in by_seed))
    return course({**settings, "wait": policy_of(settings, each)}).lines["single"]


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

KEPT = ("average error", "final error", "early error", "compute", "compute, forward", "steps")
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
    settings = {**base.settings, "learner": "single", "alone": True}
    return Scale(seeds=min(base.seeds, 5), settings=settings)  # each seed is a program of its own


study = Study(
    name="anytime/adaptive-wait",
    title="Waiting by plateau or by budget against the best fixed waiting time",
    question="Does a policy that sees results come near the waiting time that was best?",
    run_block=run_block,
    block=5,
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
        "budget: every arrival earns the same, in all as many FLOPs as w = 10 spends; this is the "
        "only thing that it is told of the fixed ones",
        "best fixed: chosen on the test error of all seeds together, so that it is favoured",
        "training: as in anytime/mnist, single models",
    ),
)
