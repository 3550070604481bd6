"""`train`: a loop that may be killed at any moment and goes on to the same bits.

best = train(
    model, Recipe(steps=1000, lr=2e-3), examples=len(y), seed=0,
    loss=lambda rows: F.cross_entropy(model(x[rows]), y[rows]),
    score=lambda: accuracy(model, validation),            # larger is better
    curve=store.curve(trial), checkpoint=store.checkpoint(trial),
)

The model that it leaves is the one of the best validation. Everything a step depends on is in its
checkpoint or follows from seed and step: weights, optimizer, random numbers, the order of examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..moe import MoE
from ..watch import watch
from .draws import step_seed
from .fit import seeded
from .graph import Graph, capture, repeatable
from .saving import Saving

WARM = 3  # steps before one is captured, for what libraries set up once


class Curve(Protocol):
    """Where values by step go; a `lab.store.Curve`."""

    def append(self, step: int, **values: float | None) -> None: ...
    def rewind(self, step: int) -> None: ...


class Checkpoint(Protocol):
    """Where the state goes; a `lab.checkpoint.Checkpoint`."""

    def save(self, state: Mapping[str, Any]) -> None: ...
    def load(self) -> dict[str, Any] | None: ...


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How long and how fast: AdamW, a linear warm-up, then a cosine down to nothing."""

    steps: int
    batch: int = 64
    lr: float = 2e-3
    weight_decay: float = 0.01
    warmup: float = 0.1  # share of the steps
    clip: float = 1.0  # of the norm of the gradient
    points: int = 40  # of the curve of the training loss
    # On validation data; the best one is kept. So many, evenly spread, or after these shares.
    checks: int | tuple[float, ...] = 8

    def __post_init__(self) -> None:
        counts = {"steps": self.steps, "batch": self.batch, "points": self.points}
        if isinstance(self.checks, int):
            counts["checks"] = self.checks
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be a positive number, got {self.lr}")

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        warm = max(round(self.warmup * self.steps), 1)
        if step <= warm:
            return self.lr * step / warm
        done = (step - warm) / (self.steps - warm + 1)
        return self.lr * (1 + math.cos(math.pi * done)) / 2

    def at(self, step: int, times: int | tuple[float, ...]) -> bool:
        """Whether a step is one of so many, spread evenly, or ends one of these shares of all.

        The last one always is.
        """
        if not isinstance(times, int):
            ends = {max(round(share * self.steps), 1) for share in times}
            return step in ends or step == self.steps
        return step * times // self.steps > (step - 1) * times // self.steps


@dataclass(frozen=True)
class Best:
    """The check that was kept."""

    score: float
    step: int


def train(
    model: nn.Module,
    recipe: Recipe,
    *,
    examples: int,
    seed: int,
    loss: Callable[[Tensor], Tensor],
    score: Callable[[], float],
    curve: Curve | None = None,
    checkpoint: Checkpoint | None = None,
    tick: Callable[[float], None] | None = None,
    save_every: float = 10.0,
    capture: bool = False,
) -> Best:
    """Train a model, keep the best check, and say which one that was.

    loss         of the examples with these numbers, without the losses of routers, which are added
    score        on validation data, larger is better
    save_every   seconds between checkpoints, or more where saving is slow; 0: at each point of the
                 curve. When they are saved changes no bits
    capture      on a GPU, repeat a step as one CUDA graph, where nothing in it waits for the host:
                 `loss` must do the same to every batch. Its rounding differs from that without
    """
    run = _Run(model, recipe, examples, seed, loss, score, capture)
    saved = checkpoint.load() if checkpoint else None
    device = next(model.parameters()).device
    with seeded(step_seed(seed, 0), device):
        if saved:
            run.restore(saved)
        if curve:
            curve.rewind(run.step)
        saving = Saving(save_every)
        while run.step < recipe.steps:
            run.advance()
            if not run.at_point:
                continue
            values = run.point()
            if curve:
                curve.append(run.step, **values)
            if checkpoint and saving.due:
                saving(partial(checkpoint.save, run.state()))
            if tick:
                tick(run.step / recipe.steps)
    return run.finish()


class _Run:
    """A training in flight."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        examples: int,
        seed: int,
        loss: Callable[[Tensor], Tensor],
        score: Callable[[], float],
        capture: bool,
    ) -> None:
        self.model, self.recipe, self.seed = model, recipe, seed
        self.loss, self.score = loss, score
        self.routed = any(isinstance(part, MoE) for part in model.modules())
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.device = self.trained[0].device
        self.capture = capture and self.device.type == "cuda"
        self.graph: Graph | None = None
        words = repeatable(recipe.lr, self.trained, self.capture)
        self.lr: float | Tensor = words["lr"]
        self.optimizer = torch.optim.AdamW(self.trained, weight_decay=recipe.weight_decay, **words)
        self.examples, self.batch = examples, min(recipe.batch, examples)
        self.step, self.losses = 0, []  # type: tuple[int, list[Tensor]]
        self.taken = 0  # steps, since the training began or went on
        self.best, self.weights = Best(-math.inf, 0), {}  # type: tuple[Best, dict[str, Tensor]]
        self.epoch, self.order = -1, torch.empty(0)

    # -- one step --------------------------------------------------------------------------------

    def advance(self) -> None:
        """Take the next step."""
        self.model.train()
        rate, rows = self.recipe.rate(self.step + 1), self.rows(self.step)
        self.lr = self.lr.fill_(rate) if isinstance(self.lr, Tensor) else rate
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        if self.capture and self.taken == WARM:
            self.graph = capture(self.update, rows, type(self.model).__name__)
        loss = self.graph.replay(rows) if self.graph else self.update(rows)
        assert loss is not None
        self.step, self.taken = self.step + 1, self.taken + 1
        self.losses.append(loss)  # read at the next point: a GPU need not wait

    def update(self, rows: Tensor) -> Tensor:
        """The update by some examples; their loss before it."""
        loss = self.full_loss(rows)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.trained, self.recipe.clip)
        self.optimizer.step()
        return loss.detach()

    def full_loss(self, rows: Tensor) -> Tensor:
        """The loss of the task and of the routers."""
        if not self.routed:
            return self.loss(rows)
        with watch(self.model) as routes:
            loss, balance = self.loss(rows), routes.loss()
            # Where no layer has any, a zero on the host, which a captured step cannot copy.
            return loss + (balance if balance.device.type == "cpu" else balance.to(loss.device))

    def rows(self, step: int) -> Tensor:
        """The examples of a step; what is left over at the end of an epoch waits for the next."""
        epoch, place = divmod(step, self.examples // self.batch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(step_seed(self.seed, epoch + 1))
            order = torch.randperm(self.examples, generator=generator)
            self.epoch, self.order = epoch, order.to(self.device)
        return self.order[place * self.batch : (place + 1) * self.batch]

    # -- between steps ---------------------------------------------------------------------------

    @property
    def at_point(self) -> bool:
        return self.at_check or self.recipe.at(self.step, self.recipe.points)

    @property
    def at_check(self) -> bool:
        return self.recipe.at(self.step, self.recipe.checks)

    def point(self) -> dict[str, float]:
        """The values of a curve: mean loss since the last one, and a check where one is due."""
        values = {"loss": float(torch.stack(self.losses).double().mean())}
        self.losses = []
        if not math.isfinite(values["loss"]):
            raise ValueError(
                f"the loss became {values['loss']} before step {self.step}: lower the learning "
                f"rate ({self.recipe.lr:g})"
            )
        if self.at_check:
            self.model.eval()
            values["validation"] = score = self.score()
            if score > self.best.score:
                self.best, self.weights = Best(score, self.step), _copy(self.model.state_dict())
        return values

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best": {"score": self.best.score, "step": self.best.step, "model": self.weights},
            "random": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        best = state["best"]
        self.best, self.weights = Best(best["score"], best["step"]), best["model"]
        torch.set_rng_state(state["random"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self.device)

    def finish(self) -> Best:
        """Leave the best weights in the model, in eval mode."""
        self.model.load_state_dict(self.weights)
        self.model.eval()
        return self.best


def _copy(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in state.items()}
