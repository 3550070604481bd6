"""The plots of a study: what plotly draws, and the same numbers as a text table.

A figure is plain JSON. Colours are names of the style sheet ("--c0", or "--c0/2e" with two digits
of opacity), which the page's script looks up, so that plots follow the scheme of the page.
"""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .routing import Cell, load_table
from .words import BYTES, THOUSANDS, apart, difference, missing, number, short, unit

COLOURS = 8
# Numbers of colours, symbols and dashes are coprime: arms differ by more than their colour.
SYMBOLS = ["circle", "square", "diamond", "cross", "triangle-up", "x", "star"]
WORDS = {"holds": "circle", "reversed": "x", "negligible": "diamond", "undecided": "circle-open"}
LABELLED = 16  # experts up to which cells and lines carry numbers and names
LONGEST = 34  # letters of the title of an axis
GAP = 0.03  # of the width, between points that would hide each other
SUMMED = ("compute", "training", "memory")  # metrics that count a cost, as studies call them
PERCENT = re.compile(r",?\.\d+%")


@dataclass(frozen=True)
class Figure:
    """A plot with its text table; `label` is what a screen reader says of it."""

    title: str
    label: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    columns: list[str]
    rows: list[list[str]]
    note: str = ""
    height: int = 340
    loads: dict[str, Any] | None = field(default=None)  # a table of shades, in place of `rows`
    matrix: dict[str, Any] | None = field(default=None)  # the same, of pairs of tasks


# -- the look of one arm ---------------------------------------------------------------------------


def colour(i: int) -> str:
    return f"--c{i % COLOURS}"


def marker(i: int, size: int) -> dict[str, Any]:
    return {"color": colour(i), "symbol": SYMBOLS[i % len(SYMBOLS)], "size": size}


def safe(name: str, longest: int = 26) -> str:
    """A name as plotly must get it, which reads tags in texts."""
    return html.escape(short(name, longest), quote=False)


def axis(title: str, form: str = "", **more: Any) -> dict[str, Any]:
    # Of percentages only: other numbers plotly writes with the digits that its ticks need.
    percent = {"tickformat": form.replace("%", "~%")} if PERCENT.fullmatch(form) else {}
    return {"title": {"text": safe(title, LONGEST)}, **percent, **more}


def form_of(result: Mapping[str, Any], metric: str) -> str:
    return str(result["metrics"].get(metric, {}).get("format", ".3g"))


def label_of(result: Mapping[str, Any], metric: str) -> str:
    known = result["metrics"].get(metric)
    return known["label"] if known else metric[:1].upper() + metric[1:]


def brief(label: str) -> str:
    """A label for an axis, without what follows a comma; the title has all of it."""
    return label.split(",")[0]


# -- verdicts --------------------------------------------------------------------------------------


def forest(result: Mapping[str, Any]) -> list[Figure]:
    """Every effect with its interval, in units of its margin, beside the band of ±δ."""
    claims = [(i, c) for i, c in enumerate(result["claims"], 1) if c["verdict"]["interval"]]
    if not claims:
        return []
    top = len(claims)
    ends = [end / c["margin"] for _, c in claims for end in c["verdict"]["interval"]]
    around = [min(-1.5, *ends) - 0.2, max(1.5, *ends) + 0.2]  # always with some room by the band
    layout = {
        "xaxis": axis("Effect ÷ δ", zeroline=True, range=around),
        "yaxis": {"visible": False, "range": [-0.6, top - 0.25], "fixedrange": True},
        "shapes": [_band(), *(_between(y + 0.62) for y in range(top - 1))],
        "annotations": [_row(result, i, c, top - 1 - n) for n, (i, c) in enumerate(claims)],
        "hovermode": "closest",
    }
    places = {i: top - 1 - n for n, (i, _) in enumerate(claims)}
    data = [_effects(word, [(places[i], c) for i, c in claims]) for word in WORDS]
    return [
        Figure(
            "Effects and intervals",
            f"Effects of {top} claims with 95 % intervals, beside the band of ±δ",
            [trace for trace in data if trace["x"]],
            layout,
            ["Claim", "Effect ÷ δ", "Low", "High", "δ", "Verdict"],
            [_effect_row(result, i, c) for i, c in claims],
            "In units of δ, the smallest effect that matters: the band is ±δ, and to its right the "
            "first arm is better. An interval is of one claim alone; verdicts are corrected for "
            + CORRECTED[bool(result["paper"])],
            height=120 + (54 if top <= 12 else 42) * top,
        )
    ]


CORRECTED = {
    False: "the number of claims and looks.",
    True: "the number of looks and of this study's claims; the ledger (moiety study claims) "
    "corrects them for all claims of the paper.",
}


def _band() -> dict[str, Any]:
    sides = {"x0": -1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper"}
    return {"type": "rect", **sides, "layer": "below", "fillcolor": "--band", "line": {"width": 0}}


def _between(y: float) -> dict[str, Any]:
    sides = {"x0": 0, "x1": 1, "xref": "paper", "y0": y, "y1": y}
    return {"type": "line", **sides, "layer": "below", "line": {"color": "--line", "width": 1}}


def _row(result: Mapping[str, Any], i: int, claim: Mapping[str, Any], y: int) -> dict[str, Any]:
    effect = difference(claim["verdict"]["effect"], form_of(result, claim["metric"]))
    a, b = apart(claim["a"], claim["b"])
    text = f"<b>{i}</b>  {safe(a, 17)} against {safe(b, 17)}: {effect}"
    place = {"xref": "paper", "x": 0, "xanchor": "left", "y": y + 0.22, "yanchor": "bottom"}
    return {"text": text, **place, "showarrow": False}


def _effects(word: str, claims: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    ours = [(y, c) for y, c in claims if c["verdict"]["word"] == word]
    scaled = [[value / c["margin"] for value in _effect(c)] for _, c in ours]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": word,
        "legendgroup": word,
        "x": [effect for effect, _, _ in scaled],
        "y": [y for y, _ in ours],
        "error_x": _errors(scaled, f"--{word}"),
        "marker": {"color": f"--{word}", "symbol": WORDS[word], "size": 11}
        | {"line": {"width": 2, "color": f"--{word}"}},
        "hovertemplate": "%{x:.2f} δ<extra></extra>",
    }


def _effect(claim: Mapping[str, Any]) -> tuple[float, float, float]:
    verdict = claim["verdict"]
    return (verdict["effect"], *verdict["interval"])


def _effect_row(result: Mapping[str, Any], i: int, claim: Mapping[str, Any]) -> list[str]:
    scaled = [number(value / claim["margin"], "+.2f") for value in _effect(claim)]
    margin = difference(claim["margin"], form_of(result, claim["metric"]), signed=False)
    return [f"{i}. {claim['a']} against {claim['b']}", *scaled, margin, claim["verdict"]["word"]]


def _errors(points: Sequence[Sequence[float | None]], colour: str) -> dict[str, Any]:
    """Bars from (mean, low, high); none where an end is missing."""
    up, down = [], []
    for mean, low, high in points:
        up.append(0 if mean is None or high is None else high - mean)
        down.append(0 if mean is None or low is None else mean - low)
    bars = {"type": "data", "symmetric": False, "array": up, "arrayminus": down}
    return {**bars, "color": colour, "thickness": 2, "width": 5}


# -- against cost, and loads -----------------------------------------------------------------------


def costs(result: Mapping[str, Any]) -> list[Figure]:
    """The main metric against active FLOPs, and against memory, where they were measured."""
    flops = _against(result, "flops", "Active FLOPs", "per example", THOUSANDS)
    memory = _against(result, "memory", "Memory", "", BYTES)
    summed = [_against_metric(result, name) for name in SUMMED]
    return [each for each in (flops, memory, *summed) if each]


def _against_metric(result: Mapping[str, Any], cost: str) -> Figure | None:
    """The main metric against one that counts a cost, in decades, where a study has such a one."""
    if result["metrics"].get(cost, {"better": "?"})["better"]:
        return None
    metric, what = result["main"], label_of(result, cost)
    label, form = label_of(result, metric), form_of(result, metric)
    points = []
    for i, arm in enumerate(result["arms"]):
        spent, value = (arm["metrics"].get(name) or {} for name in (cost, metric))
        if not missing(spent.get("mean")) and not missing(value.get("mean")):
            points.append((i, arm, value, spent["mean"]))
    if not points:
        return None
    rows = [
        [arm["name"], number(x, form_of(result, cost))]
        + [number(value.get(end), form) for end in ("mean", "low", "high")]
        for _, arm, value, x in points
    ]
    traces = [_point(*point) for point in points]
    below = what if len(what) <= LONGEST else brief(what)
    axes = {"xaxis": axis(below, type="log"), "yaxis": axis(brief(label), form)}
    spoken = f"{label} with 95 % interval against {what}, one point for each of {len(points)} arms"
    head = ["Arm", what, label, "Low", "High"]
    layout = {**axes, "hovermode": "closest"}
    return Figure(f"{brief(label)} against {brief(what)}", spoken, traces, layout, head, rows)


def _against(
    result: Mapping[str, Any], key: str, name: str, of: str, units: list[tuple[float, str]]
) -> Figure | None:
    metric, arms = result["main"], result["arms"]
    points = [(i, arm, arm["metrics"].get(metric) or {}) for i, arm in enumerate(arms)]
    points = [
        (i, arm, value)
        for i, arm, value in points
        if not missing(arm["cost"].get(key)) and not missing(value.get("mean"))
    ]
    if not points:
        return None
    size, prefix = unit(max(arm["cost"][key] for _, arm, _ in points), units)
    label, form = label_of(result, metric), form_of(result, metric)
    what = f"{name} {of}".strip() + (f", {prefix}" if prefix else "")
    values = [arm["cost"][key] / size for _, arm, _ in points]
    places, around = _apart(values)
    traces = [_point(i, arm, value, x) for (i, arm, value), x in zip(points, places)]
    rows = [
        [arm["name"], f"{arm['cost'][key] / size:.3g}"]
        + [number(value.get(end), form) for end in ("mean", "low", "high")]
        for _, arm, value in points
    ]
    axes = {"xaxis": axis(what, range=around), "yaxis": axis(brief(label), form)}
    spoken = f"{label} with 95 % interval against {what}, one point for each of {len(points)} arms"
    head = ["Arm", what, label, "Low", "High"]
    note = "Points that would hide each other stand a little apart." if places != values else ""
    layout = {**axes, "hovermode": "closest"}
    return Figure(f"{label} against {name}", spoken, traces, layout, head, rows, note)


def _apart(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The same numbers, those that nearly coincide moved apart, and the range of an axis.

    Where all are equal, the axis spans a tenth of their size, so that they still look equal.
    """
    lowest, highest = min(values), max(values)
    span = max(highest - lowest, 0.1 * highest) or 1.0
    groups: list[list[int]] = []
    for i in sorted(range(len(values)), key=lambda i: values[i]):
        if groups and values[i] - values[groups[-1][0]] < GAP * span:
            groups[-1].append(i)
        else:
            groups.append([i])
    moved = list(values)
    for group in groups:
        for n, i in enumerate(sorted(group)):
            moved[i] += GAP * span * (n - (len(group) - 1) / 2)
    room = max(0.15 * span, (span - highest + lowest) / 2)
    return moved, [lowest - room, highest + room]


def _point(i: int, arm: Mapping[str, Any], value: Mapping[str, Any], x: float) -> dict[str, Any]:
    bars = _errors([[value["mean"], value.get("low"), value.get("high")]], colour(i))
    dot = {"type": "scatter", "mode": "markers", "name": safe(arm["name"]), "legendgroup": str(i)}
    return {**dot, "x": [x], "y": [value["mean"]], "error_y": bars, "marker": marker(i, 11)}


def loads(result: Mapping[str, Any]) -> list[Figure]:
    """A heat-map for each arm: layers down, experts across, shaded against an even share."""
    return [_heat(arm, layers) for arm, layers in result["loads"].items() if layers]


def _heat(arm: str, layers: Mapping[str, Sequence[float]]) -> Figure:
    table = load_table(arm, layers, {})
    experts, strips = table["experts"], list(table["layers"].values())
    trace = {
        "type": "heatmap",
        "z": [[cell.shade for cell in strip] for strip in strips],
        "text": [[_share(cell) for cell in strip] for strip in strips],
        "hovertemplate": "expert %{x}: %{text}<extra></extra>",
        "colorscale": [[(i + j) / 7, f"--s{i}"] for i in range(7) for j in (0, 1)],
        "zmin": -0.5,
        "zmax": 6.5,
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
    }
    names = [safe(layer, 18) for layer in layers]
    bare = {"showgrid": False, "showline": False, "ticks": ""}
    layout = {
        "xaxis": {**bare, "side": "top", "dtick": 1 if experts <= LABELLED else 8},
        "yaxis": {**bare, "autorange": "reversed", "tickvals": list(range(len(names)))}
        | {"ticktext": names},
        "annotations": _shares(strips) if experts <= LABELLED else [],
    }
    spoken = f"{arm}: share of the load of {experts} experts in {len(names)} layers"
    height = 50 + 38 * len(names)
    return Figure(arm, spoken, [trace], layout, [], [], height=height, loads=table)


def _shares(strips: Sequence[Sequence[Cell]]) -> list[dict[str, Any]]:
    """The numbers in the cells, in the colour of text that the style sheet gives to each shade."""
    return [
        {"x": x, "y": y, "text": _share(cell), "showarrow": False}
        | {"font": {"size": 10, "color": f"--t{cell.shade}" if cell.shade > 2 else "--ink"}}
        for y, strip in enumerate(strips)
        for x, cell in enumerate(strip)
    ]


def _share(cell: Cell) -> str:
    share = html.escape(cell.share)
    return f"{share}<br>dead" if cell.dead else share
