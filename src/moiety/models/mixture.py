"""`feedforward`: the part of a block that routers differ in, dense or mixed, at equal active FLOPs.

make = feedforward("top-k", hidden=128, experts=8, k=2)    # experts of width 64, two a token
model = PatchTransformer(patches=16, patch_dim=4, classes=10, feedforward=make)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..moe import MoE
from ..routing import build_router, describe
from ..routing.registry import find
from .patch_transformer import dense

DENSE = "dense"
# Learned scores without a pull towards balance: alone, a few experts soon take every token. They
# get the loss that `upcycle` gives them.
UNBALANCED = ("top-k", "cosine", "perturbed-cosine")
BALANCE = {"switch": 0.01}


def feedforward(
    router: str,
    *,
    hidden: int,
    experts: int = 8,
    k: int = 2,
    per_example: bool = True,
    **options: Any,
) -> Callable[[int], nn.Module]:
    """A maker of the feed-forward part of a block of some width.

    (experts at work for a token) × (width of an expert) = `hidden`, the width of the dense part.
    `options` are those of the router and of the layer; `per_example`: whether tokens of an example
    share the capacity that a router may have, so that no answer depends on the rest of its batch.
    """
    if router == DENSE:
        return lambda dim: dense(dim, hidden)
    words, active = settings(router, experts, k, per_example, options)
    width = max(round(hidden / active), 1)

    def make(dim: int) -> nn.Module:
        return MoE(router, experts, dim=dim, hidden=width, activation=F.gelu, **words)

    return make


def settings(
    router: str, experts: int, k: int, per_example: bool, options: dict[str, Any]
) -> tuple[dict[str, Any], float]:
    """The words for `MoE`, and how many experts work for a token."""
    owned, kind = describe(router).options, find(router)
    words: dict[str, Any] = {"balance": BALANCE} if router in UNBALANCED else {}
    if "k" in owned:
        words["k"] = k
    if "slots" in owned:
        words["slots"] = k  # such a gate starts dense and thins out by itself
    if "capacity_factor" in owned and not kind.causal:  # experts choose their tokens
        words["capacity_factor"] = float(k)
        words["group"] = "example" if per_example else None
        words |= options
        return words, float(words["capacity_factor"])
    words |= options
    own = {name: value for name, value in words.items() if name in owned}
    with torch.random.fork_rng(devices=[]):  # to ask only: nothing is drawn for the model
        built = build_router(router, dim=max(experts, 8), experts=experts, **own)
    return words, built.slots_per_token
