"""The health page: what the experts of one model do, problems first.

html = health_page(health.as_dict(), title="Routing health of a model", settings={}, command="")
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .page import render
from .routing import SHADES, load_table, shade
from .table import Column, cells

# Layers whose pairs and tokens are shown unfolded, and experts up to which pairs carry numbers.
OPEN, NUMBERED = 2, 16
LONGEST = 40  # characters of a token
VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥"}
MINOR = ("static", "little")  # worth saying, not wrong
LAYERS = [
    Column("name", "Layer"),
    Column("experts", "Experts"),
    Column("effective", "Effective", ".2f"),
    Column("peak", "Largest load", ".2f"),
    Column("entropy", "Gate entropy", ".3f"),
    Column("relative_entropy", "÷ log E", ".1%"),
    Column("dead", "Dead"),
    Column("drop_rate", "Dropped", ".1%"),
    Column("padding", "Padding", ".1%"),
    Column("tokens", "Tokens", ",d"),
]
LAYER_NOTES = {
    "Effective": "e to the entropy of the load: as many equally busy experts would be as balanced",
    "Largest load": "of the busiest expert, relative to an even share",
    "Gate entropy": "mean over tokens, in nats; ÷ log E it is 100% for a gate that prefers no "
    "expert and 0% for one that is certain",
    "Dead": "experts without a single token",
    "Dropped": "share of the chosen slots that a capacity limit cut; where experts choose, share "
    "of the tokens that none chose",
    "Padding": "share of all slots, real and not, that padding takes",
}
PADDING = [
    Column("name", "Layer"),
    Column("share", "Padding", ".1%"),
    Column("effective", "Effective"),
    Column("peak", "Largest load"),
    Column("preferred", "Goes to"),
    Column("to_preferred", "of padding", ".1%"),
    Column("real_there", "of real tokens", ".1%"),
    Column("distance", "Distance", ".2f"),
    Column("shift", "Shift", ".1%"),
]
PADDING_NOTES = {
    "Effective, largest load": "as above → as they would be if padding were counted as text",
    "Goes to": "the fewest experts that take three quarters of the slots of padding, and their "
    "share of the slots of padding and of real tokens",
    "Distance": "total variation between where padding goes and where real tokens go: 0 is to the "
    "same experts, 1 to others altogether",
    "Shift": "the share of the load that goes to other experts once padding is counted",
}


def health_page(
    health: Mapping[str, Any], *, title: str, settings: Mapping[str, str], command: str
) -> str:
    """Return a self-contained page of a measured `Health`, given as plain values."""
    layers = health["layers"]
    shown = [
        {**layer, "dead": len(layer["dead"]), "padding": layer["padding"]["share"]}
        for layer in layers
    ]
    padded = [_padding(layer) for layer in layers if layer["padding"]["share"] > 0]
    layer_body, layer_numeric = cells(shown, LAYERS)
    padding_body, padding_numeric = cells(padded, PADDING)
    return render(
        "health.html",
        title=title,
        summary=_summary(health),
        findings=[{**each, "minor": each["kind"] in MINOR} for each in health["findings"]],
        layer_columns=LAYERS,
        layer_body=layer_body,
        layer_numeric=layer_numeric,
        layer_notes=LAYER_NOTES,
        loads=_loads(layers),
        legend=[name for _, name in SHADES],
        padding_columns=PADDING,
        padding_body=padding_body,
        padding_numeric=padding_numeric,
        padding_notes=PADDING_NOTES,
        pairs=[_pairs(layer) for layer in layers if layer["together"] or layer["pairs"]],
        typical=[_typical(layer) for layer in layers if layer["typical"]],
        least=5,
        open=OPEN,
        settings=settings,
        command=command,
    )


def _summary(health: Mapping[str, Any]) -> str:
    layers = health["layers"]
    sizes = sorted({layer["experts"] for layer in layers})
    tokens = sorted({layer["tokens"] for layer in layers})
    count = f"{len(layers)} layer{'s' if len(layers) > 1 else ''}"
    text = (
        f"{count} of {' or '.join(map(str, sizes))} experts, on {health['examples']:,} examples "
        f"with {' or '.join(f'{n:,}' for n in tokens)} tokens. "
        "Every figure counts real tokens only, unless it says padding."
    )
    return " ".join([text, *health["notes"]])


def _loads(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    loads = {layer["name"]: layer["load"] for layer in layers}
    dead = {
        layer["name"]: [expert in layer["dead"] for expert in range(layer["experts"])]
        for layer in layers
    }
    return load_table("Model", loads, dead)


def _padding(layer: Mapping[str, Any]) -> dict[str, Any]:
    pad = layer["padding"]
    shown = {
        **pad,
        "name": layer["name"],
        "effective": f"{layer['effective']:.2f} → {pad['effective']:.2f}",
        "peak": f"{layer['peak']:.2f} → {pad['peak']:.2f}",
        "preferred": ", ".join(map(str, pad["preferred"])),
    }
    if pad["shift"] < 0.005:  # padding that goes where text goes prefers nobody
        shown |= {"preferred": None, "to_preferred": None, "real_there": None}
    return shown


def _pairs(layer: Mapping[str, Any]) -> dict[str, Any]:
    top = "; ".join(
        f"{i} and {j} ({pair['lift']:.1f}×, {pair['tokens']:,} tokens)"
        for pair in layer["pairs"]
        for i, j in [pair["experts"]]
    )
    table = [[_lift(value) for value in row] for row in layer["together"] or []]
    return {
        "name": layer["name"],
        "table": table,
        "small": len(table) > NUMBERED,
        "top": top and f"Most together: {top}.",
    }


def _lift(value: float | None) -> dict[str, Any] | None:
    return None if value is None else {"text": f"{value:.1f}", "shade": shade(value)}


def _typical(layer: Mapping[str, Any]) -> dict[str, Any]:
    experts = [
        [
            {
                "text": _visible(token["text"], token["id"]),
                "lift": f"{token['lift']:.1f}×",
                "hint": f"id {token['id']}, {token['count']:,} times",
            }
            for token in tokens
        ]
        for tokens in layer["typical"]
    ]
    return {"name": layer["name"], "experts": experts}


def _visible(text: str | None, id: int) -> str:
    """A token with its white space and all that cannot be seen made visible; its id where it has no
    text, or only some bytes of a character."""
    if not text or "\ufffd" in text:
        return f"#{id}"
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return "".join(VISIBLE.get(c) or (c if c.isprintable() else _escaped(c)) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
