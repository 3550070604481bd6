"""The routing page: results of several arms, and the load of every expert in every layer.

html = routing_page(
    title="Seven routers on digits",
    summary="Trained at equal active FLOPs.",
    rows=[{"arm": "top-k", "accuracy": 0.97}],
    columns=[("arm", "Router"), ("accuracy", "Accuracy", ".1%")],
    loads={"top-k": {"blocks.0.moe": [0.5, 0.3, 0.2, 0.0]}},
    settings={"seed": "0"},
    command="moiety demo --seed 0",
)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .page import render
from .table import Column, TablePart, as_columns, cells

if TYPE_CHECKING:
    from .audit import AuditPart
    from .stream import StreamPart
    from .tasks import TaskPart

Loads = Mapping[str, Mapping[str, Sequence[float]]]  # arm -> layer -> load of every expert
Dead = Mapping[str, Mapping[str, Sequence[bool]]]

# Shades of a cell by load relative to an even share: upper bound and its name in the legend.
SHADES = [
    (0.1, "below 0.1×"),
    (0.5, "0.1–0.5×"),
    (0.8, "0.5–0.8×"),
    (1.25, "even, 0.8–1.25×"),
    (2.0, "1.25–2×"),
    (4.0, "2–4×"),
    (math.inf, "4× and more"),
]
# Arms with more experts than this get the whole width of the page.
NARROW = 8


@dataclass(frozen=True)
class Cell:
    """One expert of one layer, as shown."""

    share: str
    shade: int
    dead: bool


def routing_page(
    *,
    title: str,
    summary: str,
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[Column | tuple[str, ...]],
    notes: Mapping[str, str] | None = None,
    loads: Loads,
    dead: Dead | None = None,
    settings: Mapping[str, str],
    command: str,
    tasks: "TaskPart | None" = None,
    audit: "AuditPart | None" = None,
    upcycled: TablePart | None = None,
    stream: "StreamPart | None" = None,
    adapted: TablePart | None = None,
) -> str:
    """Return a self-contained HTML page of results and expert loads.

    `notes` say what columns mean, by label. `loads[arm][layer]` holds one number per expert, shares
    or counts: each layer is scaled to sum to one. `dead`, of the same shape, says which experts are
    dead; where it says nothing, an expert without any load is. An arm without layers, such as a
    dense model, is shown as such. The others are further sections: on gates of tasks, and on the
    life of a model, which gets experts, learns from a stream, is adapted and attacked.
    """
    table = as_columns(columns)
    body, numeric = cells(rows, table)
    return render(
        "routing.html",
        title=title,
        summary=summary,
        columns=table,
        body=body,
        numeric=numeric,
        notes=notes or {},
        arms=[
            load_table(arm, each, (dead or {}).get(arm, {})) for arm, each in loads.items() if each
        ],
        without=[arm for arm, each in loads.items() if not each],
        legend=[name for _, name in SHADES],
        settings=settings,
        command=command,
        tasks=tasks.view() if tasks else None,
        audit=audit.view() if audit else None,
        upcycled=upcycled.view() if upcycled else None,
        stream=stream.view() if stream else None,
        adapted=adapted.view() if adapted else None,
    )


def load_table(
    name: str, layers: Mapping[str, Sequence[float]], dead: Mapping[str, Sequence[bool]]
) -> dict[str, Any]:
    """Collect what a page shows of the loads of one model: its layers, shaded, and its dead."""
    strips = {
        layer: _strip(f"{name}, {layer}", load, dead.get(layer)) for layer, load in layers.items()
    }
    widest = max(len(strip) for strip in strips.values())
    buried = {
        layer: [expert for expert, cell in enumerate(strip) if cell.dead]
        for layer, strip in strips.items()
    }
    return {
        "name": name,
        "layers": strips,
        "experts": widest,
        "wide": widest > NARROW,
        "dead": {layer: experts for layer, experts in buried.items() if experts},
    }


def _strip(where: str, load: Sequence[float], dead: Sequence[bool] | None) -> list[Cell]:
    """Turn the loads of one layer into shaded cells."""
    if any(not math.isfinite(value) or value < 0 for value in load):
        raise ValueError(f"The loads of {where} must be finite and not negative, not {list(load)}.")
    if dead is not None and len(dead) != len(load):
        raise ValueError(f"{where} has {len(load)} loads, but `dead` names {len(dead)} experts.")
    total = sum(load)
    shares = [value / total if total else 0.0 for value in load]
    gone = dead if dead is not None else [value == 0 for value in load]
    return [
        Cell(_percent(share), shade(share * len(load)), bool(lost))
        for share, lost in zip(shares, gone)
    ]


def _percent(share: float) -> str:
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"  # little is not nothing


def shade(relative: float) -> int:
    """The step of SHADES that a number relative to what is even belongs to."""
    return next(step for step, (bound, _) in enumerate(SHADES) if relative < bound)
