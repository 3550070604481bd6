"""`MoE`: the layer. Router + experts (+ capacity, shared experts, balance losses).

layer = MoE("top-k", dim=64, hidden=256, experts=8, k=2, balance={"switch": 0.01})
y = layer(x)                        # x: [..., dim]
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .experts import Experts, FeedForward
from .routing import Router, Routing, balance, build_router, capacity, describe
from .routing.base import keep_real, recomputing

_FEEDFORWARD = tuple(inspect.signature(FeedForward).parameters)[3:]


class Recorder(Protocol):
    """What a layer tells its decisions to: `watch` attaches one."""

    collects: bool  # it takes the losses, so that somebody adds them to the training loss

    def add(self, name: str, routing: Routing, terms: dict[str, Tensor]) -> None: ...


class MoE(nn.Module):
    """A mixture-of-experts layer.

    router, experts   objects; or a router's name and a number, with `dim`, `hidden` and options of
                      the router and of `FeedForward`; or a name, an Experts object and options of
                      the router
    capacity_factor   an expert takes at most ceil(S·K·factor/E) slots of a group of S tokens, in
                      eval as well; None: no limit but the router's own (`switch` has one)
    overflow          who goes first: "order" (by position) or "priority" (by gate, not causal)
    group             the examples (along the first axis of x) that share a capacity: a number,
                      "example" for one, None for the whole batch; the last may be smaller
    shared            a module that every token passes besides its experts
    balance           loss weights by name (docs/losses.md), collected by `moiety.watch`; None: the
                      router's own defaults
    backend           "auto", "loop", "grouped" or "dense"; `moiety.explain(layer)` says which
    """

    router: Router
    experts: Experts
    shared: nn.Module | None

    def __init__(
        self,
        router: Router | str,
        experts: Experts | int | None = None,
        *,
        dim: int | None = None,
        hidden: int | None = None,
        capacity_factor: float | None = None,
        overflow: capacity.Overflow = "order",
        group: int | str | None = None,
        shared: nn.Module | None = None,
        balance: dict[str, float] | None = None,
        backend: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(router, (str, Router)):
            raise ValueError(f"router must be a name or a Router, got {type(router).__name__}")
        if isinstance(router, str):
            owned = describe(router).options  # switch and expert choice have their own capacity
            if "overflow" in owned:
                options["overflow"] = overflow
            if "capacity_factor" in owned and capacity_factor is not None:
                options["capacity_factor"], capacity_factor = capacity_factor, None
            router, experts = _build(router, experts, dim, hidden, options)
        else:
            _check_objects(experts, {"dim": dim, "hidden": hidden, **options})
        assert isinstance(experts, Experts)
        self.router, self.experts, self.shared = router, experts, shared
        self.capacity_factor, self.overflow, self.group = capacity_factor, overflow, group
        self.backend = backend
        self.balance = _balance(router, balance)
        self._check()
        self._watchers: tuple[tuple[str, Recorder], ...] = ()
        self._replayed: Replayed | None = None
        self._warned = False

    def _check(self) -> None:
        if self.router.total != self.experts.experts or self.router.dim != self.experts.dim:
            raise ValueError(
                f"the router is for {self.router.total} experts of width {self.router.dim}, the "
                f"experts are {self.experts.experts} of width {self.experts.dim}"
            )
        if self.shared is not None and not isinstance(self.shared, nn.Module):
            raise ValueError(f"shared must be a module, got {type(self.shared).__name__}")
        backends = ("auto", *self.experts.backends)
        if self.backend not in backends:
            raise ValueError(
                f"backend must be one of {', '.join(backends)} for {type(self.experts).__name__}, "
                f"got {self.backend!r}"
            )
        if self.overflow not in ("order", "priority"):
            raise ValueError(f'overflow must be "order" or "priority", got {self.overflow!r}')
        factor = self.capacity_factor
        numeric = isinstance(factor, (int, float)) and 0 < factor < float("inf")
        if factor is not None and not numeric:
            raise ValueError(f"capacity_factor must be a positive number, got {factor!r}")
        whole = type(self.group) is int and self.group >= 1
        if self.group not in (None, "example") and not whole:
            raise ValueError(
                f'group must be None, "example" or a number of examples, got {self.group!r}'
            )
        limited = factor is not None or getattr(self.router, "capacity_factor", None) is not None
        if not limited and (self.overflow != "order" or self.group is not None):
            raise ValueError(
                "overflow and group are about a capacity, and there is none: set capacity_factor"
            )

    @property
    def causal(self) -> bool:
        """Whether a token's output never depends on what later tokens hold.

        How many there are matters under any capacity limit, since that sets the capacity: to
        generate token by token, have none. And all first choices are placed before any second one,
        so that with more than one slot a token a later token can push out an earlier one.
        """
        limited = self.capacity_factor is not None
        coupled = limited and (self.overflow == "priority" or self.router.slots_per_token > 1)
        return self.router.causal and not coupled

    def couples(self, group: int = 1) -> str | None:
        """Why examples of different groups of `group` influence each other; None: they do not."""
        if self.router.positional:
            return "the choice depends on a token's place in the batch"
        limited = self.capacity_factor is not None
        if not limited and getattr(self.router, "capacity_factor", None) is None:
            return None
        size = 1 if self.group == "example" else self.group
        if isinstance(size, int) and group % size == 0:
            return None
        who = "a whole batch shares" if size is None else f"{size} examples share"
        return f"{who} the capacity of the experts"

    def forward(self, x: Tensor, mask: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """Run the layer; `mask` (True = real) and `ids` (token ids) have x's leading shape."""
        lead = x.shape[:-1]
        if x.dim() == 0 or x.shape[-1] != self.router.dim:
            raise ValueError(f"expected x of shape [..., {self.router.dim}], got {list(x.shape)}")
        x_TD = x.reshape(-1, x.shape[-1])
        routing = self.route(x_TD, _flat(mask, lead, "mask"), _flat(ids, lead, "ids"), lead)
        self._record(routing)
        y_TD = self.experts(x_TD, routing, self.backend)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD).to(y_TD.dtype)
        return y_TD.view(*lead, y_TD.shape[-1])

    def route(
        self,
        x_TD: Tensor,
        mask: Tensor | None = None,
        ids: Tensor | None = None,
        lead: Sequence[int] = (),
    ) -> Routing:
        """The decision for these tokens: the router's, within capacity, or the one replayed."""
        group = self._group_tokens(x_TD.shape[0], lead)
        if mask is not None:
            if mask.is_floating_point():  # an additive mask (0 and -inf) would read inside out
                raise ValueError(f"mask must be bool or integer (1 = real), got {mask.dtype}")
            mask = mask.bool()
        routing = self.router(x_TD, mask, ids, group)
        if self._replayed is not None:
            return keep_real(self._replayed.take(self._replayed.next(), routing), mask)
        if self.capacity_factor is not None:
            routing = capacity.limit(
                routing,
                self.capacity_factor,
                overflow=self.overflow,
                group=group,
                mask=mask,
                families=self.router.families,
            )
        return routing

    def _group_tokens(self, tokens: int, lead: Sequence[int]) -> int | None:
        if self.group is None:
            return None
        examples = 1 if self.group == "example" else int(self.group)
        return examples * max(tokens // max(lead[0] if lead else tokens, 1), 1)

    def _record(self, routing: Routing) -> None:
        # With gradients on, the losses are made also where nobody collects them: gradient
        # checkpointing repeats a forward, perhaps after the watch, and must save the same tensors.
        terms = {}
        if self._watchers or torch.is_grad_enabled():
            terms = balance.terms(routing, self.balance)
        if recomputing():
            return
        for name, routes in self._watchers:
            routes.add(name, routing, terms)
        if torch.compiler.is_compiling() or self._warned:
            return
        if terms and self.training and not any(r.collects for _, r in self._watchers):
            self._warned = True
            warnings.warn(
                f"balance losses {self.balance} are set but nothing collects them: train inside "
                "`with moiety.watch(model) as routes` and add `routes.loss()` to the loss, or "
                "set balance={}",
                stacklevel=3,
            )

    def flops(self, routing: Routing) -> float:
        """Active forward FLOPs of the experts for a decision."""
        return self.experts.flops(routing)

    def extra_repr(self) -> str:
        limit = "" if self.capacity_factor is None else f", capacity_factor={self.capacity_factor}"
        return f"balance={self.balance}{limit}, backend={self.backend!r}"


def explain(layer: MoE, x: Tensor | None = None) -> str:
    """Say which backend a layer runs and why, for `x` or for one batch of 1024 tokens."""
    if not isinstance(layer, MoE):
        raise ValueError(f"explain takes an MoE layer, got {type(layer).__name__}")
    like = next(layer.experts.parameters(), torch.empty(()))
    if x is None:
        x = torch.zeros(1024, layer.router.dim, device=like.device, dtype=like.dtype)
    x_TD = x.reshape(-1, x.shape[-1])
    training = layer.router.training
    layer.router.eval()  # an explanation counts nowhere and draws no noise
    try:
        with torch.no_grad():
            routing = layer.router(x_TD)
    finally:
        layer.router.train(training)
    backend, why = layer.experts.choose(x_TD, routing)
    if layer.backend != "auto":
        backend, why = layer.backend, "set on the layer"
    where = f"{x_TD.shape[0]} tokens of {str(x.dtype).removeprefix('torch.')} on {x.device.type}"
    return f"{backend}: {why} ({layer.experts.experts} experts, {where})"


def _check_objects(experts: object, belongs_elsewhere: dict[str, Any]) -> None:
    if not isinstance(experts, Experts):
        raise ValueError(
            f"with a router object, experts must be an Experts object, got {type(experts).__name__}"
        )
    given = [word for word, value in belongs_elsewhere.items() if value is not None]
    if given:
        raise ValueError(f"with objects, {', '.join(given)} belong to their constructors")


def _build(
    name: str, experts: Any, dim: Any, hidden: Any, options: dict[str, Any]
) -> tuple[Router, Experts]:
    """Router and feed-forward experts from words and numbers; every option finds its owner."""
    if isinstance(experts, Experts):
        _check_objects(experts, {"dim": dim, "hidden": hidden})
        router = build_router(name, dim=experts.dim, experts=experts.experts, **options)
        return router, experts
    needed = {"dim": dim, "hidden": hidden, "experts": experts}
    missing = [word for word, value in needed.items() if value is None]
    if missing:
        raise ValueError(f"the short form of MoE needs {', '.join(missing)}")
    own = {k: options.pop(k) for k in list(options) if k in _FEEDFORWARD}
    router = build_router(name, dim=dim, experts=experts, **options)
    return router, FeedForward(experts, dim, hidden, **own)


def _balance(router: Router, weights: dict[str, float] | None) -> dict[str, float]:
    chosen = balance.check_weights(router.default_balance() if weights is None else weights)
    if chosen.get("load") and not router.noisy:
        raise ValueError(f"the load loss is about noise in the scores; {router.name!r} has none")
    if weights:
        _try_losses(router, chosen)
    return chosen


def _try_losses(router: Router, weights: dict[str, float]) -> None:
    """Raise now, not at the first step, if the router lacks what a loss needs."""
    like = next(iter((*router.parameters(), *router.buffers())), torch.empty(()))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        trial = copy.deepcopy(router)(torch.zeros(2, router.dim, device=like.device))
        try:
            balance.terms(trial, weights)
        except ValueError as error:
            raise ValueError(f"{router.name}: {error}") from None


def _flat(t: Tensor | None, lead: Sequence[int], word: str) -> Tensor | None:
    if t is None:
        return None
    if tuple(t.shape) != tuple(lead):
        raise ValueError(
            f"{word} must have the shape {list(lead)} of x's tokens, got {list(t.shape)}"
        )
    return t.reshape(-1)


class Replayed:
    """The recorded decisions of a layer, to be taken again in order; with or without weights."""

    def __init__(self, choices: Sequence[Routing], weights: bool = False) -> None:
        self.choices, self.weights = list(choices), weights

    def next(self) -> Routing:
        if not self.choices:
            raise ValueError("the layer was called more often than its routes were recorded")
        return self.choices.pop(0)

    def take(self, recorded: Routing, live: Routing) -> Routing:
        """The live decision with the recorded choice, and with its weights if they are frozen."""
        if not self.weights:
            return live.chosen_by(recorded)
        # A decision without a gate of its own leaves the recorded weights.
        return live.replace(gate=None).chosen_by(recorded.detach()).replace(gate=live.gate)
