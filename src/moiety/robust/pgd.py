"""PGD and FGSM: projected steps along the gradient (Puigcerver et al. 2022, (4)–(5)).

x_adv = pgd(model, x, y, eps=8 / 255)                     # 40 steps of eps / 40 from x
one, two = pgd(model, x, y, eps=[1 / 255, 2 / 255], random_start=True, restarts=5)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from .attack import adversarial
from .base import Attack, Hunt
from .losses import LossLike
from .noise import Noise
from .state import State
from .target import Target

LOOK = 10  # steps between two looks at who is fooled, each of which a GPU is waited for


@dataclass(frozen=True, kw_only=True)
class PGD(Attack):
    """Steps of `rel_stepsize` · eps (None: eps / steps) along the sign, or the direction in l_2."""

    name: ClassVar[str] = "pgd"
    steps: int = 40
    rel_stepsize: float | None = None
    random_start: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.rel_stepsize
        if size is not None and not (isinstance(size, (int, float)) and 0 < size < math.inf):
            raise ValueError(f"rel_stepsize must be a number above 0 or None, got {size!r}")

    def run(self, hunt: Hunt, state: State, noise: Noise) -> None:
        ball, rel = hunt.ball, self.rel_stepsize
        size = ball.eps * (1 / self.steps if rel is None else rel)
        state.x = state.clean
        if self.random_start:
            state.x = ball.start(state.clean, noise[state.row])

        def step(s: State, keep: bool = True) -> None:
            _, grad = hunt.look(s, keep=keep)
            s.x = ball.project(s.x.add(ball.step(grad), alpha=size), s.clean)

        step(state, keep=self.random_start)  # the clean point itself is no answer
        done = 1
        while done < self.steps:
            now = min(LOOK, self.steps - done)
            hunt.repeat(step, state, now)
            done += now
            left = hunt.thin(state)
            if left is None:
                return
        hunt.look(state, grad=False, last=True)
        hunt.end(state)


@dataclass(frozen=True, kw_only=True)
class FGSM(PGD):
    """One step of eps: PGD with a single step."""

    name: ClassVar[str] = "fgsm"
    steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps != 1:
            raise ValueError(f"FGSM takes one step: use PGD(steps={self.steps})")


def pgd(
    model: nn.Module | Target,
    x: Tensor,
    y: Tensor,
    eps: float | Sequence[float],
    steps: int = 40,
    rel_stepsize: float | None = None,
    random_start: bool = False,
    restarts: int = 1,
    *,
    loss: LossLike = "ce",
    samples: int = 1,
    **options: Any,
) -> Any:
    """Adversarial inputs by PGD; a list of them for a list of eps. Options: see `run_attack`."""
    attack = PGD(
        steps=steps,
        rel_stepsize=rel_stepsize,
        random_start=random_start,
        restarts=restarts,
        loss=loss,
        samples=samples,
    )
    return adversarial(attack, model, x, y, eps, **options)


def fgsm(
    model: nn.Module | Target,
    x: Tensor,
    y: Tensor,
    eps: float | Sequence[float],
    *,
    loss: LossLike = "ce",
    samples: int = 1,
    **options: Any,
) -> Any:
    """Adversarial inputs by one step of eps. Options: see `run_attack`."""
    return adversarial(FGSM(loss=loss, samples=samples), model, x, y, eps, **options)
