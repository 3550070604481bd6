"""Replay on image streams: what it brings, and what it brings for the same number of steps.

(Caccia et al. 2022, Figure 4.) Without a limit at the longer waiting times, where a phase over all
that was seen is affordable; with as many steps as without replay at all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...lab.claims import Claim, Tier, greater
from ...lab.study import Metric, Metrics, Running, Scale, Settings, Study
from . import PAPER, cifar, mnist, vision
from .statements import HALF, LEARNERS, POINT, arm, replay_at_equal_steps, replay_helps

GAIN = "replay gain"
SETS: dict[str, dict[str, Any]] = {
    # Width, all waiting times, and those at which a phase may grow with the stream.
    "MNIST": {"width": 64, "waits": mnist.WAITS, "free": (50, 100, 500), "scales": mnist.SCALES},
    "CIFAR": {"width": 32, "waits": cifar.WAITS, "free": (10, 50, 100), "scales": cifar.SCALES},
}
SHARES = ("0", "0.2", "1")


def arms_of(name: str) -> dict[str, Settings]:
    """Of a set: no replay, replay, and replay with the steps of no replay."""
    own = SETS[name]
    arms: dict[str, Settings] = {}
    for wait in own["waits"]:
        for r in SHARES:
            for equal in (False, True):
                if (r == "0" and equal) or (r != "0" and not equal and wait not in own["free"]):
                    continue
                for learner in ("SM", "Ens", "gEns")[: 2 if equal else 3]:
                    more = f" r={r}" + (", equal steps" if equal else "")
                    settings = {"set": name, "learner": LEARNERS[learner], "wait": wait}
                    settings |= {"replay": r} if r != "0" else {}
                    settings |= {"capped": True} if equal else {}
                    called = f"{name} {arm(learner, own['width'], wait, more)}"
                    arms[called] = settings
    return arms


def of_set(settings: Settings) -> dict[str, Any]:
    """The settings of an arm on top of those of its set at this scale."""
    own, scale = SETS[settings["set"]], settings["scale"]
    base = own["scales"][scale].settings
    if scale == "smoke":  # a small one serves for both sets
        base = {**mnist.SCALES["smoke"].settings, "batches": 2, "of": own["waits"][-1]}
    return {**base, "widths": [own["width"]], "width": own["width"], **settings}


def run_block(runs: Sequence[Running]) -> list[Metrics]:
    """All seeds of one arm, and what its replay saves against none."""
    settings = of_set(runs[0].settings)
    asked = runs[: settings.get("copies")]
    seeds, device = tuple(run.seed for run in asked), runs[0].device
    course = vision.course_of(settings, seeds, device)
    without = vision.course_of({**settings, "replay": None, "capped": None}, seeds, device)
    found: list[Metrics] = []
    for i, run in enumerate(asked):
        mine, plain = (
            vision.metrics_of(one.lines[settings["learner"]][i], settings)
            for one in (course, without)
        )
        vision.draw(run, course.lines[settings["learner"]][i])
        saved = (plain["average error"] or 0.0) - (mine["average error"] or 0.0)
        found.append({**{name: mine[name] for name in KEPT}, GAIN: saved})
    return found + [dict.fromkeys(METRICS) for _ in runs[len(asked) :]]


KEPT = (
    "average error",
    "final error",
    "compute",
    "compute, forward",
    "memory",
    "steps",
    "seconds",
)
METRICS = {
    **{name: vision.METRICS[name] for name in KEPT},
    GAIN: Metric("Average error that replay saves", format=".2%"),
}


def claims_of(name: str, wait: int, tier: Tier) -> list[Claim]:
    """The statements on replay, at one waiting time of a set."""
    width = SETS[name]["width"]
    made = []
    for learner in ("SM", "Ens"):
        made += [replay_helps(learner, width, wait, r, tier) for r in ("0.2", "1")]
        made += [replay_at_equal_steps(learner, width, wait, r, tier) for r in ("0.2", "1")]
    for learner in ("SM", "Ens"):
        made.append(
            greater(
                arm(learner, width, wait, " r=1"),
                arm("gEns", width, wait, " r=1"),
                metric=GAIN,
                quote=f"gEns gains least from replay: less than {learner}",
                mark="4 §4.6 (7)",
                tier=tier,
                **HALF,
            )
        )
    return [_of(name, one) for one in made]


def _of(name: str, claim: Claim) -> Claim:
    return replace(claim, a=f"{name} {claim.a}", b=f"{name} {claim.b}")


def shortest(name: str, tier: Tier) -> list[Claim]:
    """With replay the shortest waiting time that we can afford is the best."""
    width, (first, *others) = SETS[name]["width"], SETS[name]["free"]
    return [
        _of(
            name,
            greater(
                arm("SM", width, first, " r=1"),
                arm("SM", width, other, " r=1"),
                metric="average error",
                quote="with replay and large budgets the best waiting time drops to 1; here "
                f"{first} against {other}",
                mark="4 §4.6 (7)",
                tier=tier,
                **POINT,
            ),
        )
        for other in others
    ]


study = Study(
    name="anytime/replay",
    title="Replay on MNIST and CIFAR-10 streams",
    question="Does replay lower the error over a stream, and does it at equal compute?",
    run_block=run_block,
    block=5,
    arms={**arms_of("MNIST"), **arms_of("CIFAR")},
    metrics=METRICS,
    scales={"smoke": Scale(seeds=2), "small": Scale(seeds=5), "full": Scale(seeds=5)},
    claims=[
        *claims_of("MNIST", 50, "exact"),
        *claims_of("CIFAR", 10, "scaled down"),
        *shortest("MNIST", "scaled down"),
        *shortest("CIFAR", "scaled down"),
    ],
    varies=("cut of the stream", "first weights", "order of the images", "replayed images"),
    along="Mega-batch",
    paper=PAPER,
    deviations=(
        "replay: without a limit at w = 50 and more (MNIST) and 10 and more (CIFAR-10) only",
        "equal steps: a learner with replay takes as many steps in a phase as its twin without, "
        "and is checked as often; patience then does not count. As a rule its batches are fuller, "
        "so that it sees up to 1.2 times as many examples at the shortest waits, and up to 1.02 "
        "(MNIST) and 1.04 times (CIFAR-10) as many at those of the claims; but on MNIST with w = 1 "
        "and r = 0.2 only 0.63 times: some 135 rows are a batch of 128 and one of 7",
        "widths: 64 (MNIST) and 32 (CIFAR-10)",
        *cifar.study.deviations[:3],
    ),
    notes=(
        "replay r: before each phase a share r of all that the last one used is drawn and added "
        "to what is new, for training and validation apart; 1 keeps everything",
        "search: none; the settings are those of the paper's code for all arms",
        "shortest wait: that the shortest of those tested is best with replay does not tell what "
        "replay changes, since it is best without, too",
        "one phase: where w is the whole stream there is nothing to replay, and arms are equal",
        *vision.MACHINE,
        "smaller scales: as in anytime/mnist and anytime/cifar",
    ),
)
