"""How experts start from a dense block: copy, noise, reinit, split, low-rank.

`copy` computes the same function where the combine weights of a token sum to one and nothing is
dropped, `split` where the shards of a block are always chosen together, `low-rank` always.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..experts import Experts, FeedForward, LowRank, ModuleExperts
from ..moe import MoE
from ..routing import Router, describe
from .blocks import Block
from .linear import weight_of
from .place import dense_module

Init = Literal["copy", "noise", "reinit", "split", "low-rank"]
AMOUNT = {"noise": 0.01, "reinit": 0.5}
RANK = 8
# What may be asked of the layer; and of upcycle itself, for hints.
LAYER = ("capacity_factor", "overflow", "group", "balance", "backend")
ARGUMENTS = ("experts", "router", "layers", "init", "probe", "inplace", "exact", "allow_noncausal")
BELONGS = {
    "amount": tuple(AMOUNT),
    "shards": ("split",),
    "rank": ("low-rank",),
    "frozen": ("low-rank",),
}
# Learned scores with neither a balance loss nor another pull of their own: trained like that, a few
# experts soon take every token, and nobody upcycles a model for that.
UNBALANCED = ("top-k", "cosine", "perturbed-cosine")


@dataclass
class Start:
    """What `upcycle` was asked for, as a maker of layers."""

    router: str
    experts: int
    options: dict[str, Any]
    init: Init
    rank: int | None
    shards: int | None
    amount: float | None
    frozen: bool | None

    def __post_init__(self) -> None:
        if not isinstance(self.router, str):
            raise ValueError(
                f"router must be a name, such as 'top-k', got {type(self.router).__name__}"
            )
        if self.init not in get_args(Init):
            raise ValueError(f"init must be one of {', '.join(get_args(Init))}, got {self.init!r}")
        for word, inits in BELONGS.items():
            if getattr(self, word) is not None and self.init not in inits:
                raise ValueError(f"{word} is about {' and '.join(inits)}, not about {self.init!r}")
        if self.amount is None:
            self.amount = AMOUNT.get(self.init, 0.0)
        number = isinstance(self.amount, (int, float)) and 0 <= self.amount < float("inf")
        if not number or (self.init == "reinit" and self.amount > 1):
            raise ValueError(
                f"amount must be a share from 0 to 1 (noise: 0 or more), got {self.amount}"
            )
        self._check_names()
        if "renormalise" in describe(self.router).options:
            self.options = {"renormalise": True, **self.options}
        if self.router in UNBALANCED and self.options.get("balance") is None:
            self.options = {**self.options, "balance": {"switch": 0.01}}

    def _check_names(self) -> None:
        own, unknown = describe(self.router).options, set(self.options)
        unknown -= {*own, *LAYER}
        if unknown:
            word = min(unknown)
            near = get_close_matches(word, [*own, *LAYER, *ARGUMENTS], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"router {self.router!r} has no option {word!r}{hint} (it has "
                f"{', '.join(own) or 'none'}, and the layer {', '.join(LAYER)})"
            )

    def try_out(self) -> None:
        """Raise for what no block could take; the width is a guess."""
        self.empty(Block(None, [], "", 1024, 4096, None))

    def layer(self, block: Block, model: nn.Module) -> MoE:
        """The mixture for one block of a model, on its device and in its type."""
        experts = self._experts(block, model)
        like = next(p for p in model.get_submodule(block.inner[0]).parameters())  # reads the tokens
        dtype = like.dtype if like.is_floating_point() else torch.float32  # a quantised base
        layer = MoE(self.router, experts, **self.options)
        layer.router.to(like.device, dtype)
        if isinstance(experts, LowRank):
            experts.down.data = experts.down.data.to(like.device, dtype)
            experts.up.data = experts.up.data.to(like.device, dtype)
        if self.init == "split":
            share_rows(layer.router, self._shards(layer.router))
        return layer

    def empty(self, block: Block) -> MoE:
        """The same layer without weights, to ask what it will be."""
        with torch.random.fork_rng(devices=[]):
            with torch.device("meta"):
                experts = FeedForward(self.experts, block.dim, 1)
            layer = MoE(self.router, experts, **self.options)
            if self.init == "split":
                share_rows(layer.router, self._shards(layer.router))
            return layer

    def check(self, block: Block, exact: bool) -> None:
        """Raise for what cannot be made of this block, or would not keep its function."""
        layer = self.empty(block)
        if block.activation is None and self.init in ("reinit", "split"):
            raise ValueError(
                f"{block.name} is not a plain feed-forward block, so {self.init!r} cannot be made "
                'of it: take init="copy" or "low-rank"'
            )
        if self.init == "split" and block.hidden % self._shards(layer.router):
            raise ValueError(
                f"{block.name} has {block.hidden} hidden units, which {self._shards(layer.router)} "
                "shards do not divide"
            )
        if self.init == "low-rank":
            self._rank(block)
        why = self._why_inexact(layer)
        if exact and why:
            raise ValueError(
                f"init={self.init!r} with router {self.router!r} would change the outputs: {why}; "
                'take init="low-rank", which never does, or allow it with exact=False'
            )

    def _why_inexact(self, layer: MoE) -> str | None:
        if self.init == "low-rank":
            return None
        if self.init in AMOUNT:
            return "it changes the experts' weights"
        if layer.router.weights_sum != "one":
            return "the weights of a token need not sum to one"
        limit = layer.capacity_factor or getattr(layer.router, "capacity_factor", None)
        if limit is not None:
            return "a capacity may drop tokens"
        if self.init == "split" and not keeps_shards(layer.router, self._shards(layer.router)):
            return "the shards of a block are not always chosen together"
        return None

    def _shards(self, router: Router) -> int:
        shards = (getattr(router, "k", None) or 1) if self.shards is None else self.shards
        if not isinstance(shards, int) or shards < 1 or self.experts % shards:
            raise ValueError(f"shards must divide the {self.experts} experts, got {shards!r}")
        return shards

    def _rank(self, block: Block) -> int:
        rank = min(RANK, block.dim) if self.rank is None else self.rank
        if not isinstance(rank, int) or not 1 <= rank <= block.dim:
            raise ValueError(
                f"rank must be a whole number from 1 to the width {block.dim} of {block.name}, "
                f"got {rank!r}"
            )
        return rank

    def _experts(self, block: Block, model: nn.Module) -> Experts:
        if self.init == "low-rank":
            base = dense_module(model, block)
            frozen = self.frozen is not False
            return LowRank(base, self.experts, block.dim, self._rank(block), frozen=frozen)
        if block.activation is None:
            return self._modules(block, dense_module(model, block))
        return self._feed_forward(block, model)

    def _modules(self, block: Block, dense: nn.Module) -> ModuleExperts:
        members = [copy.deepcopy(dense) for _ in range(self.experts)]
        if self.init == "noise":
            for p in (p for m in members for p in m.parameters()):
                _add_noise(p.data, self.amount or 0.0)
        return ModuleExperts(members, dim=block.dim)

    @torch.no_grad()
    def _feed_forward(self, block: Block, model: nn.Module) -> FeedForward:
        w_in, b_in, w_out, b_out = dense_weights(block, model)
        shards = self._shards(self.empty(block).router) if self.init == "split" else 1
        hidden, bias = block.hidden // shards, b_in is not None or b_out is not None
        assert block.activation is not None
        with torch.device("meta"):  # no memory is touched twice
            experts = FeedForward(
                self.experts,
                block.dim,
                hidden,
                activation=block.activation,
                gated=block.gated,
                bias=bias,
                dropout=block.dropout,
            ).to(w_in.dtype)
        experts = experts.to_empty(device=w_in.device)
        wide = torch.arange(block.hidden, device=w_in.device).chunk(shards)
        for e in range(self.experts):
            units = wide[e % shards]
            rows = torch.cat([units, units + block.hidden]) if block.gated else units
            experts.w_in[e] = w_in if shards == 1 else w_in[rows]
            # A token's weights sum to one over the shards, so each counts for all of them; the
            # output bias, which every shard holds, then counts once.
            experts.w_out[e] = w_out if shards == 1 else w_out[:, units] * shards
            if experts.b_in is not None and experts.b_out is not None:
                experts.b_in[e] = 0.0 if b_in is None else b_in[rows]
                experts.b_out[e] = 0.0 if b_out is None else b_out
        if self.init == "noise":
            for p in experts.parameters():
                _add_noise(p.data, self.amount or 0.0)
        if self.init == "reinit":
            _draw_anew(experts, self.amount or 0.0)
        return experts


def dense_weights(
    block: Block, model: nn.Module
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """(w_in, b_in, w_out, b_out) of a block, the activated half first."""
    inner: list[Any] = [model.get_submodule(name) for name in block.inner]
    outer: Any = model.get_submodule(block.outer)
    weights, biases = [weight_of(m) for m in inner], [m.bias for m in inner]
    w_in = weights[0] if len(inner) == 1 else torch.cat(weights)
    b_in = biases[0] if len(inner) == 1 else None
    if len(inner) == 2 and any(b is not None for b in biases):
        b_in = torch.cat(
            [
                w.new_zeros(w.shape[0]) if b is None else b
                for w, b in zip(weights, biases, strict=True)
            ]
        )
    if block.swapped:
        w_in = torch.cat(w_in.chunk(2)[::-1])
        b_in = None if b_in is None else torch.cat(b_in.chunk(2)[::-1])
    return w_in, b_in, weight_of(outer), outer.bias


@torch.no_grad()
def share_rows(router: Router, shards: int) -> None:
    """Let the shards of a block start with one router row."""
    for name in router.per_expert:
        rows = getattr(router, name, None)
        if rows is not None:
            rows.copy_(rows[::shards].repeat_interleave(shards, 0))


@torch.no_grad()
def keeps_shards(router: Router, shards: int) -> bool:
    """Whether, with shared rows, a token's weight is spread evenly over whole blocks."""
    if router.needs_ids:
        return False
    x_TD = torch.randn(64, router.dim, generator=torch.Generator().manual_seed(0))
    routing = copy.deepcopy(router).eval()(x_TD)
    weight = routing.dense().view(64, -1, shards)
    whole = routing.choice().view(64, -1, shards)
    together = bool((whole.all(-1) == whole.any(-1)).all())
    return together and torch.allclose(weight, weight[..., :1].expand_as(weight), atol=1e-6)


def _add_noise(w: Tensor, amount: float) -> None:
    if w.numel() > 1:
        w.add_(torch.randn_like(w), alpha=amount * float(w.float().std()))


def _draw_anew(experts: FeedForward, share: float) -> None:
    """Redraw a share of each expert's hidden units from the normal law of the weights they had."""
    count = round(share * experts.hidden)
    for e in range(experts.experts):
        units = torch.randperm(experts.hidden)[:count].to(experts.w_in.device)
        rows = torch.cat([units, units + experts.hidden]) if experts.gated else units
        for w, at in ((experts.w_in[e], (rows,)), (experts.w_out[e], (slice(None), units))):
            mean, std = float(w.float().mean()), float(w.float().std())
            w[at] = torch.randn_like(w[at]) * std + mean
        if experts.b_in is not None:
            experts.b_in[e][rows] = 0.0
