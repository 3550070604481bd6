"""What upcycling a saved model would take, found out from its config alone."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn

from .. import cost, native
from ..experts import LowRank
from .blocks import Block, find_blocks
from .causal import refuse_noncausal
from .layers import select
from .loading import load_config, named_class
from .place import dense_module, place, shape_of
from .probe import Probe, make_probe
from .start import Start


@dataclass(frozen=True)
class Size:
    """What a model takes."""

    parameters: int
    trainable: int
    active: int  # parameters that work for one token
    flops: float  # forward, a token

    def weights(self, width: int) -> int:
        """Bytes of the weights, at `width` bytes a number."""
        return width * self.parameters

    def training(self, width: int) -> int:
        """Bytes of weights, gradients and the two states of AdamW, all of one type."""
        return width * (self.parameters + 3 * self.trainable)


@dataclass(frozen=True)
class Plan:
    """The blocks that would be replaced, and the model's size: dense, as asked, and low-rank."""

    model: str
    blocks: list[Block]
    found: int  # blocks that there are
    sizes: dict[str, Size]


def plan(
    name: str,
    asked: dict[str, Any],
    options: dict[str, Any],
    *,
    layers: Any = None,
    exact: bool = True,
    allow_noncausal: bool = False,
) -> Plan:
    """Refuse what `upcycle` would refuse, and count what it would make; no weights are read.

    asked: router, experts, init, rank, shards and amount, as `upcycle` takes them.
    """
    start = Start(**asked, options=options, frozen=None)
    model = hollow(name)
    inputs = make_probe(model)
    found = find_blocks(model, inputs)
    blocks = select(found, layers, model)
    if not allow_noncausal:
        refuse_noncausal(model, inputs, blocks, start.empty(blocks[0]))
    for block in blocks:
        start.check(block, exact)
    calls: Counter[str] = Counter()
    sizes = {"dense": _dense_size(model, inputs, blocks, calls)}
    for init, shapes in _without_weights(asked, options):
        sizes[init] = _size(model, blocks, shapes, sizes["dense"], calls)
    return Plan(type(model).__name__, blocks, len(found), sizes)


def hollow(name: str) -> Any:
    """The model with all its shapes and next to no memory.

    To find blocks it must run, so that its weights need values: each is an overlapping view of a
    few random numbers, in which no two rows are alike.
    """
    config = load_config(name)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{name} is quantised or has experts already: a dry run takes a dense one")
    kind = named_class(config)
    with init_empty_weights(include_buffers=False):
        model = transformers.AutoModel.from_config(config) if kind is None else kind(config)
    if native.blocks(model):
        raise ValueError(
            f"{name} has experts of its own, which a dry run cannot look past: `moiety health` "
            "shows what they do"
        )
    for module in model.modules():
        for word, p in list(module.named_parameters(recurse=False)):
            few = torch.randn(1 + sum(p.shape)) / max(p.shape[-1:], default=1) ** 0.5
            thin = few.as_strided(p.shape, [1] * p.dim())
            setattr(module, word, nn.Parameter(thin if p.dim() > 1 else 1 + thin / 9))
    model.tie_weights()
    return model.eval()


def _without_weights(asked: dict[str, Any], options: dict[str, Any]) -> Iterator[tuple[str, Start]]:
    """The start that is asked for, and low-rank beside it, as makers of layers without weights."""
    options = {**options, "balance": {}}  # losses are tried out on numbers, and there are none
    for init in dict.fromkeys((asked["init"], "low-rank")):
        words = {**asked, "init": init, "amount": None}
        if init != asked["init"]:
            words |= {"rank": None, "shards": None}
        if init in ("noise", "reinit"):
            words["init"] = "copy"  # of the same shapes
        yield init, Start(**words, options=options, frozen=None)


def _dense_size(model: nn.Module, inputs: Probe, blocks: list[Block], calls: Counter[str]) -> Size:
    """The size of the model as it is; `calls` counts how often each block runs."""
    number = cost.parameters(model)
    with contextlib.ExitStack() as stack:
        for block in blocks:
            count = lambda *_, name=block.name: calls.update([name])  # noqa: E731
            hook = model.get_submodule(block.outer).register_forward_hook(count)
            stack.callback(hook.remove)
        flops = cost.forward_flops(lambda: inputs.run(model), model)
    return Size(number, number, number, flops / _tokens(blocks))


def _size(
    model: nn.Module, blocks: list[Block], start: Start, dense: Size, calls: Counter[str]
) -> Size:
    """The size with mixtures in place of the blocks."""
    shapes, idle, flops = shape_of(model), 0.0, 0.0
    for block in blocks:
        x_TD = _rows(block)
        with torch.device("meta"):
            experts = (layer := start.layer(block, shapes)).experts
        decides = start.empty(block).eval()
        decide = partial(decides.route, x_TD, ids=torch.arange(x_TD.shape[0]))
        with torch.no_grad():
            routing = decide()
        more = cost.forward_flops(decide, decides) + experts.flops(routing)
        was, own = dense_module(model, block), cost.parameters(experts)
        if isinstance(experts, LowRank):
            own -= cost.parameters(experts.base)
        else:
            more -= cost.forward_flops(partial(was, x_TD), was)
        flops += more * calls[block.name]
        idle += own * (1 - float(routing.load().sum()) / x_TD.shape[0] / experts.experts)
        place(shapes, block, layer, shape_of(was))
    total, trainable = cost.parameters(shapes), cost.parameters(shapes, trainable=True)
    return Size(total, trainable, round(total - idle), dense.flops + flops / _tokens(blocks))


def _rows(block: Block) -> Tensor:
    """What the block read on the probe, as tokens."""
    assert block.x is not None
    return block.x.reshape(-1, block.dim)


def _tokens(blocks: list[Block]) -> int:
    return max(_rows(block).shape[0] for block in blocks)
