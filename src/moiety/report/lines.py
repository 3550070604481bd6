"""The plots of a study that run over steps or trials: curves, gates, the search for settings."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from .figures import LABELLED, Figure, axis, brief, colour, form_of, label_of, marker, safe
from .words import missing, number

DASHES = ["solid", "dash", "dot", "dashdot", "longdash"]
ROWS = 12  # of a table that stands for a line
GATES = 4  # gates drawn of one arm


def curves(result: Mapping[str, Any]) -> list[Figure]:
    """One figure for each curve, with a line and a band for each arm."""
    place = {arm["name"]: i for i, arm in enumerate(result["arms"])}
    along, out = result.get("along", "Step"), []
    for name, arms in result["curves"].items():
        drawn = {arm: line for arm, line in arms.items() if line["step"]}
        if not drawn:
            continue
        known = [(place.get(arm, 0), arm, line) for arm, line in drawn.items()]
        bands = [band for i, _, line in known for band in _band(i, line)]
        lines = [_line(i, arm, line["step"], line["mean"]) for i, arm, line in known]
        # A curve is named like a metric, or like the data that the main metric was measured on.
        metric = name if name in result["metrics"] else f"{name} {result['main']}"
        label = label_of(result, metric if metric in result["metrics"] else name)
        form = form_of(result, metric)
        layout = {"xaxis": axis(along), "yaxis": axis(brief(label), form), "hovermode": "x"}
        spoken = (
            f"{label} by {along.lower()}: mean and 95 % interval over seeds of {', '.join(drawn)}"
        )
        rows = _curve_rows(drawn, form)
        out.append(Figure(label, spoken, bands + lines, layout, [along, *drawn], rows))
    return out


def _line(
    i: int, name: str, x: Sequence[float], y: Sequence[float | None], shape: str = "linear"
) -> dict[str, Any]:
    """A line that also its dashes and its few markers tell from others."""
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": safe(name),
        "legendgroup": str(i),
        "x": list(x),
        "y": list(y),
        "line": {"color": colour(i), "dash": DASHES[i % len(DASHES)], "width": 2, "shape": shape},
        "marker": marker(i, 7) | {"maxdisplayed": 8},
    }


def _band(i: int, line: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """The interval around a line; none where an end is missing, as with one seed."""
    if any(missing(value) for value in (*line["low"], *line["high"])):
        return []
    band = {"x": [*line["step"], *line["step"][::-1]], "y": [*line["high"], *line["low"][::-1]]}
    look = {"fill": "toself", "fillcolor": f"{colour(i)}/2e", "line": {"width": 0}}
    quiet = {"hoverinfo": "skip", "showlegend": False, "mode": "lines", "legendgroup": str(i)}
    return [{"type": "scatter", **band, **look, **quiet}]


def _curve_rows(arms: Mapping[str, Mapping[str, Any]], form: str) -> list[list[str]]:
    """Some steps; an arm shows its last value up to there, and nothing once it has ended."""
    steps = _thin(sorted({step for line in arms.values() for step in line["step"]}))
    return [[f"{s:,}", *(_at(line, s, form) for line in arms.values())] for s in steps]


def _at(line: Mapping[str, Any], step: float, form: str) -> str:
    i = bisect_right(line["step"], step) - 1
    if i < 0 or step > line["step"][-1]:
        return number(None)
    low, high = line["low"][i], line["high"][i]
    spread = "" if missing(low) or missing(high) else f" ± {number((high - low) / 2, form)}"
    return number(line["mean"][i], form) + spread


def trajectories(result: Mapping[str, Any]) -> list[Figure]:
    """The weight of every expert over the steps, a figure for each gate."""
    out = []
    for arm, gates in result["trajectories"].items():
        for label, gate in list(gates.items())[:GATES]:
            if not gate["step"]:
                continue
            experts = len(gate["values"][0])
            lines = [
                _line(e, f"expert {e}", gate["step"], [row[e] for row in gate["values"]])
                for e in range(experts)
            ]
            axes = {"xaxis": axis("Step"), "yaxis": axis("Weight", rangemode="tozero")}
            layout = {**axes, "hovermode": "closest", "showlegend": experts <= LABELLED}
            title, head = f"{arm}: {label}", ["Step", *(f"Expert {e}" for e in range(experts))]
            pairs = _thin(list(zip(gate["step"], gate["values"])))
            rows = [[f"{s:,}", *(number(v, ".3f") for v in values)] for s, values in pairs]
            spoken = f"Weights of {experts} experts by step, {title}"
            height = 340 + 9 * (experts if experts <= LABELLED else 0)  # the legend takes its part
            out.append(Figure(title, spoken, lines, layout, head, rows, height=height))
    return out


def tuning(result: Mapping[str, Any]) -> list[Figure]:
    """The best validation value after each trial of the search."""
    search = result.get("tuning")
    tried = search["arms"].items() if search else ()
    drawn = {name: arm["best"] for name, arm in tried if not all(map(missing, arm["best"]))}
    if search is None or not drawn:
        return []
    metric = search["metric"]
    place = {arm["name"]: i for i, arm in enumerate(result["arms"])}
    lines = [
        _line(place.get(name, 0), name, range(1, len(best) + 1), best, "hv")
        for name, best in drawn.items()
    ]
    label, form = label_of(result, metric), form_of(result, metric)
    axes = {"xaxis": axis("Trials"), "yaxis": axis(f"Best {brief(label)}", form)}
    title = f"Best {label} against trials"
    longest = max(map(len, drawn.values()))
    rows = [
        [str(n + 1), *(number(b[n] if n < len(b) else None, form) for b in drawn.values())]
        for n in _thin(range(longest))
    ]
    spoken = f"Best validation value of {label} against trials, of {', '.join(drawn)}"
    return [Figure(title, spoken, lines, {**axes, "hovermode": "x"}, ["Trials", *drawn], rows)]


def _thin(values: Sequence[Any], count: int = ROWS) -> list[Any]:
    """At most `count` of them, evenly, with the first and the last."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]
