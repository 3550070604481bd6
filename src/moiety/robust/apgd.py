"""AutoPGD: PGD that sets its own step size (Croce & Hein 2020, algorithm 1).

x_adv = apgd(model, x, y, eps=8 / 255)                          # cross-entropy, 100 steps
x_adv = apgd(model, x, y, eps=8 / 255, loss="dlr-targeted")     # towards the 9 likeliest classes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .attack import adversarial
from .ball import Ball, column
from .base import Attack, Hunt
from .losses import LossLike, build_loss
from .noise import Noise
from .state import State
from .target import Target

MOMENTUM = 0.75  # of the new direction; the rest goes on with the last move
RHO = 0.75  # share of steps that must raise the loss


@dataclass(kw_only=True)
class Climb(State):
    """Where AutoPGD stands: the last point, the best one, and how the window went."""

    old: Tensor
    grad: Tensor
    size: Tensor  # of the next step, [B, 1, ...]
    loss: Tensor
    best: Tensor
    best_grad: Tensor
    best_loss: Tensor
    checked_loss: Tensor  # the best loss at the last checkpoint
    halved: Tensor  # whether that one halved the step
    rises: Tensor


@dataclass(frozen=True, kw_only=True)
class APGD(Attack):
    """AutoPGD from a random point of the ball's edge, or from x itself.

    A loss that aims at a class runs for each of the `targets` likeliest classes but y.
    """

    name: ClassVar[str] = "apgd"
    steps: int = 100
    random_start: bool = True
    targets: int = 9

    def aims(self, target: Target, x: Tensor, y: Tensor) -> Sequence[Tensor | None]:
        if not build_loss(self.loss).targeted or y.dim() == 2:  # of several labels the loss tells
            return [None]
        logits = target(x).logits.scatter(1, y[:, None], -torch.inf)  # y comes last
        order = logits.argsort(dim=1, descending=True)[:, :-1]
        return list(order[:, : self.targets].unbind(1))

    def run(self, hunt: Hunt, state: State, noise: Noise) -> None:
        s = self.first(hunt, state, noise[state.row])

        def step(s: Climb, pull: float = MOMENTUM) -> None:
            move(hunt.ball, s, pull)
            settle(s, *hunt.look(s, last=True))

        step(s, pull=1.0)  # nothing to go on with yet
        for number, window in enumerate(windows(self.steps)):
            hunt.repeat(step, s, window - (number == 0))
            check(s, window)
            if hunt.thin(s) is None:
                return
        hunt.end(s)

    def first(self, hunt: Hunt, state: State, noise: Noise) -> Climb:
        """The start, and what is known there."""
        ball = hunt.ball
        state.x = ball.start(state.clean, noise, edge=True) if self.random_start else state.clean
        loss, grad = hunt.look(state, keep=self.random_start, last=True)
        none = torch.zeros_like(loss)
        return Climb(
            **state.tensors(),
            old=state.x,
            grad=grad,
            size=column(none + 2 * ball.eps, state.x).to(state.x.dtype),
            loss=none,  # the reference code compares the loss of its first step with 0
            best=state.x,
            best_grad=grad,
            best_loss=loss,
            checked_loss=loss,
            halved=torch.ones_like(loss, dtype=torch.bool),
            rises=none,
        )


def windows(steps: int) -> Iterator[int]:
    """Steps between checkpoints: 0.22 of all, then shorter by 0.03 each, but never below 0.06."""
    window, least, less = (max(int(share * steps), 1) for share in (0.22, 0.06, 0.03))
    while steps > 0:
        yield min(window, steps)
        steps -= window
        window = max(window - less, least)


def move(ball: Ball, s: Climb, pull: float) -> None:
    """Step to x + pull (z − x) + (1 − pull) (x − old), z a plain step along the gradient."""
    z = ball.project(torch.addcmul(s.x, s.size, ball.step(s.grad)), s.clean)
    ahead = torch.lerp(s.x, z, pull).add(s.x - s.old, alpha=1 - pull)
    s.old, s.x = s.x, ball.project(ahead, s.clean)


def settle(s: Climb, loss: Tensor, grad: Tensor) -> None:
    """Take note of the new point: whether the loss rose, and whether it is the best."""
    s.rises = s.rises + (loss > s.loss)
    s.loss, s.grad = loss, grad
    better = loss > s.best_loss
    wide = column(better, s.x)
    s.best = torch.where(wide, s.x, s.best)
    s.best_grad = torch.where(wide, grad, s.best_grad)
    s.best_loss = torch.where(better, loss, s.best_loss)


def check(s: Climb, window: int) -> None:
    """Halve the step and go back to the best point where the window brought too little.

    That is: too few steps raised the loss, or the best loss has not moved since the last checkpoint
    though the step was not halved there.
    """
    stuck = ~s.halved & (s.checked_loss >= s.best_loss)
    s.halved = (s.rises <= RHO * window) | stuck
    s.checked_loss, s.rises = s.best_loss, torch.zeros_like(s.rises)
    wide = column(s.halved, s.x)
    s.size = torch.where(wide, s.size / 2, s.size)
    s.x = torch.where(wide, s.best, s.x)
    s.grad = torch.where(wide, s.best_grad, s.grad)


def apgd(
    model: nn.Module | Target,
    x: Tensor,
    y: Tensor,
    eps: float | Sequence[float],
    steps: int = 100,
    *,
    loss: LossLike = "ce",
    restarts: int = 1,
    random_start: bool = True,
    targets: int = 9,
    samples: int = 1,
    **options: Any,
) -> Any:
    """Adversarial inputs by AutoPGD; a list for a list of eps. Options: see `run_attack`."""
    attack = APGD(
        steps=steps,
        loss=loss,
        restarts=restarts,
        random_start=random_start,
        targets=targets,
        samples=samples,
    )
    return adversarial(attack, model, x, y, eps, **options)
