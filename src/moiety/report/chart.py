"""Small charts as SVG, drawn here and not by a script: they need nothing and follow the page.

chart = lines("Error", [Series("apgd", [0, 1, 2], [0.1, 0.5, 0.9])], across="ε, in 1/255")
bars(["1", "2"], {"input": [0.5, 1.0], "routes": [0.2, -0.1]})

The template `chart.html` shows them; a series has the colour, the dashes and the mark of its place.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .words import missing, number

WIDTH, HEIGHT = 400.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 12.0, 40.0  # what the axes need around the plot
DODGE = 3.0  # between the intervals of two series at one place
NEAR = 26.0  # closer than this, the label of a tick would touch the next one
COLOURS, DASHES, MARKS = 8, 5, 4  # how many the style sheet has of each
Values = Sequence[float | None]


@dataclass(frozen=True)
class Series:
    """A line with the ends of its intervals; `bold` is the one to look at first."""

    name: str
    x: Sequence[float]
    y: Values
    low: Values | None = None
    high: Values | None = None
    bold: bool = False


def lines(
    label: str,
    series: Sequence[Series],
    *,
    across: str,
    top: float | None = None,
    zero: bool = True,
    form: str = ".0%",
) -> dict[str, Any]:
    """A chart of lines to `top`, or to a round number above all values; from zero, or from a round
    number below all values.
    """
    seen = [v for each in series for v in (*each.y, *(each.high or ())) if not missing(v)]
    known = [v for v in seen if v is not None]
    low = 0.0 if zero else min(known, default=0.0)
    heights = _ticks(low, top or max([*known, low + max(abs(low) / 1000, 1e-9)]))
    places = sorted({x for each in series for x in each.x})
    left, right = places[0], places[-1] if places[-1] > places[0] else places[0] + 1

    def across_at(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - left) / (right - left)

    middle = (len(series) - 1) / 2
    drawn = [
        _line(i, each, across_at, _scale(heights), DODGE * (i - middle), form)
        for i, each in enumerate(series)
    ]
    return {
        **_frame(label, across, heights, form),
        "x_ticks": _spread([(across_at(x), f"{x:.3g}") for x in places]),
        "series": drawn,
    }


def bars(
    label: str, names: Sequence[str], parts: Mapping[str, Values], *, across: str, form: str = ".2g"
) -> dict[str, Any]:
    """Stacked bars: what is positive grows up from zero, what is negative down."""
    stacks = [[(values[i] or 0.0) for values in parts.values()] for i in range(len(names))]
    up = max(sum(v for v in stack if v > 0) for stack in stacks)
    down = min(sum(v for v in stack if v < 0) for stack in stacks)
    heights = _ticks(down, max(up, down + 1e-9))
    scale, room = _scale(heights), (WIDTH - LEFT - RIGHT) / len(names)
    blocks = [
        block
        for i, stack in enumerate(stacks)
        for block in _stack(stack, LEFT + room * (i + 0.5), min(0.6 * room, 44.0), scale)
    ]
    return {
        **_frame(label, across, heights, form),
        "x_ticks": [(LEFT + room * (i + 0.5), name) for i, name in enumerate(names)],
        "series": [
            {"name": name, "i": i, "bold": False, "marks": None} for i, name in enumerate(parts)
        ],
        "blocks": blocks,
        "zero": round(scale(0.0), 1),
    }


def _frame(label: str, across: str, heights: list[float], form: str) -> dict[str, Any]:
    scale = _scale(heights)
    ticks = [(round(scale(value), 1), number(value, form)) for value in heights]
    sides = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT}
    return {"label": label, "across": across, "y_ticks": ticks, "blocks": [], "zero": None, **sides}


def _scale(heights: list[float]) -> Any:
    low, high = heights[0], heights[-1]
    return lambda value: TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about `count` of them."""
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, last + 1)]


def _spread(ticks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Ticks without the labels that would touch others; the last one always has its own."""
    shown, free = [], math.inf
    for x, text in reversed(ticks):
        shown.append((round(x, 1), text if free - x >= NEAR else ""))
        free = x if free - x >= NEAR else free
    return shown[::-1]


def _line(i: int, each: Series, at: Any, scale: Any, shift: float, form: str) -> dict[str, Any]:
    order = sorted(range(len(each.x)), key=lambda n: each.x[n])
    found = [(n, y) for n in order if (y := each.y[n]) is not None and not missing(y)]
    points = [(round(at(each.x[n]), 1), round(scale(y), 1)) for n, y in found]
    marks = []
    for (n, y), (x, height) in zip(found, points):
        low, high = (None if ends is None else ends[n] for ends in (each.low, each.high))
        spread = None
        if low is not None and high is not None:
            spread = (round(scale(low), 1), round(scale(high), 1))
        text = f"{each.name}: {number(y, '.1%' if form.endswith('%') else '.3g')}"
        marks.append(
            {"x": x, "y": height, "at": round(x + shift, 1), "spread": spread} | {"text": text}
        )
    path = " ".join(f"{x},{y}" for x, y in points)
    return {"name": each.name, "i": i, "bold": each.bold, "path": path, "marks": marks}


def _stack(stack: Sequence[float], x: float, width: float, scale: Any) -> list[dict[str, Any]]:
    blocks, ends = [], {True: 0.0, False: 0.0}
    for i, value in enumerate(stack):
        start = ends[value > 0]
        ends[value > 0] = start + value
        top, foot = sorted((scale(start), scale(start + value)))
        place = {"x": round(x - width / 2, 1), "y": round(top, 1), "width": round(width, 1)}
        blocks.append({**place, "height": round(foot - top, 1), "i": i, "text": f"{value:+.3g}"})
    return blocks
