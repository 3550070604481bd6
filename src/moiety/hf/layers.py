"""Which feed-forward blocks: all, "last:4", "every:2", patterns of module names, positions."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from torch import nn

from .. import native
from .blocks import Block
from .place import mixtures


def select(
    blocks: list[Block], layers: str | Sequence[str | int] | None, model: nn.Module
) -> list[Block]:
    """The blocks that `layers` names, in the order in which the model runs them."""
    done = len(list(mixtures(model)))
    if not blocks and (done or native.blocks(model)):
        whose = f"{done} blocks are mixtures already" if done else "it has experts of its own"
        raise ValueError(f"{type(model).__name__} has no other feed-forward block: {whose}")
    if not blocks:
        raise ValueError(
            f"no feed-forward block was found in {type(model).__name__}: there are no two linear "
            "maps (of nn.Linear or Conv1D) with an activation between them outside of experts, and "
            "no module with two that maps every token by itself"
        )
    if layers is None or layers == "all":
        return blocks
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        layers = [layers]
    chosen: list[Block] = []
    for word in layers:
        chosen += [b for b in _one(blocks, word) if b not in chosen]
    if not chosen:
        raise ValueError(
            "layers names no block: give a word, a pattern or a list that is not empty"
        )
    return [b for b in blocks if b in chosen]


def _one(blocks: list[Block], word: str | int) -> list[Block]:
    if isinstance(word, int) and not isinstance(word, bool):
        if not -len(blocks) <= word < len(blocks):
            raise ValueError(f"there is no block {word}: the model has {len(blocks)}, from 0")
        return [blocks[word]]
    if not isinstance(word, str):
        raise ValueError(f"layers takes words, patterns and positions, got {word!r}")
    counted = re.fullmatch(r"(first|last|every):(\d+)", word)
    if counted:
        return _counted(blocks, counted[1], int(counted[2]))
    hits = [b for b in blocks if any(fnmatch.fnmatchcase(n, word) for n in _names(b))]
    if not hits:
        names = [b.name for b in blocks]
        near = get_close_matches(word, names, n=3, cutoff=0.3) or names[:3]
        raise ValueError(
            f"layers={word!r} matches none of the {len(blocks)} feed-forward blocks; "
            f"near misses: {', '.join(near)}"
        )
    return hits


def _counted(blocks: list[Block], how: str, n: int) -> list[Block]:
    if n < 1 or (n > len(blocks) and how != "every"):
        raise ValueError(f"layers='{how}:{n}' does not fit: the model has {len(blocks)} blocks")
    if how == "every":  # every:2 is the second, the fourth, …, as in Switch and V-MoE
        if n > len(blocks):
            raise ValueError(f"layers='every:{n}' picks none of {len(blocks)} blocks")
        return blocks[n - 1 :: n]
    return blocks[:n] if how == "first" else blocks[-n:]


def _names(block: Block) -> list[str]:
    """The names a pattern may hit: the block's modules and whatever holds it."""
    path = block.name.split(".")
    return [*block.modules, *(".".join(path[:n]) for n in range(1, len(path)))]
