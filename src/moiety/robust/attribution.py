"""Through which door an attack came: the input that experts see, or the routes that it takes.

    parts = attribute(Target(model), x, x_adv, y)
    parts.total, parts.input, parts.routes         # [B] each; total = input + routes

The loss is measured on the 2×2 of input (clean, attacked) × routes (clean, attacked); routes of one
input are replayed on the other. A part is what changing that factor does to the loss, averaged over
both orders of changing the two (Shapley), so that the parts sum to the whole change. "Routes" are
the choices of experts, or with `weights=True` their combine weights as well.

`Frozen` is the model whose routes stay those of the clean input: what an attacker can do to it is
what is left when the router's door is shut.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ..watch import Routes, replay
from .losses import LossLike, build_loss
from .target import Seen, Target


@dataclass(frozen=True, eq=False)
class Parts:
    """`[B]` float64: the loss in the four cells, first the input, then the routes."""

    clean_clean: Tensor
    clean_attacked: Tensor
    attacked_clean: Tensor
    attacked_attacked: Tensor

    def cpu(self) -> Parts:
        return Parts(*(getattr(self, f.name).cpu() for f in dataclasses.fields(self)))

    @property
    def total(self) -> Tensor:
        """What the attack did to the loss."""
        return self.attacked_attacked - self.clean_clean

    @property
    def input(self) -> Tensor:
        """The part of the input that the experts (and all else) see."""
        first = self.attacked_clean - self.clean_clean
        second = self.attacked_attacked - self.clean_attacked
        return (first + second) / 2

    @property
    def routes(self) -> Tensor:
        """The part of the routes."""
        first = self.clean_attacked - self.clean_clean
        second = self.attacked_attacked - self.attacked_clean
        return (first + second) / 2


def attribute(
    target: Target,
    x: Tensor,
    x_adv: Tensor,
    y: Tensor,
    *,
    weights: bool = False,
    loss: LossLike | None = None,
) -> Parts:
    """Split the change of the loss from x to x_adv, example by example.

    weights: the routes are the choices and their combine weights, not the choices alone.
    loss: None: cross-entropy, or where y has a column for each class sigmoid cross-entropy.
    """
    chosen = build_loss(loss or ("ce" if y.dim() == 1 else "sigmoid"))
    watched = target.watching("all" if chosen.needs_routes else "choice")

    def measure(at: Tensor, routes: Routes | None = None) -> tuple[Tensor, Routes]:
        with _replaying(target, routes, weights):
            seen = watched(at)
        assert seen.routes is not None
        return chosen(Seen(seen.logits.double(), seen.routes), y), seen.routes

    with target.at_rest(), torch.no_grad():
        clean_clean, clean = measure(x)
        attacked_attacked, attacked = measure(x_adv)
        clean_attacked, _ = measure(x, attacked)
        attacked_clean, _ = measure(x_adv, clean)
    return Parts(clean_clean, clean_attacked, attacked_clean, attacked_attacked)


def _replaying(
    target: Target, routes: Routes | None, weights: bool
) -> contextlib.AbstractContextManager[None]:
    if routes is None:
        return contextlib.nullcontext()
    return replay(target.model, routes, weights=weights)


@dataclass(frozen=True, eq=False)
class Frozen(Target):
    """A target whose routes stay those that were recorded, example by example.

    weights  also the combine weights stay
    """

    routes: Routes | None = None
    weights: bool = False

    def __call__(self, x: Tensor) -> Seen:
        with _replaying(self, self.routes, self.weights):
            return Target.__call__(self, x)


def freeze(target: Target, x: Tensor, *, weights: bool = False) -> Frozen:
    """The target with the routes that it takes on x, to be called with perturbed x."""
    with target.at_rest(), torch.no_grad():
        routes = target.watching("choice")(x).routes
    known = {f.name: getattr(target, f.name) for f in dataclasses.fields(Target)}
    return Frozen(**known, routes=routes, weights=weights)
