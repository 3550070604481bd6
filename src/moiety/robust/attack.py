"""`run_attack`: the one door through which every attack goes.

found = run_attack(APGD(loss="dlr"), model, x, y, eps=8 / 255)
found.x, found.fooled.float().mean()

It checks inputs, labels and logits, attacks in eval mode without gradients of parameters, in
batches, clips, scores on the clean model, and leaves the model and the RNG as they were.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .ball import Ball, Norm
from .base import Keep, check_counts
from .coupling import coupled
from .losses import LOSSES
from .noise import Noise, check_seed
from .target import Bounds, Normalize, Seen, Target, check_inputs, correct, plain_inputs


class Attacks(Protocol):
    """What `run_attack` runs: any of our attacks, or one of your own."""

    @property
    def name(self) -> str: ...

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
    ) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Attacked:
    """What an attack came to, for one eps; tensors with a row for each example."""

    x: Tensor
    fooled: Tensor  # bool: the model is wrong there
    loss: Tensor  # cross-entropy (sigmoid where y has a column for each class)
    prediction: Tensor
    eps: float
    threat: str  # "per example", or "batch threat model" where a group is attacked together
    seconds: float


@dataclass(frozen=True, eq=False)
class _Scored:
    """The answers of the model at some inputs."""

    wrong: Tensor
    loss: Tensor
    prediction: Tensor


def run_attack(
    attack: Attacks,
    model: nn.Module | Target,
    x: Tensor,
    y: Tensor,
    eps: float | Sequence[float],
    *,
    norm: Norm = "linf",
    bounds: Bounds = (0.0, 1.0),
    normalize: Normalize = None,
    batch: int = 256,
    group: int = 1,
    keep: Keep = "fooled",
    early_stop: bool = True,
    seed: int = 0,
    ids: Tensor | None = None,
) -> Any:
    """Attack a model: an `Attacked`, or a list of them for a list of eps.

    x, y        inputs `[N, ...]` within `bounds`, and labels `[N]` (or rows of 0 and 1); inputs in
                half precision come back in full, as an eps is below its rounding
    normalize   (mean, std) or a function, applied inside the model
    batch       examples in one forward
    group       examples that are attacked together, where the model couples them; 1: each for
                itself, one in a forward if it must be
    keep        "fooled": the first point that fools the model, else the one of highest loss;
                "loss": the one of highest loss; "last": the last one (AutoPGD and random search
                end where the loss was highest)
    early_stop  whether fooled examples leave (with keep="fooled"; no result changes)
    ids         the numbers of the examples `[N]` that random starts depend on; None: 0 to N − 1
    """
    target = model if isinstance(model, Target) else Target(model, normalize=normalize)
    if isinstance(model, Target) and normalize is not None:
        raise ValueError("a Target has its own normalize: leave it out here")
    if keep not in ("fooled", "loss", "last"):
        raise ValueError(f'keep must be "fooled", "loss" or "last", got {keep!r}')
    check_counts(batch=batch, group=group)
    check_seed(seed)
    balls = [Ball(e, norm, bounds) for e in (eps if isinstance(eps, Sequence) else [eps])]
    check_inputs(x, y, bounds)
    target.warn_training()
    try:
        with target.at_rest(), torch.no_grad():
            job = _Job(attack, target, x, y, batch, group, keep, early_stop, seed, ids)
            found = [job.run(ball) for ball in balls]
    finally:
        if target is not model:  # it was made here, and nobody else will use what it holds
            target.forget()
    return found if isinstance(eps, Sequence) else found[0]


def adversarial(
    attack: Attacks,
    model: nn.Module | Target,
    x: Tensor,
    y: Tensor,
    eps: float | Sequence[float],
    **options: Any,
) -> Any:
    """The adversarial inputs alone: a tensor, or a list for a list of eps."""
    found = run_attack(attack, model, x, y, eps, **options)
    return [one.x for one in found] if isinstance(found, list) else found.x


def batches(count: int, batch: int, group: int, *, alone: bool) -> Iterator[slice]:
    """Batches of whole groups, with `alone` of one; a last group that is not full is by itself."""
    size = group if alone else max(batch // group, 1) * group
    whole = count // group * group
    for start in range(0, whole, size):
        yield slice(start, min(start + size, whole))
    if whole < count:
        yield slice(whole, count)


def check_points(attack: Attacks, found: Any, x: Tensor) -> None:
    """Look at what an attack, maybe of the user's own, returned: NaN would count as fooled."""
    name = getattr(attack, "name", "") or type(attack).__name__
    if not isinstance(found, Tensor) or found.shape != x.shape:
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"the attack {name!r} must return points of the shape {list(x.shape)} that it was "
            f"given, got {shape}"
        )
    if not bool(found.isfinite().all()):
        raise ValueError(f"the attack {name!r} returned NaN or infinite values")


class _Job:
    """An attack on some examples, whatever the eps."""

    def __init__(
        self,
        attack: Attacks,
        target: Target,
        x: Tensor,
        y: Tensor,
        batch: int,
        group: int,
        keep: Keep,
        early_stop: bool,
        seed: int,
        ids: Tensor | None,
    ) -> None:
        self.attack, self.target, self.group = attack, target, group
        self.x, self.y = plain_inputs(x, y)
        self.batch, self.keep, self.early_stop, self.seed = batch, keep, early_stop, seed
        self.ids = torch.arange(len(x)) if ids is None else ids
        if len(self.ids) != len(x):
            raise ValueError(f"ids must hold a number for each of {len(x)} examples")
        self.why = coupled(target, self._there(self.x[:group]), group)
        self.clean = self._score(self.x, check=True)

    def _there(self, t: Tensor) -> Tensor:
        return t.to(self.target.device or t.device)

    def _rows(self) -> Iterator[slice]:
        return batches(len(self.x), self.batch, self.group, alone=self.why is not None)

    def _score(self, x: Tensor, check: bool = False) -> _Scored:
        """The model's answers, in the batches that the attack sees."""
        loss = LOSSES["ce" if self.y.dim() == 1 else "sigmoid"]
        parts: list[tuple[Tensor, ...]] = []
        for rows in self._rows():
            y = self._there(self.y[rows])
            logits = self.target(self._there(x[rows])).logits
            if check:
                self.target.check_logits(logits, y)
            parts.append((~correct(logits, y), loss(Seen(logits), y), logits.argmax(-1)))
        if not parts:
            none = torch.zeros(0, device=x.device)
            return _Scored(none.bool(), none, none.long())
        return _Scored(*(torch.cat(column).to(x.device) for column in zip(*parts)))

    def run(self, ball: Ball) -> Attacked:
        """The attack for one ball; seeded, so that no eps of a list depends on those before."""
        start = time.perf_counter()
        torch.manual_seed(self.seed)
        x = self.x.clone()
        for rows in self._rows() if ball.eps > 0 else ():
            x[rows] = self._one(rows, ball).to(x)
        scored = self._score(x)
        if self.keep == "fooled":
            x, scored = self._never_weaker(x, scored)
        return Attacked(
            x,
            scored.wrong,
            scored.loss,
            scored.prediction,
            ball.eps,
            "per example" if self.group == 1 else "batch threat model",
            time.perf_counter() - start,
        )

    def _one(self, rows: slice, ball: Ball) -> Tensor:
        x, y = self._there(self.x[rows]), self._there(self.y[rows])
        found = self.attack(
            self.target,
            x,
            y,
            ball,
            Noise(self.seed, self._there(self.ids[rows])),
            keep=self.keep,
            early_stop=self.early_stop,
            group=min(self.group, len(x)),
        )
        check_points(self.attack, found, x)
        return ball.project(found, x)

    def _never_weaker(self, x: Tensor, scored: _Scored) -> tuple[Tensor, _Scored]:
        """Back to the clean inputs of a group where more of them fool the model."""
        back = self._in_group(self.clean.wrong) > self._in_group(scored.wrong)
        wide = back.view(-1, *[1] * (x.dim() - 1))
        named = ("wrong", "loss", "prediction")
        parts = [torch.where(back, getattr(self.clean, n), getattr(scored, n)) for n in named]
        return torch.where(wide, self.x, x), _Scored(*parts)

    def _in_group(self, wrong: Tensor) -> Tensor:
        number = torch.arange(len(wrong), device=wrong.device) // self.group
        sums = torch.zeros_like(number).index_add(0, number, wrong.long())
        return sums[number]
