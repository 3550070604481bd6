"""What an attack does to the routing: how much of it changes, and whom it overloads."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from .chart import COLOURS, Series, lines
from .routing import load_table
from .tasks import LIKENESS, likeness
from .words import number

Result = Mapping[str, Any]
BYTE = 255


def cell(text: str, small: str = "") -> dict[str, str]:
    """A number in a table, with a smaller text below it."""
    return {"text": text, "small": small}


def table(
    caption: str, columns: Sequence[str], rows: Mapping[str, list[dict[str, str]]], bold: str = ""
) -> dict[str, Any]:
    """A table of cells by the name of their row; one of the rows may be bold."""
    body = [{"name": name, "cells": cells, "bold": name == bold} for name, cells in rows.items()]
    return {"caption": caption, "columns": columns, "rows": body}


def eps_text(eps: float) -> str:
    """Write a size as people do: 8/255, or 0.5."""
    return f"{round(eps * BYTE)}/{BYTE}" if eps and _whole(eps) else f"{eps:.3g}"


def eps_axis(eps: Sequence[float]) -> tuple[list[float], str]:
    """Sizes in steps of an image of bytes, where all of them are a few whole steps."""
    if all(map(_whole, eps)):
        return [float(round(each * BYTE)) for each in eps], f"ε, in 1/{BYTE}"
    return list(eps), "ε"


def _whole(eps: float) -> bool:
    """Whether a size is a few whole steps, and not a round decimal as well (0.2 is 51/255)."""
    if eps and eps == round(eps, 2):
        return False
    return eps < 0.5 and abs(eps * BYTE - round(eps * BYTE)) < 1e-6


def routing_view(result: Result, at: int) -> dict[str, Any] | None:
    """All that the page shows of the routing; nothing for a model that has none.

    `at` is the place of the ε whose loads are shown.
    """
    layers = result["routing"]
    if not layers:
        return None
    attacks, sizes = list(result["attacks"]), [eps_text(each) for each in result["eps"]]
    return {
        "noise": _noisy(result),
        "charts": _charts(result, attacks) if len(layers) <= COLOURS else [],
        "changes": [_changes(result, name, sizes) for name in attacks],
        "legend": _percents([bound for bound, _ in LIKENESS[:-1]]),
        "at": f"ε = {sizes[at]}",
        "loads": [_loads(layers, None, at), *(_loads(layers, name, at) for name in attacks)],
        "drops": _drops(layers, attacks, at),
    }


def _percents(bounds: Sequence[float]) -> list[str]:
    """Words for the shades between bounds."""
    words = [f"{bound:.0%}" for bound in bounds]
    between = [f"{low.removesuffix('%')}–{high}" for low, high in pairwise(words)]
    return [f"below {words[0]}", *between, f"{words[-1]} and more"]


def _noisy(result: Result) -> bool:
    return any(result["noise"]["change"].values())


def _charts(result: Result, attacks: Sequence[str]) -> list[dict[str, Any]]:
    """A chart for each attack, a line for each layer."""
    x, across = eps_axis(result["eps"])
    layers = result["routing"].items()
    changes = [v for _, layer in layers for a in attacks for v in layer["attacks"][a]["change"]]
    top = max([0.1, *(v for v in changes if v is not None)])  # one scale for all attacks
    return [
        {
            "name": name,
            "chart": lines(
                f"Routing change of every layer against ε under {name}",
                [Series(key, x, layer["attacks"][name]["change"]) for key, layer in layers],
                across=across,
                top=top,
            ),
        }
        for name in attacks
    ]


def _changes(result: Result, attack: str, sizes: Sequence[str]) -> dict[str, Any]:
    """The change of every layer at every ε, shaded."""
    noisy, noise = _noisy(result), result["noise"]["change"]
    rows = []
    for name, layer in result["routing"].items():
        values = [noise.get(name)] * noisy + list(layer["attacks"][attack]["change"])
        rows.append((name, [_shaded(value) for value in values]))
    return {"name": attack, "columns": ["no attack"] * noisy + [*sizes], "rows": rows}


def _shaded(value: float | None) -> dict[str, Any]:
    return {"text": number(value, ".1%"), "shade": likeness(value or 0.0)}


def _loads(layers: Result, attack: str | None, at: int) -> dict[str, Any]:
    """The load of every expert, clean or under an attack."""
    loads, dead = {}, {}
    for name, layer in layers.items():
        found = layer["clean"] if attack is None else layer["attacks"][attack]
        load, gone = found["load"], found["dead"]
        if attack is not None:
            load, gone = load[at], gone[at]
        loads[name] = load
        dead[name] = [expert in gone for expert in range(len(load))]
    return load_table(attack or "Clean", loads, dead)


def _drops(layers: Result, attacks: Sequence[str], at: int) -> dict[str, Any]:
    rows = {}
    for name, layer in layers.items():
        clean, hit = layer["clean"], [layer["attacks"][attack] for attack in attacks]
        found = [(each["dropped"][at], each["dead"][at]) for each in hit]
        rows[name] = [_dropped(*each) for each in [(clean["dropped"], clean["dead"]), *found]]
    caption = "Share of dropped slots, and dead experts, of every layer"
    return table(caption, ["Layer", "Clean", *attacks], rows)


def _dropped(share: float | None, dead: Sequence[int]) -> dict[str, str]:
    small = f"dead: {', '.join(map(str, dead))}" if dead else "none dead"
    return cell(number(share, ".1%"), small)
