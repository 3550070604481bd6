"""What an attacker makes large: one number per example, the higher the better for the attacker.

ce            cross-entropy (softmax; y `[B]` or a row of labels)
sigmoid       sigmoid cross-entropy, summed over classes (several labels at once)
dlr           difference of logits ratio: neither scale nor shift of the logits matters
dlr-targeted  the same towards one other class

    build_loss("ce"), build_loss({"ce": 1.0, "auxiliary": 1.0})

Others join by the decorator: `@loss("router-margin", needs_routes=True)` over `(seen, y) -> [B]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from .target import Seen

TINY = 1e-12


@dataclass(frozen=True)
class Loss:
    """A loss by name; `needs_routes`: the model is watched; `targeted`: it aims at a class."""

    name: str
    of: Callable[..., Tensor]
    needs_routes: bool = False
    targeted: bool = False
    classes: int = 1  # that it needs

    def __call__(self, seen: Seen, y: Tensor, target: Tensor | None = None) -> Tensor:
        """`[B]`; `target` `[B]` is the class to aim at, by default the best but y."""
        found = seen.logits.shape[-1]
        if found < self.classes:
            raise ValueError(
                f'loss "{self.name}" needs at least {self.classes} classes and the model has '
                f'{found}: use loss="ce"'
            )
        y = y.long() if y.dim() == 1 else y  # torch takes no other whole numbers as class ids
        return self.of(seen, y, target) if self.targeted else self.of(seen, y)


LOSSES: dict[str, Loss] = {}
LossLike: TypeAlias = str | Loss | Mapping[str, float] | Callable[[Seen, Tensor], Tensor]


def loss(
    name: str, *, needs_routes: bool = False, targeted: bool = False, classes: int = 1
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register a function as the loss `name`."""

    def add(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
        LOSSES[name] = Loss(name, of, needs_routes, targeted, classes)
        return of

    return add


def build_loss(given: LossLike) -> Loss:
    """A loss from its name, from weights by name, from a function, or itself."""
    if isinstance(given, Loss):
        return given
    if isinstance(given, Mapping):
        return _sum(given)
    if callable(given):
        return Loss(getattr(given, "__name__", "loss"), given)
    if given not in LOSSES:
        raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {given!r}")
    return LOSSES[given]


def _sum(weights: Mapping[str, float]) -> Loss:
    """The weighted sum of several losses."""
    bad = [w for w in weights.values() if not isinstance(w, (int, float)) or not math.isfinite(w)]
    if not weights or bad:
        raise ValueError(f"a sum of losses needs a number for each name, got {dict(weights)}")
    parts = [(build_loss(name), weight) for name, weight in weights.items()]

    def of(seen: Seen, y: Tensor, target: Tensor | None = None) -> Tensor:
        terms = [weight * part(seen, y, target) for part, weight in parts]
        return torch.stack(terms).sum(0)

    return Loss(
        " + ".join(f"{weight:g} {part.name}" for part, weight in parts),
        of,
        needs_routes=any(part.needs_routes for part, _ in parts),
        targeted=any(part.targeted for part, _ in parts),
        classes=max(part.classes for part, _ in parts),
    )


@loss("ce")
def cross_entropy(seen: Seen, y: Tensor) -> Tensor:
    """Softmax cross-entropy; several labels of a row share it equally."""
    if y.dim() == 2:
        y = y.to(seen.logits.dtype)
        y = y / y.sum(-1, keepdim=True).clamp(min=1)
    return F.cross_entropy(seen.logits, y, reduction="none")


@loss("sigmoid")
def sigmoid_cross_entropy(seen: Seen, y: Tensor) -> Tensor:
    """Sigmoid cross-entropy, summed over classes."""
    logits = seen.logits
    wanted = y if y.dim() == 2 else F.one_hot(y, logits.shape[-1])
    terms = F.binary_cross_entropy_with_logits(logits, wanted.to(logits.dtype), reduction="none")
    return terms.sum(-1)


@loss("dlr", classes=3)
def dlr(seen: Seen, y: Tensor) -> Tensor:
    """−(z_y − max_{i≠y} z_i) / (z_(1) − z_(3)); Croce & Hein 2020, (6)."""
    own, other, top = _own_other_top(seen.logits, y, 3)
    return (other - own) / (top[:, 0] - top[:, 2] + TINY)


@loss("dlr-targeted", targeted=True, classes=4)
def dlr_targeted(seen: Seen, y: Tensor, target: Tensor | None = None) -> Tensor:
    """−(z_y − z_t) / (z_(1) − (z_(3) + z_(4)) / 2); Croce & Hein 2020, (7)."""
    own, other, top = _own_other_top(seen.logits, y, 4)
    if target is not None:
        other = seen.logits.gather(1, target[:, None])[:, 0]
    return (other - own) / (top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + TINY)


def _own_other_top(logits: Tensor, y: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The logit of y, the largest of any other class, and the k largest in order."""
    if y.dim() != 1:
        raise ValueError('the DLR losses take one label an example: use loss="sigmoid" for several')
    own = logits.gather(1, y[:, None])[:, 0]
    top = logits.topk(k, dim=1)
    other = torch.where(top.indices[:, 0] == y, top.values[:, 1], top.values[:, 0])
    return own, other, top.values
