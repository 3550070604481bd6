"""What is wrong with a layer, in plain sentences. The rules are written down in docs/health.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .health import LayerHealth

# With an even share of this many slots, an expert as good as the others goes without any with a
# probability of e⁻²⁰: below it, an idle or a busy expert says nothing.
ENOUGH = 20
# Padding is worth a word if it goes elsewhere than text, and there is enough of it to matter.
DISTANCE = 0.3  # total variation between where padding and where real tokens go
SHIFT = 0.05  # share of the load that goes elsewhere once padding is counted
EFFECTIVE = 0.5  # effective experts ÷ experts
OVERLOAD = 4.0  # largest load ÷ even share
DROPS = 0.05
WORST_FIRST = ("dead", "padding", "collapse", "overload", "drops", "static", "little")


@dataclass(frozen=True)
class Finding:
    """One sentence about one layer."""

    kind: str  # of WORST_FIRST
    layer: str
    text: str
    size: float  # how bad, to order findings of one kind


def find(layers: Sequence[LayerHealth]) -> list[Finding]:
    """All findings, worst first; none if there is no problem."""
    found = [finding for layer in layers for rule in RULES for finding in rule(layer)]
    return sorted(found, key=lambda f: (WORST_FIRST.index(f.kind), -f.size))


def dead(layer: LayerHealth) -> list[Finding]:
    if not layer.dead:
        return []
    names, count = _experts(layer.dead), len(layer.dead)
    if layer.static:
        text = f"the gate is the same for every token and leaves out {names}"
        return [Finding("static", layer.name, text, count)]
    if _few(layer):
        return []
    return [Finding("dead", layer.name, f"{names} got no token", count)]


def padding(layer: LayerHealth) -> list[Finding]:
    pad = layer.padding
    if _few(layer) or pad.distance < DISTANCE or pad.shift < SHIFT:
        return []
    gets = "gets" if len(pad.preferred) == 1 else "get"
    text = (
        f"padding takes {pad.share:.0%} of the slots and sends {pad.to_preferred:.0%} of them to "
        f"{_experts(pad.preferred)}, which {gets} {pad.real_there:.0%} of the real ones: "
        "balance figures and losses that count padding mislead"
    )
    return [Finding("padding", layer.name, text, pad.shift)]


def collapse(layer: LayerHealth) -> list[Finding]:
    part = layer.effective / layer.experts
    if part >= EFFECTIVE or layer.static or _few(layer):
        return []
    text = f"the work is spread as if there were {layer.effective:.1f} of {layer.experts} experts"
    return [Finding("collapse", layer.name, text, 1 - part)]


def overload(layer: LayerHealth) -> list[Finding]:
    if layer.peak < OVERLOAD or layer.static or _few(layer):
        return []
    busiest = layer.load.index(max(layer.load))
    text = (
        f"expert {busiest} does {layer.load[busiest]:.0%} of the work, "
        f"{layer.peak:.1f} times an even share"
    )
    return [Finding("overload", layer.name, text, layer.peak)]


def drops(layer: LayerHealth) -> list[Finding]:
    if layer.drop_rate < DROPS:
        return []
    what = "of the slots were cut by the capacity limit"
    if layer.by_expert:
        what = "of the tokens were chosen by no expert"
    text = f"{layer.drop_rate:.0%} {what}"
    return [Finding("drops", layer.name, text, layer.drop_rate)]


def little(layer: LayerHealth) -> list[Finding]:
    if not _few(layer) or layer.static:
        return []
    tokens = "1 token is" if layer.tokens == 1 else f"{layer.tokens} tokens are"
    idle = f" ({_experts(layer.dead)} got none)" if layer.dead else ""
    text = f"{tokens} too few to judge by{idle}: give at least {ENOUGH} slots an expert"
    return [Finding("little", layer.name, text, len(layer.dead))]


RULES = (dead, padding, collapse, overload, drops, little)


def _few(layer: LayerHealth) -> bool:
    """Whether chance alone would leave experts idle and overload others."""
    return layer.slots < ENOUGH * layer.experts


def _experts(ids: Sequence[int], most: int = 12) -> str:
    """ "expert 3", "experts 1 and 3", or the first dozen and how many more."""
    if len(ids) == 1:
        return f"expert {ids[0]}"
    if len(ids) > most:
        return f"experts {', '.join(map(str, ids[:most]))} and {len(ids) - most} more"
    return f"experts {', '.join(map(str, ids[:-1]))} and {ids[-1]}"
