"""A trial of the rates: errors at each n, their slopes as metrics, and what the page says of them.

return follow(running, Sizes(2, 2, 3, "tanh"), gate, lambda n: truth)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Literal

from ...lab.study import Metric, Running, Settings
from .regression import Atoms, Gate
from .slopes import (
    FACTS,
    LOWER,
    MEDIAN,
    NEEDED,
    SEEN,
    SLOPES,
    TAIL,
    Effort,
    Point,
    Sizes,
    measure,
    slope,
)

DRAWN = ("function", "gate raw, single", "expert, single", "expert, shared")


def follow(
    running: Running, sizes: Sizes, gate: Gate, truth: Callable[[int], Atoms]
) -> dict[str, float | None]:
    """Measure all n of the scale, from the last one that was finished on; return the metrics.

    truth: the true mixture at n.
    """
    settings = running.settings
    grid = sizes.samples(settings["grid"])
    state = running.checkpoint.load()
    points = [Point(**point) for point in state["points"]] if state else []
    running.curve.rewind(points[-1].n if points else -1)
    for n in grid[len(points) :]:
        effort = effort_of(settings, sizes)
        point = measure(truth(n), sizes, gate, n, effort, seed=running.seed, device=running.device)
        points.append(point)
        draw(running, point)
        running.checkpoint.save({"points": [asdict(p) for p in points], "step": n})
        running.tick(sum(p.n for p in points) / sum(grid))
    running.extra["points"] = [asdict(point) for point in points]
    return metrics(points)


def effort_of(settings: Settings, sizes: Sizes) -> Effort:
    """As the scale says for these sizes; fits of three atoms are also grown from those of two."""
    grown = settings["grown"] if sizes.fitted > 2 else 0
    restarts = settings["restarts"][sizes.name]
    return Effort(settings["repetitions"], restarts, settings["iterations"], grown=grown)


def draw(running: Running, point: Point) -> None:
    """A point of the curves: errors as powers of ten, which a plot can show."""
    values = {name: point.medians[name] for name in DRAWN}
    logs = {name: math.log10(v) if v else None for name, v in values.items()}
    loss = logs.pop("function")
    named = {f"log10 of {name}": value for name, value in logs.items()}
    running.curve.append(point.n, loss=loss, **named, **{"solved fits": float(point.solved)})


def metrics(points: Sequence[Point]) -> dict[str, float | None]:
    """Slopes over the solved n's, the share of those, and the mean facts of all."""
    found: dict[str, float | None] = {name: slope(points, name) for name in SLOPES}
    found["solved"] = fmean(point.solved for point in points)
    for name in FACTS:
        known = [value for point in points if (value := point.facts[name]) is not None]
        found[name] = fmean(known) if known else None
    return found


def _slope(what: str, better: Literal["lower", ""] = "lower") -> Metric:
    return Metric(f"Slope of {what}", better=better, format=".3f", split="")


def _share(what: str) -> Metric:
    return Metric(what, better="", format=".1%", split="")


METRICS = {
    "function": _slope("the function error", ""),
    **{name: _slope(f"{name.replace(',', ' error,')} atoms") for name in SLOPES[1:-2]},
    "L1": _slope("the loss L_{1,1}"),
    "L2": _slope("the loss L_2"),
    "solved": _share("Sizes n that are solved"),
    "touched": _share("Fits that touch the box"),
    "gradient": Metric("Projected gradient", better="", format=".1e", split=""),
    "gap": Metric("Gap between restarts", better="", format=".1e", split=""),
    "agreed": _share("Fits whose restarts agree"),
    "left": Metric("Optimisation error, median", better="", format=".1e", split=""),
    "left, tail": Metric("Optimisation error, tail", better="", format=".1e", split=""),
    "lower": _share("Fits that end lower from the truth"),
    "moved": _share("Fits with another reference, polished again"),
    "empty": _share("Fits with an empty cell"),
}
STATED = {  # what the theory says; the error of the bias is that of a whole cell
    **dict.fromkeys(METRICS),
    **{name: -0.25 if name.endswith("shared") else -0.5 for name in SLOPES},
    "bias, shared": -0.5,
}
NOTES = [
    f"solved: a size n enters a slope only if twice the iterations lower the loss by at most "
    f"{MEDIAN:.0%} (median) and {TAIL:.0%} (90th percentile) of the squared function error, and if "
    f"at most {LOWER:.0%} of the fits end lower, by {MEDIAN:.0%} of it, when they are started at "
    f"the truth; a slope needs {NEEDED} such sizes over a factor of ten, else there is none",
    f"optimisation error and gap are shares of the squared function error; a median is taken of at "
    f"least {SEEN:.0%} of the repetitions",
    "errors: root mean squares by mass over the atoms of a cell, in medians over repetitions; "
    "single atoms and those that share a true one apart; repetitions with an empty cell are "
    "counted alone",
    "reference: gates are compared from the reference's cell on (its mean by mass); a fit that "
    "took another atom for it is polished again from that labelling, and kept so where as good",
    "vanilla gates: lengths are free in the fits, where they mean nothing; a fit with unit vectors "
    "has the same functions, and its error is what is reported of directions",
    "loss: the logarithm, base 10, of the median function error; the step is n",
]
