"""`Attack`, the base of all attacks, and `Hunt`: who is still in play and what was found.

An attack writes `run`: it moves `state.x`, and `hunt.look` evaluates the point and keeps the best.
Nothing in a step waits for a GPU; examples that are fooled leave now and then, in `hunt.thin`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .ball import Ball, column
from .graph import Step
from .losses import Loss, LossLike, build_loss
from .noise import Noise
from .state import State
from .target import Target, correct

Keep = Literal["fooled", "loss", "last"]
FEWEST = 32  # rows below which a GPU gains nothing from fewer


@dataclass(frozen=True, kw_only=True)
class Attack:
    """An attack with its settings.

    loss      a name, weights by name, or a function `(seen, y) -> [B]`
    restarts  runs from other random starts, of which an example keeps its best point
    samples   forwards behind each gradient: the expectation over the noise of a random model
    """

    name: ClassVar[str] = ""
    loss: LossLike = "ce"
    restarts: int = 1
    samples: int = 1

    def __post_init__(self) -> None:
        build_loss(self.loss)
        words = ("steps", "restarts", "samples", "targets")
        check_counts(**{word: getattr(self, word, 1) for word in words})
        if self.restarts > 1 and not getattr(self, "random_start", True):
            raise ValueError("restarts from the same point repeat it: set random_start=True")

    def settings(self) -> dict[str, Any]:
        """The settings by name, as they go into a result."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**plain, "loss": build_loss(self.loss).name}

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
        """Adversarial inputs for one batch; `run_attack` checks, batches and scores around it."""
        loss = build_loss(self.loss)
        if loss.needs_routes and target.watch != "all":
            target = target.watching("all")
        hunt = Hunt(target, loss, ball, self.samples, keep, early_stop, group, x, y, repr(self))
        aims = self.aims(target, x, y)
        for restart in range(self.restarts):
            for number, hunt.found.aim in enumerate(aims):
                state = hunt.begin()
                if state is not None:
                    self.run(hunt, state, noise.stream(restart).stream(number))
        return hunt.found.kept

    def aims(self, target: Target, x: Tensor, y: Tensor) -> Sequence[Tensor | None]:
        """The classes `[B]` to aim at, a run for each; None: away from y, wherever."""
        return [None]

    def run(self, hunt: Hunt, state: State, noise: Noise) -> None:
        """One run from one start."""
        raise NotImplementedError


class Hunt:
    """One batch under attack.

    keep  which point of an example is the result: "fooled" (the first that fools the model, and
          where none does the one of highest loss), "loss" (the one of highest loss) or "last".
          With `group` > 1 a group is one: it counts how many it fools, and its losses are summed.
    """

    def __init__(
        self,
        target: Target,
        loss: Loss,
        ball: Ball,
        samples: int,
        keep: Keep,
        early_stop: bool,
        group: int,
        x: Tensor,
        y: Tensor,
        name: str,
    ) -> None:
        self.key = (name, ball, keep, group)  # all that a step depends on but its tensors
        self.target, self.loss, self.ball, self.samples = target, loss, ball, samples
        self.keep, self.group = keep, group
        self.early_stop = early_stop and keep == "fooled"  # elsewhere it would change the result
        worst = torch.full((len(x),), -torch.inf, dtype=_real(x), device=x.device)
        rows = torch.arange(len(x), device=x.device)
        self.found = State(
            row=rows,
            clean=x,
            y=y,
            x=x,
            kept=x,
            kept_loss=worst,
            kept_fooled=torch.zeros_like(worst),
        )

    def begin(self) -> State | None:
        """All examples in play, at their clean points; None: there is none left."""
        state = State(**self.found.tensors())
        return self.thin(state) if self.early_stop else state

    def thin(self, state: State) -> State | None:
        """Let fooled examples leave, if there are any and leaving is allowed. Waits for a GPU."""
        if not self.early_stop:
            return state
        fooled = state.kept_fooled >= self.group
        rows = len(fooled)
        left = rows - int(fooled.sum())
        size = self.size(rows, left)
        if size < rows:
            self.end(state)
            state.take(fooled.long().argsort(stable=True)[:size])
        return state if left else None

    def size(self, rows: int, left: int) -> int:
        """Rows to go on with; on a GPU few different numbers, as a step is captured for each.

        There some fooled ones stay to fill them up, and keep the points they have.
        """
        return halved(rows, left, self.group) if self.found.x.is_cuda else left

    def repeat(self, step: Step, state: State, times: int) -> None:
        """Take `times` steps, the same for all; the first step of a run is taken by itself."""
        self.target.repeater(self.key, step, state, times)

    def end(self, state: State) -> None:
        """Write down what was found for the examples in play."""
        for name in ("kept", "kept_loss", "kept_fooled"):
            full = getattr(self.found, name)
            setattr(self.found, name, full.index_copy(0, state.row, getattr(state, name)))

    # -- one point -----------------------------------------------------------------------------

    def look(
        self, state: State, *, grad: bool = True, keep: bool = True, last: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Evaluate `state.x` and keep it where it is better: its loss `[B]` and gradient."""
        loss, logits, slope = self._evaluate(state, grad)
        total = self.grouped(loss).to(state.kept_loss.dtype)
        if keep and (last or self.keep != "last"):
            self._keep(state, total, logits)
        return total, slope

    def _evaluate(self, state: State, grad: bool) -> tuple[Tensor, Tensor, Tensor]:
        x = state.x.detach().requires_grad_(grad)
        losses, logits, slopes = [], [], []
        for _ in range(self.samples):
            with torch.set_grad_enabled(grad):
                seen = self.target(x)
                loss = self.loss(seen, state.y, state.aim)
            if grad:
                slopes.append(_slope(loss, x))
            losses.append(loss.detach())
            logits.append(seen.logits.detach())
        return _mean(losses), _mean(logits), _mean(slopes) if grad else x

    def _keep(self, state: State, total: Tensor, logits: Tensor) -> None:
        better = total > state.kept_loss
        fooled = self.grouped((~correct(logits, state.y)).to(total.dtype))
        if self.keep == "fooled":
            open_yet = (fooled == state.kept_fooled) & (fooled < self.group)
            better = (fooled > state.kept_fooled) | (open_yet & better)
        state.kept = torch.where(column(better, state.x), state.x, state.kept)
        state.kept_loss = torch.where(better, total, state.kept_loss)
        state.kept_fooled = torch.where(better, fooled, state.kept_fooled)

    def grouped(self, values: Tensor) -> Tensor:
        """The sum over the group of each example."""
        if self.group == 1:
            return values
        sums = values.view(-1, self.group).sum(1, keepdim=True)
        return sums.expand(-1, self.group).reshape(-1)


def check_counts(least: int = 1, **counts: int) -> None:
    """Raise unless each is a whole number, at least this."""
    for word, n in counts.items():
        if not isinstance(n, int) or isinstance(n, bool) or n < least:
            raise ValueError(f"{word} must be a whole number, at least {least}, got {n!r}")


def halved(rows: int, left: int, group: int) -> int:
    """Half the rows, or half of that, ..., in whole groups, as long as all that are left fit in."""
    while left and rows >= 2 * max(left, FEWEST):
        rows = -(-rows // (2 * group)) * group
    return rows if left else 0


def _slope(loss: Tensor, x: Tensor) -> Tensor:
    if not loss.requires_grad:  # a model that hides its gradient altogether
        return torch.zeros_like(x)
    (slope,) = torch.autograd.grad(loss, x, torch.ones_like(loss), allow_unused=True)
    return torch.zeros_like(x) if slope is None else slope


def _mean(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(values).mean(0)


def _real(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
