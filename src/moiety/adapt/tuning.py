"""The training of a classifier, which may be killed at any moment and goes on to the same bits.

Every lot is drawn from seed and step: the order of the examples, dropout, and the noise of R3F. So
methods with one seed see the same batches with the same dropout.

    latest.safetensors   the state in flight
    history.jsonl        a line for every check
    final.safetensors    weights, scores and history, when all is over
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import io
from ..train.fit import seeded
from ..train.graph import repeatable
from ..train.state import read_state, state_bytes
from .classifier import Classifier, parameter_groups
from .flight import Flight
from .mars import Mars
from .mixtures import balance_losses, uncounted
from .r3f import R3F
from .recadam import RecAdam
from .recipe import Diverged, set_rate
from .repeated import Repeated, Tensors
from .scores import score
from .together import Member

ORDER, DROPOUT, NOISE = 11, 12, 13  # what a seed is used for
CLIP = 1.0  # of the norm of the gradient
LABELS = "labels"  # among the tensors of a step
Method = Literal["plain", "recadam", "mars", "r3f"]
OPTIONS: dict[str, dict[str, float | None]] = {  # None: it follows from the recipe
    "plain": {},
    "recadam": {"k": 0.1, "t0": None, "strength": None},
    "mars": {"radius": 1.0},
    "r3f": {"weight": 1.0, "noise": 1e-5},
}


@dataclass(frozen=True, kw_only=True)
class TuneRecipe:
    """How long and how fast, and by which method.

    warmup      share of the steps in which the learning rate rises
    checks      scores on the validation examples, evenly spread
    precision   "bfloat16": products in it, weights and their updates in float32
    """

    steps: int
    batch: int
    lr: float
    weight_decay: float = 0.01
    warmup: float = 0.05
    dropout: float | None = None
    checks: int = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    method: Method = "plain"
    options: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "checks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be a positive number, got {self.lr}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be 0 or more, got {self.weight_decay}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is a share of the steps, from 0 to below 1: {self.warmup}")
        if self.precision not in ("float32", "bfloat16"):
            raise ValueError(f'precision is "float32" or "bfloat16", got {self.precision!r}')
        if self.method not in get_args(Method):
            known = ", ".join(get_args(Method))
            raise ValueError(f"method must be one of {known}, got {self.method!r}")
        unknown = self.options.keys() - OPTIONS[self.method].keys()
        if unknown:
            known = ", ".join(OPTIONS[self.method]) or "none"
            raise ValueError(
                f"{self.method} has no option {sorted(unknown)[0]!r}; its options: {known}"
            )

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0: up to `lr`, then down to nothing."""
        warm = round(self.warmup * self.steps)
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * (self.steps - step) / (self.steps - warm)

    def option(self, name: str) -> float:
        """An option of the method, or its default."""
        value = self.options.get(name, OPTIONS[self.method][name])
        if name == "t0" and value is None:
            return self.steps / 4
        if name == "strength" and value is None:
            return min(5000.0, 1 / self.lr)  # the authors' own, where a step cannot jump too far
        assert value is not None
        return float(value)


class Tuning(Flight):
    """A fine-tuning in flight."""

    order_lot = ORDER
    key = ""

    def __init__(
        self,
        classifier: Classifier,
        data: Any,
        labels: Tensor,
        recipe: TuneRecipe,
        seed: int,
        validation: Any = None,
        capture: bool = False,
        crew: Member | None = None,
    ) -> None:
        super().__init__(recipe, len(labels), seed)
        self.classifier, self.data, self.labels = classifier, data, labels
        self.validation = validation
        self.device = next(classifier.model.parameters()).device
        self.trained = [p for p in classifier.model.parameters() if p.requires_grad]
        self.captures = capture and self.device.type == "cuda"
        self.repeated: Callable[[Tensors], dict[str, Tensor]] = self._change
        self.crew = crew
        if crew is not None:
            self.repeated = partial(crew.step, self)
        elif self.captures:
            self.repeated = Repeated("fine-tuning", self._change)
        self.optimizer = self._optimizer()
        mars, r3f = recipe.method == "mars", recipe.method == "r3f"
        trunk = classifier.trunk().values()
        self.ball = Mars(trunk, recipe.option("radius")) if mars else None
        self.r3f = R3F(recipe.option("weight"), recipe.option("noise")) if r3f else None
        self.count = 0
        self.sum = torch.zeros((), dtype=torch.float64, device=self.device)

    def _optimizer(self) -> torch.optim.AdamW:
        """AdamW with its default betas, or RecAdam around the weights as they are."""
        recipe, groups = (
            self.recipe,
            list(parameter_groups(self.classifier, self.recipe.weight_decay)),
        )
        words = repeatable(recipe.lr, self.trained, self.captures)
        if recipe.method != "recadam":
            return torch.optim.AdamW(groups, **words)
        options = {name: recipe.option(name) for name in ("k", "t0", "strength")}
        return RecAdam(groups, **words, **options)

    # -- the course ------------------------------------------------------------------------------

    def run(self, tick: Callable[[float], None] | None = None) -> None:
        """Train, or go on, to the end; the model is left in eval mode."""
        self._begin()
        with seeded(0, self.device):
            self.fly(tick)
        if self.folder:
            self._save()  # what follows, scores and files, may be killed too
        self.repeated = self._change  # graphs hold memory
        self.classifier.model.eval()
        self.optimizer.zero_grad()

    def advance(self) -> None:
        """Take the next step."""
        rows = self.rows_of(self.step)
        torch.manual_seed(self.lot(DROPOUT, self.step))
        tensors = self.classifier.inputs(self.classifier.encoder.batch(self.data.take(rows)))
        if self.r3f and self.r3f.weight:
            lots = torch.Generator(self.device).manual_seed(self.lot(NOISE, self.step))
            tensors["noise"] = self.r3f.draw(self.classifier.model, tensors, lots)
            # A tensor, so that trainings of several weights are one program.
            tensors["weight"] = torch.full((), self.r3f.weight, dtype=torch.float64).to(self.device)
        if self.captures or self.crew:  # few shapes, each captured once
            tensors = self.classifier.encoder.rounded(tensors)
        tensors[LABELS] = self.labels[rows].to(self.device)
        set_rate(self.optimizer, self.recipe.rate(self.step))
        loss = self.repeated(tensors)["loss"]
        self.step, self.count = self.step + 1, self.count + 1
        self.sum += loss.double()  # read at the next check: a GPU need not wait

    def _change(self, tensors: Tensors) -> dict[str, Tensor]:
        """Change the weights; the loss before."""
        loss, told = self.loss(tensors)
        self.optimizer.zero_grad()
        loss.backward()
        self.apply()
        return told

    def apply(self) -> None:
        """Change the weights by their gradients."""
        nn.utils.clip_grad_norm_(self.trained, CLIP)
        self.optimizer.step()
        if self.ball:
            self.ball.project()

    @property
    def trained_model(self) -> nn.Module:
        return self.classifier.model

    @property
    def alike(self) -> Hashable:
        noisy = self.r3f is not None and self.r3f.weight > 0
        return noisy, self.recipe.dropout, self.recipe.precision, self.captures

    def fit(self, tensors: Tensors, length: int) -> Tensors:
        return self.classifier.encoder.rounded(dict(tensors), length)

    def loss(self, tensors: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and the same as a number."""
        inputs = dict(tensors)
        labels, *noisy = (inputs.pop(name, None) for name in (LABELS, "noise", "weight"))
        assert labels is not None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            loss = self._loss(inputs, labels, *noisy)
        return loss, {"loss": loss.detach()}

    def _loss(
        self,
        inputs: dict[str, Tensor],
        labels: Tensor,
        noise: Tensor | None,
        weight: Tensor | None,
    ) -> Tensor:
        """Cross-entropy, the balance of experts if there are any, and what noise changes in R3F."""
        with balance_losses(self.classifier.model) as terms:
            logits = self.classifier.model(**inputs).logits
        exact = torch.promote_types(logits.dtype, torch.float32)
        loss = F.cross_entropy(logits.to(exact), labels)
        if terms:
            loss = loss + torch.stack(terms).sum()
        if noise is not None:
            assert self.r3f is not None and weight is not None
            with uncounted(self.classifier.model):
                apart = self.r3f(self.classifier.model, inputs, logits, noise)
            loss = loss + weight.to(apart.dtype) * apart
        return loss

    def look(self) -> None:
        """Write a line: the mean training loss since the last, and the scores of validation."""
        line: dict[str, Any] = {"step": self.step, "loss": float(self.sum) / self.count}
        self.sum, self.count = torch.zeros_like(self.sum), 0
        self.check_finite(line["loss"])
        if self.validation is not None:
            line["validation"] = score(
                self.classifier, self.validation, self.recipe.batch, "validation"
            )
            self.check_finite(line["validation"]["loss"])
        self.history.append(line)
        if self.folder:
            io.append_line(self.folder / "history.jsonl", json.dumps(line))

    def check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss is no longer a number before step {self.step}: lower the learning rate "
                f"({self.recipe.lr:g})"
            )

    # -- what is on the disk ---------------------------------------------------------------------

    def keep(self, folder: Path, key: str, save_every: float) -> None:
        """Keep the state in a folder; one with the state of another key is refused."""
        self.folder, self.key, self.save_every = folder, key, save_every
        io.sweep(folder)

    def _begin(self) -> None:
        """Go on from the state in the folder, if there is one."""
        if not self.folder:
            return
        latest = self.folder / "latest.safetensors"
        if latest.exists():
            self._restore(read_state(latest))
        # Lines that were written after the state are written again.
        lines = "".join(f"{json.dumps(line)}\n" for line in self.history)
        io.write_atomic(self.folder / "history.jsonl", lines)

    def _save(self) -> None:
        assert self.folder is not None
        state = {
            "key": self.key,
            "step": self.step,
            "model": self.classifier.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sum": self.sum,
            "count": self.count,
            "history": self.history,
            "seconds": self.seconds,
        }
        io.write_atomic(self.folder / "latest.safetensors", state_bytes(state))

    def _restore(self, state: dict[str, Any]) -> None:
        if state["key"] != self.key:
            raise ValueError(f"{self.folder} holds another fine-tuning; choose another folder")
        self.classifier.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.captures:
            set_rate(self.optimizer, self.recipe.lr, self.device)
        self.step, self.count, self.seconds = state["step"], state["count"], state["seconds"]
        self.sum, self.history = state["sum"].to(self.device), state["history"]

    def forget(self) -> None:
        """Remove the state in flight: all is written."""
        assert self.folder is not None
        (self.folder / "latest.safetensors").unlink(missing_ok=True)
