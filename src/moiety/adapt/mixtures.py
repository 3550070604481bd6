"""Masked encoders with experts: their balance losses, and their routers beside the teacher's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..moe import MoE
from ..routing import Routing
from ..watch import watch
from .masks import mean_over_masked


class _Terms:
    """Takes the balance losses of the layers, whatever the model itself does with them."""

    collects = True

    def __init__(self) -> None:
        self.live: list[Tensor] = []

    def add(self, name: str, routing: Routing, terms: dict[str, Tensor]) -> None:
        self.live.extend(terms.values())

    def taken(self) -> None:
        """Hear that the model put them into its own loss, which is not the one we train."""


@contextlib.contextmanager
def balance_losses(model: nn.Module) -> Iterator[list[Tensor]]:
    """The weighted balance losses of what runs inside; none for a model without experts."""
    layers = {name: part for name, part in model.named_modules() if isinstance(part, MoE)}
    terms = _Terms()
    for name, layer in layers.items():
        layer._watchers = (*layer._watchers, (name, terms))
    try:
        yield terms.live
    finally:
        for layer in layers.values():
            layer._watchers = tuple(w for w in layer._watchers if w[1] is not terms)


@contextlib.contextmanager
def uncounted(model: nn.Module) -> Iterator[None]:
    """Forget what routers count inside, such as the load that moves a bias.

    Only buffers that were written to are put back: others may be needed by a backward pass.
    """
    routers = [part.router for part in model.modules() if isinstance(part, MoE)]
    before = {b: (b._version, b.clone()) for router in routers for b in router.buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, (version, value) in before.items():
                if buffer._version != version:
                    buffer.copy_(value)


@contextlib.contextmanager
def gates(model: nn.Module, wanted: bool) -> Iterator[list[Routing]]:
    """The decisions of what ran inside, there after it; none where they are not wanted."""
    found: list[Routing] = []
    if not wanted:
        yield found
        return
    with watch(model, keep="all") as routes:
        yield found
        found += [record.routing for _, record in routes.records if record.routing is not None]
        routes.clear()


def probs_of(routing: Routing) -> Tensor:
    """The gate distribution of a decision."""
    if routing.probs is None:
        raise ValueError("a router of the model has no probabilities; set match_routing=0")
    return routing.probs


def routing_error(made: list[Routing], wanted: list[Tensor]) -> Tensor:
    """KL(teacher || student) between the `[T, E]` gates of each layer."""
    tiny = torch.finfo(torch.float32).tiny
    total = []
    for routing, q_TE in zip(made, wanted, strict=True):
        log_p_TE = probs_of(routing).clamp(min=tiny).log()
        apart_T = (torch.xlogy(q_TE, q_TE) - q_TE * log_p_TE).sum(-1)
        real_T = torch.ones_like(apart_T, dtype=torch.bool)
        if routing.mask is not None and len(apart_T) > 1:  # a static gate answers once for all
            real_T = routing.mask.bool()
        total.append(mean_over_masked(apart_T[None], real_T[None]))
    return torch.stack(total).sum()


def coupling(model: nn.Module) -> str | None:
    """Why an example's representation depends on the others of its batch; None: it does not."""
    for name, layer in model.named_modules():
        shared = layer.couples() if isinstance(layer, MoE) else None
        if shared:
            return f"{name}: {shared}"
    return None
