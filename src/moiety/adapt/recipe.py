"""How a masked encoder is trained: digest 3, section 6.

AdamW with betas (0.9, 0.95); the learning rate falls linearly to 0 without warm-up; weight decay
spares parameters of one axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..train.graph import repeatable

if TYPE_CHECKING:
    from .encoders import Encoder

# By kind, from Table 9: learning rate and batch of (further) pre-training.
RATES = {"image": 1.5e-4, "text": 1e-4}
BATCHES = {"image": 64, "text": 128}
WARM_STEPS = 500  # of a head or decoder that a model lacks


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How long and how fast, and when to look.

    checks     looks at the model, evenly spread, besides the one before the first step
    stop       "probe": keep the check with the best score, and end after `patience` worse ones
    precision  "bfloat16": products in it, weights and their updates in float32
    lora       train the trunk by adapters of this rank (see `lora`); None: all its weights
    """

    steps: int
    batch: int
    lr: float
    weight_decay: float = 0.01
    checks: int = 8
    stop: Literal["probe"] | None = None
    patience: int = 3
    precision: Literal["float32", "bfloat16"] = "float32"
    lora: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "checks", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.lora is not None and self.lora < 1:
            raise ValueError(f"lora is a rank of at least 1, or None, got {self.lora}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be a positive number, got {self.lr}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be 0 or more, got {self.weight_decay}")
        for name, known in (("stop", (None, "probe")), ("precision", ("float32", "bfloat16"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.lr * (1 - step / self.steps)


def checked(step: int, steps: int, checks: int) -> bool:
    """Whether a model is looked at after so many of its steps: evenly, and after the last."""
    return step * checks // steps > (step - 1) * checks // steps


class Diverged(ValueError):
    """The loss is no longer a number."""


def adamw(encoder: Encoder, recipe: Recipe, captured: bool = False) -> torch.optim.AdamW:
    """The optimizer of all that is trained; parameters of one axis do not decay."""
    trained = [p for p in encoder.model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), **repeatable(recipe.lr, trained, captured))


def set_rate(
    optimizer: torch.optim.Optimizer, rate: float, device: torch.device | None = None
) -> None:
    """Set the learning rate of the next step; with a device, in a tensor that is there."""
    for group in optimizer.param_groups:
        if device is not None:
            group["lr"] = torch.tensor(rate, device=device)
        elif isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
