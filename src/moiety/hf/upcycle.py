"""`upcycle`: give a dense model experts, with proof that it still computes the same.

model = moiety.upcycle(model, experts=8, router="top-k", k=2, layers="last:4")
print(moiety.receipt(model))
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import PreTrainedModel

from .. import cost, tokens
from ..experts import Experts, LowRank
from ..watch import Routes, watch
from .blocks import Block, find_blocks
from .causal import refuse_noncausal
from .layers import select
from .linear import weight_of
from .losses import join_losses
from .padding import leak
from .place import dense_module, mixtures, place, shape_of
from .probe import Probe, evaluating, gap, make_probe
from .start import Init, Start
from .transformers_hook import mark

# A gap beyond what rounding makes of an unchanged function, in a deep model.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-1, torch.bfloat16: 5e-1}


@dataclass(frozen=True)
class Receipt:
    """What upcycling changed, measured on a probe while the dense model was there."""

    # The largest change of any number that the model answers (also after every layer, where it
    # says), on real tokens, relative to the root mean square of that output; where the probe was
    # made up, with and without padding.
    gap: float
    parameters_before: int
    parameters_after: int
    active_before: int  # parameters that work for one token
    active_after: int
    flops_before: float  # forward, a token of the probe
    flops_after: float
    layers: list[str]
    init: str
    router: str

    def __str__(self) -> str:
        lines = [
            f"{counted(len(self.layers), 'block')}, {self.router}, {self.init}; at the start:",
            f"  relative output gap   {self.gap:.2e}",
            f"  parameters            {self.parameters_before:,} -> {self.parameters_after:,}",
            f"  active for a token    {self.active_before:,} -> {self.active_after:,}",
            f"  forward FLOPs a token {self.flops_before:,.0f} -> {self.flops_after:,.0f}",
        ]
        return "\n".join(lines)


def counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


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
    rank: int | None = None,
    shards: int | None = None,
    amount: float | None = None,
    frozen: bool | None = None,
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
              "low-rank"  the block stays (`frozen`, or with False not); experts are corrections of
                          rank `rank` (8)
    probe     inputs to find blocks and measure with: a dict, a tensor, a tuple; None: made from
              the config
    exact     refuse what changes the function; False allows it, and the receipt says by how much
    options   of the router, and capacity_factor, overflow, group, balance, backend of the layer

    The result is the same model (`inplace`: dense weights are freed block by block, so that an
    interruption leaves it half done) or a copy; `receipt(model)` is the proof.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"upcycle takes a module, got {type(model).__name__}")
    _refuse_wrapped(model)
    if k is not None:
        options["k"] = k
    start = Start(
        router, experts, options, init, rank=rank, shards=shards, amount=amount, frozen=frozen
    )
    inputs = make_probe(model, probe)
    blocks = select(find_blocks(model, inputs), layers, model)
    if not allow_noncausal:  # everything is checked before anything changes
        refuse_noncausal(model, inputs, blocks, start.empty(blocks[0]))
    for block in blocks:
        start.check(block, exact)
        if init != "low-rank" and block.activation is not None:
            _refuse_quantised(model, block)
    padded = inputs.padded(model) if probe is None else None
    if exact and padded is not None and init != "low-rank":
        _refuse_leak(leak(model, blocks, padded), model)
    if not inplace:
        model = _copy(model, blocks, init)
    tokens_seen = max(_rows(block) for block in blocks)
    measured = [p for p in (inputs, padded) if p is not None]
    before, cost_before = [p.outputs(model) for p in measured], _cost(model, inputs, tokens_seen)
    for block in blocks:
        block.x = None
        was = shape_of(dense_module(model, block))
        place(model, block, start.layer(block, model), was)
    wire(model)
    moved = max(gap(b, p.outputs(model)) for b, p in zip(before, measured, strict=True))
    if exact and not moved <= _tolerance(model):
        raise RuntimeError(
            f"the outputs moved by {moved:.1e}, though {init!r} with {router!r} should keep them: "
            'take init="low-rank", or exact=False'
        )
    cost_after = _cost(model, inputs, tokens_seen)
    numbers = [n for pair in zip(cost_before, cost_after, strict=True) for n in pair]
    model._moiety_receipt = Receipt(moved, *numbers, [b.name for b in blocks], init, router)  # type: ignore
    return model


def wire(model: nn.Module) -> None:
    """Let mask and token ids reach the mixtures, their losses reach `outputs.loss`, and the model
    be saved as what it is.
    """
    _follow(model)
    if isinstance(model, PreTrainedModel):
        join_losses(model, {f"{name}.moe": mixed.moe for name, mixed in mixtures(model)})
        mark(model)


def _follow(model: nn.Module) -> None:
    """Hook the mixtures that are not hooked yet: a model may be upcycled twice."""
    layers = {f"{name}.moe": mixed.moe for name, mixed in mixtures(model)}
    new = {name: moe for name, moe in layers.items() if not moe._forward_pre_hooks}
    if new:
        tokens.follow(model, new)


def receipt(model: nn.Module) -> Receipt:
    """What `upcycle` measured on this model."""
    found = getattr(model, "_moiety_receipt", None)
    if found is None:
        raise ValueError(f"this {type(model).__name__} was not made by moiety.upcycle")
    return found


def _refuse_wrapped(model: nn.Module) -> None:
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    if inner is not model or model._compiled_call_impl is not None:
        raise ValueError(
            f"this {type(inner).__name__} is compiled or wrapped to run in parallel: upcycle the "
            "model itself, and compile or wrap the result"
        )
    wrapper = hasattr(model, "peft_config") and not isinstance(model, PreTrainedModel)
    if wrapper or any(hasattr(m, "adapter_layer_names") for m in model.modules()):
        raise ValueError(
            "the model has adapters of peft, which experts would not keep: upcycle it first and "
            "add adapters to the result, or merge them before (merge_and_unload)"
        )


def _refuse_quantised(model: nn.Module, block: Block) -> None:
    for name in (*block.inner, block.outer):
        weight = weight_of(model.get_submodule(name))
        if not weight.is_floating_point() or weight.element_size() < 2:
            raise ValueError(
                f"{name} is quantised ({weight.dtype}), and experts are not made of such weights: "
                'take init="low-rank", which keeps the block as it is'
            )


def _copy(model: nn.Module, blocks: list[Block], init: str) -> nn.Module:
    """A copy of the model; weights that will only be read and thrown away are not copied."""
    read_only = {}
    if init != "low-rank":
        maps = [model.get_submodule(n) for b in blocks if b.activation for n in (*b.inner, b.outer)]
        others = (m for m in model.modules() if m not in maps)
        tied = {p for m in others for p in m.parameters(recurse=False)}
        read_only = {id(p): p for m in maps for p in m.parameters() if p not in tied}
    return copy.deepcopy(model, read_only)


def _rows(block: Block) -> int:
    assert block.x is not None
    return block.x.shape[:-1].numel()


def _refuse_leak(moved: float, model: nn.Module) -> None:
    if moved > _tolerance(model):
        raise ValueError(
            f"{type(model).__name__} lets padding reach what it answers, and experts do not work "
            f"for padding: with a padded batch its outputs would move by {moved:.1e}; take "
            'init="low-rank", which keeps the block for padding too, or exact=False'
        )


def _tolerance(model: nn.Module) -> float:
    """Of the least precise type that the model computes in."""
    types = {p.dtype for p in model.parameters() if p.dtype in TOLERANCE}
    return max((TOLERANCE[dtype] for dtype in types), default=TOLERANCE[torch.float32])


def _cost(model: nn.Module, inputs: Probe, tokens_seen: int) -> tuple[int, int, float]:
    """Parameters, parameters that work for one token, forward FLOPs a token."""
    total = cost.parameters(model)
    layers = [mixed.moe for _, mixed in mixtures(model)]
    with evaluating(model), contextlib.ExitStack() as stack:
        # Each by itself: a model may hold mixtures of its own, which are not ours to watch.
        watched = [stack.enter_context(watch(layer)) for layer in layers]
        flops = cost.forward_flops(lambda: inputs.run(model), model)
    idle = sum(_idle(moe.experts, _slots(r)) for moe, r in zip(layers, watched, strict=True))
    return total, round(total - idle), flops / tokens_seen


def _slots(routes: Routes) -> float:
    """The experts of a layer that worked for a token."""
    (load,), (summary,) = routes.load().values(), routes.summary().values()
    return float(load.sum()) / max(summary.tokens, 1)


def _idle(experts: Experts, slots: float) -> float:
    """The parameters of a layer's experts that do not work for a token."""
    own = cost.parameters(experts)
    if isinstance(experts, LowRank):
        own -= cost.parameters(experts.base)
    return own * (1 - slots / experts.experts)
