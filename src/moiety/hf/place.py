"""Put a mixture where a feed-forward block stood, and describe it so that it can be rebuilt.

A block that is a module of its own is replaced by `Mixed`. Where the code of a layer itself calls
the two linear maps, the first becomes a `Tap` that hands its input over, and the second `Mixed`,
which answers for the whole block: whatever the layer does in between runs on one column of zeros.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..experts import Experts, FeedForward, LowRank, ModuleExperts
from ..experts.feedforward import find_activation
from ..moe import MoE
from ..routing import Router, build_router
from ..routing.families import Families
from .blocks import Block
from .linear import is_linear, widths


class Tap(nn.Module):
    """Stands for an inner linear map: keeps x for the mixture, answers a column of zeros.

    Or as many as the map did, where the layer's code takes its answer apart into halves.
    """

    def __init__(self, columns: int = 1) -> None:
        super().__init__()
        self.columns = columns
        self.held: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.held = x
        return x.new_zeros(*x.shape[:-1], self.columns)

    def take(self) -> Tensor:
        x, self.held = self.held, None
        if x is None:
            raise ValueError("the mixture was called before the map whose input it reads")
        return x


class Mixed(nn.Module):
    """The mixture that stands for a feed-forward block."""

    def __init__(self, moe: MoE, block: Block, taps: tuple[Tap, ...], was: nn.Module) -> None:
        super().__init__()
        self.moe, self.block = moe, block
        # In tuples, so that torch does not take them for children: the taps have their own places,
        # and `was` is only the shape of the dense block (on the meta device), for the way back.
        self._taps, self._was = taps, (was,)
        _keep_dense_name(self, block.outer.removeprefix(block.name).split("."))

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self._taps:
            hidden_states = self._taps[0].take()
            for other in self._taps[1:]:
                other.held = None
        return F.dropout(self.moe(hidden_states), self.block.after, self.training)


def _keep_dense_name(mixed: Mixed, path: list[str]) -> None:
    """Hold the name of the dense outer weight in the state dict, with a shape no weight has.

    A program that knows nothing of mixtures then fails to load them into the dense model; without
    it, `from_pretrained` would only warn, and go on with random feed-forward blocks.
    """
    holder: nn.Module = mixed
    for part in filter(None, path):
        holder.add_module(part, nn.Module())
        holder = holder.get_submodule(part)
    like = next(p for p in mixed.moe.experts.parameters() if p.is_floating_point())
    holder.register_buffer("weight", like.new_zeros(1))


class Dense(nn.Module):
    """A block that was written out inside a layer, as a module: what low-rank experts correct."""

    def __init__(self, block: Block, inner: list[nn.Module], outer: nn.Module) -> None:
        super().__init__()
        self.inner, self.outer, self.block = nn.ModuleList(inner), outer, block
        assert block.activation is not None
        self.activation = find_activation(block.activation)

    def forward(self, x: Tensor) -> Tensor:
        outs = [linear(x) for linear in self.inner]
        if self.block.gated:
            first, second = outs if len(outs) == 2 else outs[0].chunk(2, -1)
            if self.block.swapped:
                first, second = second, first
            h = self.activation(first) * second
        else:
            h = self.activation(outs[0])
        return self.outer(F.dropout(h, self.block.dropout, self.training))


def dense_module(model: nn.Module, block: Block) -> nn.Module:
    """The block as one module: its owner, or its linear maps joined."""
    if block.owner is not None:
        return model.get_submodule(block.owner)
    inner = [model.get_submodule(name) for name in block.inner]
    return Dense(block, inner, model.get_submodule(block.outer))


def place(model: nn.Module, block: Block, moe: MoE, was: nn.Module) -> Mixed:
    """Put a mixture where the block stands; `was` is the block's shape on the meta device."""
    block = dataclasses.replace(block, x=None)
    columns = 2 * block.hidden if block.gated and len(block.inner) == 1 else 1
    taps = () if block.owner is not None else tuple(Tap(columns) for _ in block.inner)
    mixed = Mixed(moe, block, taps, was)
    mixed.train(model.get_submodule(block.outer).training)
    for name, tap in zip(block.inner, taps, strict=False):
        put(model, name, tap)
    put(model, block.name, mixed)
    _leave_fused_path(model, block.name)
    return mixed


def put(model: nn.Module, name: str, new: nn.Module) -> None:
    """Replace a submodule wherever it is registered."""
    old = model.get_submodule(name)
    for parent in list(model.modules()):
        for child, module in list(parent._modules.items()):
            if module is old:
                setattr(parent, child, new)


def _leave_fused_path(model: nn.Module, name: str) -> None:
    """torch's own encoder reads the linear maps' weights in eval, past their modules: not here."""
    path = name.split(".")
    for depth in range(len(path)):
        part = model.get_submodule(".".join(path[:depth]))
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False


def mixtures(model: nn.Module) -> Iterator[tuple[str, Mixed]]:
    for name, module in model.named_modules():
        if isinstance(module, Mixed):
            yield name, module


def shape_of(module: nn.Module) -> nn.Module:
    """A copy without memory."""
    empty = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in module.parameters()}
    buffers = {id(b): b.to("meta") for b in module.buffers()}
    return copy.deepcopy(module, {**empty, **buffers})


# -- to JSON and back ------------------------------------------------------------------------------


def describe_mixtures(model: nn.Module) -> list[dict[str, Any]]:
    """All that is needed, besides the dense model's own config, to rebuild the mixtures."""
    return [_describe(name, mixed) for name, mixed in mixtures(model)]


def moved(block: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """A described block after a module of it got a new name, because of what is around it now."""
    before, after = old.split("."), new.split(".")
    while before and after and before[-1] == after[-1]:
        before, after = before[:-1], after[:-1]

    def move(name: str) -> str:
        return ".".join([*after, *name.split(".")[len(before) :]])

    owner, inner, outer = block["owner"], block["inner"], block["outer"]
    return {
        **block,
        "owner": None if owner is None else move(owner),
        "inner": [move(name) for name in inner],
        "outer": move(outer),
    }


def _describe(name: str, mixed: Mixed) -> dict[str, Any]:
    block = dataclasses.asdict(dataclasses.replace(mixed.block, x=None))
    block.pop("x")
    block = moved(block, mixed.block.name, name)
    moe, router = mixed.moe, mixed.moe.router
    if router.options is None:
        raise ValueError(f"{router.name}: a router to be saved must be built by name")
    grown = None if router.families is None else router.families.parents.tolist()
    return {
        "block": block,
        "router": {"name": router.name, "experts": router.experts, "options": router.options},
        "experts": _describe_experts(moe.experts),
        "layer": {
            "capacity_factor": moe.capacity_factor,
            "overflow": moe.overflow,
            "group": moe.group,
            "balance": moe.balance,
        },
        "grown": grown,
    }


def _describe_experts(experts: Experts) -> dict[str, Any]:
    if isinstance(experts, LowRank):
        words = {"kind": "low-rank", "rank": experts.rank, "frozen": experts.frozen}
    elif isinstance(experts, FeedForward):
        bias = experts.b_in is not None
        words = {"kind": "feed-forward", "hidden": experts.hidden, "bias": bias}
    else:
        words = {"kind": "module"}
    return {**words, "count": experts.experts}


def rebuild(model: nn.Module, described: dict[str, Any]) -> Mixed:
    """Put one described mixture into a dense model; its experts' weights are on the meta device."""
    block = Block(**described["block"])
    _check_place(model, block)
    dense = dense_module(model, block)
    was = shape_of(dense)
    like = next(p for p in model.get_submodule(block.inner[0]).parameters())
    dtype = like.dtype if like.is_floating_point() else None
    # A router is small, and parts of it (what is not saved with it) are only right when it is
    # really built.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), fp32():
        router = _router(block.dim, described["router"], described["grown"]).to(dtype=dtype)
    with torch.device("meta"):
        experts = _empty_experts(block, described["experts"], was, dtype)
    return place(model, block, MoE(router, experts, **described["layer"]), was)


@contextlib.contextmanager
def fp32() -> Iterator[None]:
    """Build in fp32, whatever the default: some routers start from a factorisation, which has no
    half precision on a CPU, and loading sets the default to the type of the model.
    """
    was = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(was)


def _check_place(model: nn.Module, block: Block) -> None:
    for name in block.modules:
        try:
            model.get_submodule(name)
        except AttributeError:
            raise ValueError(
                f"{type(model).__name__} has no module {name!r}, where a mixture belongs"
            ) from None
    linears = [model.get_submodule(name) for name in (*block.inner, block.outer)]
    if not all(is_linear(linear) for linear in linears):
        raise ValueError(f"{block.name} is not the dense block that a mixture was made of")
    if widths(linears[-1]) != (block.hidden, block.dim):
        raise ValueError(
            f"{block.outer} maps {' to '.join(map(str, widths(linears[-1])))}, but the mixture was "
            f"made of one that maps {block.hidden} to {block.dim}"
        )


def _router(dim: int, words: dict[str, Any], grown: list[int] | None) -> Router:
    router = build_router(words["name"], dim=dim, experts=words["experts"], **words["options"])
    if grown:
        router.families = Families(dim, router.experts, next(router.parameters(), torch.empty(())))
        for copy_number, parent in enumerate(grown):
            if type(parent) is not int or not 0 <= parent < router.experts + copy_number:
                raise ValueError(f"a grown expert cannot be a copy of {parent!r}")
            router.families.add([parent])
    return router


def _empty_experts(
    block: Block, words: dict[str, Any], was: nn.Module, dtype: torch.dtype | None
) -> Experts:
    if words["kind"] == "low-rank":
        low = LowRank(
            shape_of(was), words["count"], block.dim, words["rank"], frozen=words["frozen"]
        )
        low.down.data, low.up.data = low.down.data.to(dtype), low.up.data.to(dtype)
        return low
    if words["kind"] == "module":
        return ModuleExperts((shape_of(was) for _ in range(words["count"])), dim=block.dim)
    if words["kind"] != "feed-forward" or block.activation is None:
        raise ValueError(f"there are no experts of the kind {words['kind']!r} for {block.name}")
    return FeedForward(
        words["count"],
        block.dim,
        words["hidden"],
        activation=block.activation,
        gated=block.gated,
        bias=words["bias"],
        dropout=block.dropout,
    ).to(dtype=dtype)
