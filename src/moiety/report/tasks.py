"""What the gates of several tasks do: a table of gates, and how alike the tasks are.

gates        {arm: {task: {"selected", "binary", "binary_step", "weights"}}}
similarities {arm: {"tasks": [...], "values": [[...], ...]}}, from 0 (no expert in common) to 1
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from .figures import Figure, safe
from .table import Column, cells
from .words import MISSING, missing, number

NUMBERED = 8  # tasks up to which the cells of a picture carry numbers
TABLED = 16  # tasks up to which every pair is in the table; above, the nearest of each task
NEAREST = 3
SHOWN = 12  # tasks in the table of gates
DENSE = 24  # bars that stand without gaps
NAME = 16  # letters of a task at a picture; the table has all of them
# Shades of a cell by similarity: upper bound and its name in the legend.
LIKENESS = [
    (0.1, "below 0.1"),
    (0.25, "0.1–0.25"),
    (0.4, "0.25–0.4"),
    (0.6, "0.4–0.6"),
    (0.8, "0.6–0.8"),
    (0.95, "0.8–0.95"),
    (math.inf, "0.95 and more"),
]

Gates = Mapping[str, Mapping[str, Any]]
Likeness = Mapping[str, Any]


@dataclass(frozen=True)
class TaskPart:
    """What a routing page tells of gates of tasks: results, the gates, how alike the tasks are."""

    title: str
    summary: str
    rows: Sequence[Mapping[str, Any]]
    columns: Sequence[Column]
    gates: Mapping[str, Gates]
    similarity: Mapping[str, Likeness]
    notes: Mapping[str, str] = field(default_factory=dict)

    def view(self) -> dict[str, Any]:
        """As the template shows it."""
        body, numeric = cells(self.rows, self.columns)
        alike = {arm: likeness_table(arm, found) for arm, found in self.similarity.items()}
        return {
            "title": self.title,
            "summary": self.summary,
            "columns": self.columns,
            "body": body,
            "numeric": numeric,
            "notes": self.notes,
            "arms": [(each, alike.get(each["name"])) for each in gate_tables(self.gates)],
            "legend": [name for _, name in LIKENESS],
        }


# -- gates -----------------------------------------------------------------------------------------


def gate_tables(arms: Mapping[str, Gates]) -> list[dict[str, Any]]:
    """For each arm its gates, task by task, and a line that sums them up."""
    return [_gates(arm, gates) for arm, gates in arms.items() if gates]


def _gates(arm: str, gates: Gates) -> dict[str, Any]:
    shown = dict(list(gates.items())[:SHOWN])
    top = max((weight for gate in shown.values() for weight in gate["weights"]), default=0.0)
    return {
        "name": arm,
        "summary": _summary(gates),
        "binary": any(gate["binary"] is not None for gate in gates.values()),
        "rows": [_gate(task, gate, top) for task, gate in shown.items()],
        "hidden": len(gates) - len(shown),
        "dense": max(len(gate["weights"]) for gate in gates.values()) > DENSE,
    }


def _summary(gates: Gates) -> str:
    """How many experts a task uses, and what share of the gates is binary, in one sentence."""
    text = f"{number(fmean(g['selected'] for g in gates.values()), '.1f')} experts a task"
    shares = [g["binary"] for g in gates.values() if not missing(g["binary"])]
    if not shares:
        return f"{text}."
    steps = [g["binary_step"] for g in gates.values() if not missing(g["binary_step"])]
    since = f", from step {fmean(steps):,.0f} on average" if steps else ""
    return f"{text}; {fmean(shares):.0%} of the gates binary{since}."


def _gate(task: str, gate: Mapping[str, Any], top: float) -> dict[str, Any]:
    step = gate["binary_step"]
    return {
        "task": task,
        "selected": number(gate["selected"], ".1f"),
        "binary": MISSING if missing(gate["binary"]) else f"{gate['binary']:.0%}",
        "step": MISSING if missing(step) else f"{step:,.0f}",
        "bars": [
            {"height": round(100 * max(w, 0.0) / top) if top else 0, "text": f"{e}: {w:.3f}"}
            for e, w in enumerate(gate["weights"])
        ],
        "spoken": ", ".join(f"expert {e}: {w:.3f}" for e, w in enumerate(gate["weights"]) if w > 0)
        or "none",
    }


# -- similarity ------------------------------------------------------------------------------------


def likeness(value: float) -> int:
    """The step of LIKENESS that a similarity belongs to."""
    return next(step for step, (bound, _) in enumerate(LIKENESS) if value < bound)


def likeness_table(name: str, found: Likeness) -> dict[str, Any]:
    """The similarity of every pair of tasks, shaded, with its numbers."""
    return {
        "name": name,
        "tasks": list(found["tasks"]),
        "rows": [
            [{"text": number(value, ".2f"), "shade": likeness(value)} for value in row]
            for row in found["values"]
        ],
    }


def similarity(result: Mapping[str, Any]) -> list[Figure]:
    """A heat-map for each arm with several tasks: tasks down and across."""
    arms = (result.get("similarity") or {}).items()
    return [_heat(arm, found) for arm, found in arms if len(found["tasks"]) > 1]


def _heat(arm: str, found: Likeness) -> Figure:
    tasks, values = found["tasks"], found["values"]
    count = len(tasks)
    many = count > TABLED
    names = [safe(_both_ends(task)) for task in tasks]
    level = count <= 4 and max(map(len, names)) <= 8
    full = [safe(task, 60) for task in tasks]
    trace = {
        "type": "heatmap",
        "z": [[likeness(value) for value in row] for row in values],
        "text": [[number(value, ".2f") for value in row] for row in values],
        "x": list(range(count)),
        "y": list(range(count)),
        "customdata": [[[a, b] for b in full] for a in full] if not many else None,
        "hovertemplate": _hover(many),
        "colorscale": [[(i + j) / 7, f"--s{i}"] for i in range(7) for j in (0, 1)],
        "zmin": -0.5,
        "zmax": 6.5,
        "showscale": False,
        "xgap": 0 if many else 2,
        "ygap": 0 if many else 2,
    }
    bare = {"showgrid": False, "showline": False, "ticks": "", "constrain": "domain"}
    ticks = _ticks(names)
    layout = {
        "xaxis": {**bare, **ticks, "side": "top", "tickangle": 0 if level else -90},
        "yaxis": {**bare, **ticks, "autorange": "reversed", "scaleanchor": "x"},
        "annotations": _numbers(values) if count <= NUMBERED else [],
        "hovermode": "closest",
    }
    spoken = f"{arm}: how alike the gates of {count} tasks are, from 0 to 1"
    head, rows = (["Task", "Most like it", "Mean with others"], _nearest(tasks, values))
    matrix = None if many else likeness_table(arm, found)
    height = 480 if many else 200 + 32 * min(count, 9)
    return Figure(arm, spoken, [trace], layout, head, rows, height=height, matrix=matrix)


def _hover(many: bool) -> str:
    names = "%{y}, %{x}" if many else "%{customdata[0]}, %{customdata[1]}"
    return f"{names}: %{{text}}<extra></extra>"


def _both_ends(name: str) -> str:
    """A long name without its middle: tasks often differ at the end."""
    return name if len(name) <= NAME else f"{name[: NAME // 2]}…{name[1 - NAME // 2 :]}"


def _ticks(names: Sequence[str]) -> dict[str, Any]:
    """The names of the tasks; of many only some, so that they do not run into each other."""
    step = -(-len(names) // TABLED)
    places = list(range(0, len(names), step))
    return {"tickvals": places, "ticktext": [names[i] for i in places]}


def _numbers(values: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """The numbers in the cells, in the colour of text that the style sheet gives to each shade."""
    return [
        {"x": x, "y": y, "text": number(value, ".2f"), "showarrow": False}
        | {"font": {"size": 11, "color": f"--t{s}" if (s := likeness(value)) > 2 else "--ink"}}
        for y, row in enumerate(values)
        for x, value in enumerate(row)
    ]


def _nearest(tasks: Sequence[str], values: Sequence[Sequence[float]]) -> list[list[str]]:
    """For each task the ones that are most like it, and the mean with all others."""
    rows = []
    for i, row in enumerate(values):
        others = sorted((j for j in range(len(row)) if j != i), key=lambda j: -row[j])
        near = ", ".join(f"{tasks[j]} {number(row[j], '.2f')}" for j in others[:NEAREST])
        mean = fmean(row[j] for j in others) if others else None
        rows.append([tasks[i], near or MISSING, number(mean, ".2f")])
    return rows
