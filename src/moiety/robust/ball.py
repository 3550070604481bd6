"""`Ball`: what an attacker may do to an input: at most eps away, within the bounds of inputs.

ball = Ball(8 / 255, norm="linf", bounds=(0, 1))
x_adv = ball.project(x + 2 * ball.step(grad), around=x)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .noise import Noise
from .target import Bounds

Norm = Literal["linf", "l2"]
TINY = 1e-12  # of the reference code of AutoPGD: a zero gradient moves nothing


@dataclass(frozen=True)
class Ball:
    """All inputs within `eps` of one in `norm`, and within `bounds` (None: anywhere)."""

    eps: float
    norm: Norm = "linf"
    bounds: Bounds = (0.0, 1.0)

    def __post_init__(self) -> None:
        number = isinstance(self.eps, (int, float)) and not isinstance(self.eps, bool)
        if not number or not math.isfinite(self.eps) or self.eps < 0:
            raise ValueError(f"eps must be a number, at least 0, got {self.eps!r}")
        if self.norm not in ("linf", "l2"):
            raise ValueError(f'norm must be "linf" or "l2", got {self.norm!r}')
        if self.bounds is not None and not _interval(self.bounds):
            raise ValueError(f"bounds must be (low, high) or None, got {self.bounds!r}")

    def project(self, x: Tensor, around: Tensor) -> Tensor:
        """The nearest point of the ball around `around` (l_2: by scaling, then clipping)."""
        if self.norm == "linf":
            return self.clip(x.clamp(around - self.eps, around + self.eps))
        away = x - around
        scale = (self.eps / lengths(away).clamp(min=TINY)).clamp(max=1)
        return self.clip(around + away * scale)

    def clip(self, x: Tensor) -> Tensor:
        """Into the bounds; in an l_2 ball this only comes nearer to a centre within them."""
        return x if self.bounds is None else x.clamp(*self.bounds)

    def step(self, grad: Tensor) -> Tensor:
        """The direction of steepest ascent, of length one in the norm."""
        grad = grad.nan_to_num()  # NaN would stay in x for good
        return grad.sign() if self.norm == "linf" else grad / (lengths(grad) + TINY)

    def start(self, x: Tensor, noise: Noise, *, edge: bool = False) -> Tensor:
        """A random point: uniform in the ball, or on its edge as in AutoPGD; then clipped."""
        shape = x.shape[1:]
        if self.norm == "linf":
            away = (2 * noise.uniform(shape) - 1).to(x.dtype)
            scale = 1 / (largest(away) + TINY) if edge else 1.0
        else:
            away = noise.normal(shape).to(x.dtype)
            scale = 1 / (lengths(away) + TINY)
            if not edge:
                radius = noise.stream(0).uniform(()) ** (1 / max(shape.numel(), 1))
                scale = scale * column(radius.to(x.dtype), x)
        return self.clip(x + self.eps * away * scale)


def _interval(bounds: Any) -> bool:
    pair = isinstance(bounds, (tuple, list)) and len(bounds) == 2
    return pair and all(isinstance(end, (int, float)) for end in bounds) and bounds[0] < bounds[1]


def lengths(t: Tensor) -> Tensor:
    """The l_2 norm of each example, `[B, 1, ...]`."""
    return column(torch.linalg.vector_norm(t.flatten(1), dim=1), t)


def largest(t: Tensor) -> Tensor:
    """The l_inf norm of each example, `[B, 1, ...]`."""
    return column(t.flatten(1).abs().amax(1), t)


def column(values_B: Tensor, like: Tensor) -> Tensor:
    return values_B.view(-1, *[1] * (like.dim() - 1))
