"""`upcycle`: give a dense model experts, with proof that it still computes the same.

model = moiety.upcycle(model, experts=8, router="top-k", k=2, layers="last:4")
print(moiety.receipt(model))
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import cost, tokens
from ..experts import Experts, FeedForward, LowRank, ModuleExperts
from ..moe import MoE
from ..routing import Router, build_router, describe
from ..watch import moe_layers
from .blocks import Block, find_blocks, weight_of
from .layers import select
from .losses import join_losses
from .place import Mixed, dense_module, mixtures, place, shape_of
from .probe import Probe, evaluating, gap, make_probe
from .saving import remember

Init = Literal["copy", "noise", "reinit", "split", "low-rank"]
INITS = ("copy", "noise", "reinit", "split", "low-rank")
AMOUNT = {"noise": 0.01, "reinit": 0.5}
# A gap beyond what rounding makes of an unchanged function, by the bits of the type.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Receipt:
    """What upcycling changed, measured on a probe while the dense model was there."""

    gap: float  # ‖after − before‖ / ‖before‖, the largest over all outputs, on real tokens
    parameters_before: int
    parameters_after: int
    active_before: int
    active_after: int  # that work for one token
    flops_before: float  # forward, a token of the probe
    flops_after: float
    layers: list[str]
    init: str
    router: str

    def __str__(self) -> str:
        lines = [
            f"{len(self.layers)} blocks, {self.router}, init={self.init!r}",
            f"  relative output gap   {self.gap:.2e}",
            f"  parameters            {self.parameters_before:,} -> {self.parameters_after:,}",
            f"  active for a token    {self.active_before:,} -> {self.active_after:,}",
            f"  forward FLOPs a token {self.flops_before:,.0f} -> {self.flops_after:,.0f}",
        ]
        return "\n".join(lines)


def upcycle(
    model: nn.Module,
    experts: int = 8,
    router: str = "top-k",
    k: int | None = None,
    layers: str | list[str | int] | None = None,
    init: Init = "copy",
    probe: Any = None,
    inplace: bool = False,
    *,
    exact: bool = True,
    allow_noncausal: bool = False,
    rank: int = 8,
    shards: int | None = None,
    amount: float | None = None,
    frozen: bool = True,
    **options: Any,
) -> nn.Module:
    """Replace feed-forward blocks of a model by mixtures of experts.

    layers    None: all; "last:4", "every:2", a pattern of module names ("*.layers.1?.mlp"), or a
              list of names, patterns and positions
    init      "copy"      every expert is the dense block
              "noise"     plus normal noise of `amount` (0.01) × the weights' standard deviation
              "reinit"    a share `amount` (0.5) of each expert's hidden units drawn anew
              "split"     each expert is one of `shards` (default k) parts of the block's hidden
                          units; the parts of a block start with one router row
              "low-rank"  the block stays (`frozen` or not); experts are corrections of rank `rank`
    probe     inputs to find blocks and measure with: a dict, a tensor, a tuple; None: made from
              the config
    exact     refuse what changes the function; False allows it, and the receipt says by how much
    options   of the router, and capacity_factor, overflow, group, balance, backend of the layer

    The result is the same model (`inplace`) or a copy; `receipt(model)` is the proof.
    """
    _check(model, init, exact)
    if k is not None:
        options["k"] = k
    asked = make_probe(model, probe)
    blocks = select(find_blocks(model, asked), layers, model)
    plan = _Plan(router, experts, init, rank, shards, amount, frozen, options)
    with torch.device("meta"):
        trials = [plan.layer(block, None) for block in blocks]
    for block, trial in zip(blocks, trials, strict=True):
        plan.check(block, trial, exact)
    if not inplace:
        model = _copy(model, blocks, init)
        asked = make_probe(model, asked)
    if not allow_noncausal and not trials[0].causal:
        _refuse_causal(model, asked, blocks, trials[0])
    before = asked.outputs(model)
    cost_before = _cost(model, asked)
    for block in blocks:
        was = dense_module(model, block)
        place(model, block, plan.layer(block, was), shape_of(was))
    _wire(model)
    after = asked.outputs(model)
    moved = gap(before, after, asked.mask)
    if exact and not moved <= TOLERANCE.get(before[0].dtype if before else torch.float32, 1e-4):
        raise RuntimeError(
            f"the outputs moved by {moved:.1e} though {init!r} with {router!r} should keep them: "
            'take init="low-rank", or exact=False'
        )
    cost_after = _cost(model, asked)
    names = [block.name for block in blocks]
    found = Receipt(moved, *_pairs(cost_before, cost_after), names, init, router)
    remember(model, found)
    return model


def receipt(model: nn.Module) -> Receipt:
    """What `upcycle` measured on this model."""
    found = getattr(model, "_moiety_receipt", None)
    if found is None:
        raise ValueError(f"this {type(model).__name__} was not made by moiety.upcycle")
    return found
