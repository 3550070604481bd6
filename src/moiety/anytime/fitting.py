"""`Fit`: the training of one model in one phase, which may be killed and goes on to the same bits.

fit = Fit(model, Training(epochs=20), train, validation, seed=3)
fit.run()                                # the best weights on validation are left in the model

Order and random numbers of a step follow from seed and step, as in `train.fit_many`: batches in the
order of `train.fit`, and `step_seed(seed, step)` before each step. So a state needs neither.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ..moe import MoE
from ..train.draws import step_seed
from ..train.fit import _batches, seeded
from ..train.saving import Saving
from ..watch import watch
from .data import Examples

METHODS: dict[str, tuple[Any, float]] = {  # and their usual learning rates
    "adadelta": (torch.optim.Adadelta, 1.0),
    "sgd": (torch.optim.SGD, 0.01),
    "adam": (torch.optim.Adam, 1e-3),
    "adamw": (torch.optim.AdamW, 1e-3),
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a phase trains; the defaults are those of ALMA for MNIST (digest 4, section 4.3).

    For CIFAR-10: method="sgd", options={"momentum": 0.9, "weight_decay": 1e-4}, augment=crop_flip.
    """

    method: str = "adadelta"  # or "sgd", "adam", "adamw", as in torch.optim
    lr: float | None = None  # None: the usual one of the method
    options: Mapping[str, Any] = field(default_factory=dict)  # the other arguments of the method
    batch: int = 128
    epochs: int = 100  # at most, in a phase
    steps: int | None = None  # at most, in a phase
    patience: int = 25  # epochs without a gain, after which a phase ends
    min_gain: float = 0.001  # of the score on validation, for an epoch to be the best so far
    score: Literal["accuracy", "loss"] = "accuracy"  # what validation is about
    clip: float | None = None  # the largest norm of the gradient
    augment: Callable[[Tensor], Tensor] | None = None  # of the inputs of a training batch
    eval_batch: int = 256
    save_every: float = 10.0  # seconds between checkpoints; 0: after each step

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        for name in ("batch", "epochs", "steps", "patience", "eval_batch"):
            count = getattr(self, name)
            if count is not None and (not isinstance(count, int) or count < 1):
                raise ValueError(f"{name} must be a whole number, at least 1, got {count!r}")
        if isinstance(self.lr, int | float) and not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be a positive number, got {self.lr}")
        if self.score not in ("accuracy", "loss"):
            raise ValueError(f'score must be "accuracy" or "loss", got {self.score!r}')
        try:
            self.optimizer([nn.Parameter(torch.zeros(1))])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.method} does not take lr and options: {error}") from None

    def words(self) -> dict[str, Any]:
        """What decides the weights, as plain values."""
        words = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "save_every"}
        words["options"] = {name: repr(value) for name, value in sorted(self.options.items())}
        words["augment"] = getattr(self.augment, "__name__", None)
        return words

    def optimizer(self, parameters: Any) -> Optimizer:
        """A fresh optimizer."""
        make, usual = METHODS[self.method]
        return make(parameters, lr=usual if self.lr is None else self.lr, **self.options)

    def begin(
        self,
        model: nn.Module,
        train: Examples,
        validation: Examples,
        seed: int,
        carried: Mapping[str, Any] | None = None,
    ) -> Fit:
        """The training of a model in a phase; a kind of `Training` may have its own `Fit`."""
        return Fit(model, self, train, validation, seed, carried)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The cross entropy of classes or tokens, and the losses of routers."""
    if not any(isinstance(part, MoE) for part in model.modules()):
        return cross_entropy(model(x), y)
    with watch(model) as routes:
        loss = cross_entropy(model(x), y)
        return loss + routes.loss()


def cross_entropy(logits: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Of classes `[N, C]` or of tokens `[N, L, V]`."""
    return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction=reduction)


@torch.no_grad()
def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of each example, or of each token, of a batch."""
    return cross_entropy(model(x), y, reduction="none")


class Fit:
    """A training in flight."""

    def __init__(
        self,
        model: nn.Module,
        training: Training,
        train: Examples,
        validation: Examples,
        seed: int,
        carried: Mapping[str, Any] | None = None,
    ) -> None:
        if len(train) == 0:
            raise ValueError("there is nothing to train on: the phase has no training examples")
        self.model, self.training, self.seed = model, training, seed
        self.device = next(model.parameters()).device
        train = _no_lonely_row(model, train, training.batch)
        self.train, self.validation = train.to(self.device), validation.to(self.device)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = training.optimizer(self.trained)
        if carried is not None:
            self.optimizer.load_state_dict(copy.deepcopy(dict(carried)))
        self.per_epoch = math.ceil(len(train) / training.batch)
        self.last = min(training.epochs * self.per_epoch, training.steps or math.inf)
        self.step = self.checks = self.bad = 0
        self.best: float | None = None  # the score of the weights that are kept
        self.kept: dict[str, Any] = {}
        self.losses: list[Tensor] = []
        self.optimizer_bytes = 0  # at the end

    # -- the loop --------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return self.step >= self.last or self.bad >= self.training.patience

    def run(
        self,
        save: Callable[[], None] | None = None,
        tick: Callable[[float], None] | None = None,
    ) -> None:
        """Train to the end; `save` is called now and then, and what it saved leads to the same."""
        batches = _batches(len(self.train), self.training.batch, self.training.epochs, self.seed)
        saving = Saving(self.training.save_every)
        with seeded(self.seed, self.device):
            for rows in islice(batches, self.step, None):
                if self.over:
                    break
                self._advance(rows)
                if self.step % self.per_epoch == 0 or self.step >= self.last:
                    self._check()
                if save and saving.due:
                    saving(save)
                if tick:
                    tick(self.step / self.last)
        self._finish()

    def _advance(self, rows: Tensor) -> None:
        self.step += 1
        torch.manual_seed(step_seed(self.seed, self.step))
        self.losses.append(self._update(rows))  # read after the epoch: a GPU need not wait

    def _update(self, rows: Tensor) -> Tensor:
        """The update by some examples; their loss before it."""
        batch = self.train.take(rows)
        x = batch.x if self.training.augment is None else self.training.augment(batch.x)
        self.model.train()
        loss = loss_of(self.model, x, batch.y)
        self.optimizer.zero_grad()
        loss.backward()
        if self.training.clip is not None:
            nn.utils.clip_grad_norm_(self.trained, self.training.clip)
        self.optimizer.step()
        return loss.detach()

    def _check(self) -> None:
        """Measure validation after an epoch; keep the weights where they gained."""
        mean = float(torch.stack(self.losses).double().mean())
        self.losses = []
        if not math.isfinite(mean):
            raise ValueError(f"the loss became {mean} before step {self.step}: lower lr")
        if len(self.validation) == 0:
            return
        score = self._score()
        self.checks += 1
        if self.best is None or score > self.best + self.training.min_gain:
            self.best, self.bad = score, 0
            self.kept = copy.deepcopy(self._weights())
        else:
            self.bad += 1

    @torch.no_grad()
    def _score(self) -> float:
        """Accuracy, or minus the loss, on validation: larger is better."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        rows = self.training.eval_batch
        for x, y in zip(self.validation.x.split(rows), self.validation.y.split(rows)):
            if self.training.score == "loss":
                total -= losses_of(self.model, x, y).double().sum()
            else:
                total += (self.model(x).argmax(-1) == y).sum()
        return float(total) / self.validation.y.numel()

    def _finish(self) -> None:
        self.optimizer_bytes = tensor_bytes(self.optimizer.state_dict())
        if self.kept:
            self.model.load_state_dict(self.kept["model"])
            self.optimizer.load_state_dict(self.kept["optimizer"])
        self.optimizer.zero_grad()
        self.model.eval()

    # -- what was done, and how to go on ---------------------------------------------------------

    def batches(self) -> dict[int, int]:
        """How many steps were taken with batches of each size."""
        return batch_sizes(len(self.train), self.training.batch, self.step)

    def _weights(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, besides the weights of the model."""
        counts = {name: getattr(self, name) for name in ("step", "checks", "bad", "best")}
        losses = torch.stack(self.losses) if self.losses else torch.empty(0)
        return {**counts, "losses": losses, "kept": self.kept, "now": self.optimizer.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; the model has its weights already."""
        for name in ("step", "checks", "bad", "best"):
            setattr(self, name, state[name])
        self.losses = list(state["losses"].to(self.device))
        self.kept = dict(state["kept"])
        self.optimizer.load_state_dict(state["now"])


def _no_lonely_row(model: nn.Module, train: Examples, batch: int) -> Examples:
    """The examples, the first one twice where batch norm would meet a last batch of one row.

    It has no spread, which torch refuses: a stream whose phase happens to have such a number of
    rows would end there, and again whenever it is taken up.
    """
    lonely = len(train) % batch == 1 and batch > 1
    if lonely and any(isinstance(part, nn.BatchNorm1d) for part in model.modules()):
        return train.take([*range(len(train)), 0])
    return train


def batch_sizes(rows: int, batch: int, steps: int) -> dict[int, int]:
    """How many of so many steps over some rows are taken with batches of each size."""
    per_epoch = math.ceil(rows / batch)
    epochs, begun = divmod(steps, per_epoch)
    sizes = {min(batch, rows): epochs * (per_epoch - 1) + begun}
    rest = rows - (per_epoch - 1) * batch
    sizes[rest] = sizes.get(rest, 0) + epochs
    return {size: taken for size, taken in sizes.items() if taken}


def tensor_bytes(state: Any) -> int:
    """Memory of all tensors in a state."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, Mapping):
        return sum(tensor_bytes(value) for value in state.values())
    return sum(map(tensor_bytes, state)) if isinstance(state, list | tuple) else 0
