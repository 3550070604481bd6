"""Keep routers that see the future out of blocks that must not: measured, not guessed.

A block is causal if changing the last token of the input leaves what it reads at all earlier
places unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..moe import MoE
from .blocks import Block
from .probe import Probe
from .trace import record


def refuse_noncausal(model: nn.Module, probe: Probe, blocks: list[Block], layer: MoE) -> None:
    """Raise if a layer that lets later tokens matter is to sit in a causal block."""
    if layer.causal:
        return
    causal = causal_blocks(model, probe, blocks)
    if causal:
        raise ValueError(
            f"with router {layer.router.name!r} (or this overflow or capacity) a token's output "
            f"depends on later tokens, and {causal[0]} is part of a causal model: choose other "
            "layers or another router, or pass allow_noncausal=True"
        )


def causal_blocks(model: nn.Module, probe: Probe, blocks: list[Block]) -> list[str]:
    """The names of the blocks that see no later token."""
    first = {c.name: c.x for c in record(model, probe).calls}
    causal = set()
    for batch, changed in _other_ends(probe):  # a decoder sees all of its encoder: one at a time
        second = {c.name: c.x for c in record(model, changed).calls}
        pairs = {b.name: (first[b.inner[0]], second[b.inner[0]]) for b in blocks}
        causal |= {name for name, (a, b) in pairs.items() if _only_the_end_moved(a, b, batch)}
    return [b.name for b in blocks if b.name in causal]


def _only_the_end_moved(a: Tensor, b: Tensor, batch: int) -> bool:
    """Whether two readings [B, L, D] (or [B·L, D]) differ, and at the last place alone."""
    away = (a - b).double().abs().reshape(-1, a.shape[-1]).amax(-1)
    if away.numel() % batch:
        return False
    moved = away.view(batch, -1) > 8 * torch.finfo(a.dtype).eps * a.double().abs().max()
    return bool(moved[:, -1].any()) and not bool(moved[:, :-1].any())


def _other_ends(probe: Probe) -> Iterator[tuple[int, Probe]]:
    """The probe with another last token (or vector) in one of its sequences; images have none."""
    words = dict(probe.kwargs)
    for place, value in enumerate(probe.args):
        if isinstance(value, Tensor) and value.dim() in (2, 3):
            args = (*probe.args[:place], _change(value), *probe.args[place + 1 :])
            yield value.shape[0], Probe(args, words)
    for word in words:
        if word.endswith("input_ids") or word == "inputs_embeds":
            changed = {**words, word: _change(words[word])}
            yield words[word].shape[0], Probe(probe.args, changed)


def _change(t: Tensor) -> Tensor:
    t = t.clone()
    if t.is_floating_point():
        t[:, -1] += 1.0
    else:
        differs = bool((t[:, 0] != t[:, -1]).all())
        t[:, -1] = t[:, 0] if differs else (t[:, -1] == 0).to(t.dtype)
    return t
