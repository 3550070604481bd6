"""Attacks without the model's gradient: random search, and inputs made against another model.

run_attack(RandomSearch(steps=200), model, x, y, eps=8 / 255)
run_attack(Transfer(other, APGD()), model, x, y, eps=8 / 255)

Where one of them beats AutoPGD, the gradient misled it (see `masking`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .ball import TINY, Ball, column, lengths
from .base import Attack, Hunt, Keep
from .losses import LossLike
from .noise import Noise
from .state import State
from .target import Target

LOOK = 20  # throws between two looks at who is fooled


@dataclass(kw_only=True)
class Throw(State):
    """Where a random search stands."""

    best: Tensor
    best_loss: Tensor


@dataclass(frozen=True, kw_only=True)
class RandomSearch(Attack):
    """Throw a shrinking share of the coordinates to a random edge of the ball; keep what helps.

    In l_2 the whole point is moved at random, by less and less. The first point is random.
    """

    name: ClassVar[str] = "random-search"
    steps: int = 200

    def run(self, hunt: Hunt, state: State, noise: Noise) -> None:
        worst = torch.full_like(state.kept_loss, -torch.inf)
        s = Throw(**state.tensors(), best=state.clean, best_loss=worst)
        for number in range(self.steps):
            share = max(0.5 * (1 - number / self.steps) ** 2, 1 / s.x[0].numel())
            draws = noise.stream(number)[s.row]
            s.x = propose(hunt.ball, s, share if number else 1.0, draws)
            loss, _ = hunt.look(s, grad=False, last=True)
            better = loss > s.best_loss
            s.best = torch.where(column(better, s.x), s.x, s.best)
            s.best_loss = torch.where(better, loss, s.best_loss)
            if number % LOOK == LOOK - 1 and hunt.thin(s) is None:
                return
        hunt.end(s)


def propose(ball: Ball, s: Throw, share: float, noise: Noise) -> Tensor:
    """A random point near the best one."""
    shape, dtype = s.x.shape[1:], s.x.dtype
    if ball.norm == "l2":
        away = noise.normal(shape, dtype)
        far = s.best + 2 * ball.eps * share * away / lengths(away).clamp(min=TINY)
        return ball.project(far, s.clean)
    chosen = noise.stream(0).uniform(shape, dtype) < share
    sign = 2 * (noise.stream(1).uniform(shape, dtype) < 0.5).to(dtype) - 1
    return ball.project(torch.where(chosen, s.clean + ball.eps * sign, s.best), s.clean)


@dataclass(frozen=True)
class Transfer:
    """Inputs made against `source` (a module, or a Target with its own normalisation)."""

    source: nn.Module | Target
    attack: Attack
    name: ClassVar[str] = "transfer"

    @property
    def loss(self) -> LossLike:
        return self.attack.loss

    def settings(self) -> dict[str, Any]:
        """The settings of the attack on the source."""
        return {"attack": self.attack.name, **self.attack.settings()}

    def __call__(
        self,
        target: Target,
        x: Tensor,
        y: Tensor,
        ball: Ball,
        noise: Noise,
        *,
        keep: Keep = "fooled",
        early_stop: bool = False,
        group: int = 1,
    ) -> Tensor:
        """The highest loss on the source: a point that just fools it seldom fools another."""
        source = self.source
        if not isinstance(source, Target):
            source = Target(source, normalize=target.normalize)
        with source.at_rest():
            with torch.no_grad():
                source.check_logits(source(x).logits, y)
            return self.attack(source, x, y, ball, noise, keep="loss", group=group)
