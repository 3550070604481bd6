"""The time course of routing health, window by window of a training run.

html = course_page(rows, load, every=100)
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .page import render
from .routing import SHADES, load_table

# Points of a line, and its size in units of its own.
POINTS, WIDTH, HEIGHT = 200, 240.0, 36.0


def course_page(
    rows: Sequence[Mapping[str, Any]],
    load: Mapping[str, Sequence[float]],
    *,
    every: int,
    ranks: int = 1,
) -> str:
    """Return a self-contained page.

    A row is a window: its last `step` and, by name, its `layers` with `effective`, `dead`,
    `entropy` and `drop_rate`. `load` is that of every expert in the last window.
    """
    names = list(dict.fromkeys(name for row in rows for name in row["layers"]))
    whose = "" if ranks == 1 else f" Load of the first of {ranks} processes only."
    return render(
        "course.html",
        title="Routing health while training",
        summary=f"Steps {rows[0]['step'] - rows[0]['steps'] + 1:,} to {rows[-1]['step']:,} in "
        f"windows of {every:,}; evaluation is not counted.{whose}",
        findings=[text for name in names for text in _dead(name, rows)],
        layers=[_layer(name, rows, len(load.get(name, ()))) for name in names],
        loads=load_table("Last window", load, {}) if load else None,
        legend=[name for _, name in SHADES],
    )


def _dead(name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The experts of a layer that are dead now, and since when."""
    windows = [row for row in rows if name in row["layers"]]
    out = []
    for expert in windows[-1]["layers"][name]["dead"]:
        idle = [expert in row["layers"][name]["dead"] for row in windows]
        last = len(idle) - 1 - idle[::-1].index(False) if False in idle else -1
        since = windows[last + 1]["step"] - windows[last + 1]["steps"] + 1
        out.append(f"{name}: expert {expert} has had no token since step {since:,}")
    return out


def _layer(name: str, rows: Sequence[Mapping[str, Any]], experts: int) -> dict[str, Any]:
    windows = [row["layers"][name] for row in rows if name in row["layers"]]
    effective = [layer["effective"] for layer in windows]
    dead = [len(layer["dead"]) for layer in windows]
    top = max(experts, *effective, *dead, 1)
    entropy = windows[-1]["entropy"]
    return {
        "name": name,
        "effective": _line(effective, top),
        "dead": _line(dead, top),
        "first": f"{effective[0]:.2f}",
        "lowest": f"{min(effective):.2f}",
        "last": f"{effective[-1]:.2f}",
        "experts": experts or "–",
        "dead_now": dead[-1],
        "entropy": "–" if entropy is None else f"{entropy:.2f}",
        "dropped": f"{windows[-1]['drop_rate']:.1%}",
    }


def _line(values: Sequence[float], top: float) -> str:
    """The points of an SVG line from zero to `top`; many values are thinned out."""
    step = max(1, -(-len(values) // POINTS))
    shown = [*values[:-1:step], values[-1]]
    last = max(len(shown) - 1, 1)
    points = [
        f"{WIDTH * i / last:.1f},{HEIGHT * (1 - value / top):.1f}" for i, value in enumerate(shown)
    ]
    # One window is a level line: a single point would not be seen.
    return " ".join(
        points if len(points) > 1 else [points[0], f"{WIDTH},{points[0].split(',')[1]}"]
    )
