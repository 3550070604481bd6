"""`Learner`: what learns from a stream, one phase after the other, and may grow between them.

    learner = moiety.anytime.learner("ensemble", lambda seed: MLP(64), members=3, seed=0)
    phase = Phase(train=examples, validation=held, number=1, seed=0)
    gap = learner.grow(phase)                    # None: it was not due, or this learner never grows
    report = learner.train(phase)                # what was done, and its FLOPs
    probabilities = learner.predict(x)           # [N, C], or [N, L, V] for tokens

A learner writes `build` or `_grow` and declares `exact`; `testing.check_learner` tests it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from .. import cost
from ..train.draws import step_seed
from ..train.fit import seeded
from ..train.loop import Checkpoint
from .data import Examples
from .fitting import Fit, Training, tensor_bytes
from .metering import Meter

PROBE = 512  # rows on which the gap of a growth is measured


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What a phase trains on. The same phase on the same state gives the same bits."""

    train: Examples
    validation: Examples
    number: int
    seed: int = 0
    tick: Callable[[float], None] | None = None  # called after each step with the share done
    checkpoint: Checkpoint | None = None  # where the state goes while the phase runs

    @property
    def probe(self) -> Examples:
        """What growth looks at: validation, or training examples where there is none."""
        return self.validation if len(self.validation) else self.train


@dataclass(frozen=True)
class Report:
    """What a phase did. The numbers are summed over the models that were trained."""

    steps: int
    examples: int  # that went through a training step, each time they did
    validation: float | None  # score of the kept weights, larger is better; mean over the models
    growth: dict[str, Any] | None  # its `gap`, and what was copied; None: did not grow
    # FLOPs: "train" forward and backward, "forward" that part alone (the paper's convention),
    # "validation", and "growth" with the passes that measure its gap
    flops: dict[str, float] = field(default_factory=dict)


class Learner:
    """Models whose probabilities are averaged; this base trains all of them and never grows.

    model      makes a model from a seed; random numbers are seeded when it is called
    training   how a phase trains
    optimizer  "fresh" at each phase, or "carry" its state from the weights kept at the last one
    meter      counts FLOPs; learners of equal models may share one, so that each is counted once
    """

    name: ClassVar[str] = ""
    options: ClassVar[tuple[str, ...]] = ()  # attributes that decide its weights
    every: int = 0  # phases between growths; 0: never

    def __init__(
        self,
        model: Callable[[int], nn.Module],
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        training: Training | None = None,
        optimizer: Literal["fresh", "carry"] = "fresh",
        meter: Meter | None = None,
    ) -> None:
        if optimizer not in ("fresh", "carry"):
            raise ValueError(f'optimizer must be "fresh" or "carry", got {optimizer!r}')
        self.make, self.seed, self.device = model, seed, torch.device(device)
        self.training, self.optimizer = training or Training(), optimizer
        self.meter = meter or Meter()
        self.phases = 0  # trained so far
        self.growth: dict[str, Any] | None = None  # the last one
        self.optimizer_bytes = 0  # of the last phase
        self.models = [self.build(i) for i in range(self.count())]
        self.carried: list[dict[str, Any] | None] = [None] * len(self.models)

    # -- what a learner writes -------------------------------------------------------------------

    @property
    def exact(self) -> bool:
        """Whether growth leaves the predictions as they are, to round-off."""
        return True

    def count(self) -> int:
        """How many models there are at the start."""
        return 1

    def build(self, i: int, phase: int = 0) -> nn.Module:
        """The i-th model as it starts; anew for a phase where one starts from scratch."""
        # The seed of a first model is the learner's own, so that members = 1 is the single model.
        return self._made(step_seed(step_seed(self.seed, phase), i))

    def begin(self, phase: Phase) -> None:
        """Prepare a phase; not called again where a phase is resumed."""

    def trained(self) -> range:
        """The models that a phase trains."""
        return range(len(self.models))

    def _grow(self, phase: Phase) -> dict[str, Any]:
        """Grow once, inside seeded random numbers; returns what to say about it."""
        raise NotImplementedError

    # -- learning --------------------------------------------------------------------------------

    def grow(self, phase: Phase) -> float | None:
        """Grow if it is time, once a phase; returns the gap.

        That is the largest change of a probability on (the first rows of) validation. Growth is due
        after each `every` phases, before the next one trains.
        """
        due = self.every and self.phases and self.phases % self.every == 0
        if not due or self._grown_for_next():
            return None
        probe = phase.probe.x[:PROBE]
        found: dict[str, Any] = {"before": self.phases}

        def run() -> None:
            old = self.predict(probe)
            found.update(self._grow(phase))
            found["gap"] = float((self.predict(probe) - old).abs().max())

        with seeded(step_seed(self._phase_seed(phase), -1), self.device):
            found["flops"] = cost.flops(run)
        self.growth = found
        return found["gap"]

    def train(self, phase: Phase) -> Report:
        """Train a phase, from the checkpoint of the phase where there is one."""
        saved = phase.checkpoint.load() if phase.checkpoint else None
        if saved and saved["number"] == phase.number:
            self.load(saved["learner"])
        else:
            saved = None
            self.grow(phase)
            self.begin(phase)
        return self._report(self._train(phase, saved))

    def _train(self, phase: Phase, saved: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        """Train one model after the other; returns the numbers of each."""
        done: list[dict[str, Any]] = saved["done"] if saved else []
        for i in list(self.trained())[len(done) :]:
            fit = self._fit(i, phase, saved["fit"] if saved else None)
            saved = None
            self._run(fit, phase, done)
            self.carried[i] = fit.optimizer.state_dict() if self.optimizer == "carry" else None
            done.append(self._done(fit))
        return done

    def _fit(self, i: int, phase: Phase, saved: Mapping[str, Any] | None) -> Fit:
        seed = step_seed(self._phase_seed(phase), i)
        carried = self.carried[i]
        fit = self.training.begin(self.models[i], phase.train, phase.validation, seed, carried)
        if saved is not None:
            fit.restore(saved)
        return fit

    def _run(self, fit: Fit, phase: Phase, done: list[dict[str, Any]]) -> None:
        def save() -> None:
            assert phase.checkpoint is not None
            now = {"number": phase.number, "learner": self.state(), "done": done}
            phase.checkpoint.save({**now, "fit": fit.state()})

        def tick(share: float) -> None:
            assert phase.tick is not None
            phase.tick((len(done) + share) / len(self.trained()))

        fit.run(save if phase.checkpoint else None, tick if phase.tick else None)

    def _done(self, fit: Fit) -> dict[str, Any]:
        """The numbers of a training that is over."""
        forward, whole = self.meter.training(fit.model, fit.train, fit.batches())
        check = 0.0
        if fit.checks:
            check = self.meter.answers(fit.model, fit.validation.x, self.training.eval_batch)
        return {
            "steps": fit.step,
            "examples": sum(rows * steps for rows, steps in fit.batches().items()),
            "validation": fit.best,
            "flops": {"train": whole, "forward": forward, "validation": fit.checks * check},
            "bytes": fit.optimizer_bytes,
        }

    def _report(self, done: list[dict[str, Any]]) -> Report:
        self.optimizer_bytes = sum(one["bytes"] for one in done)
        growth = self.growth if self._grown_for_next() else None
        flops = {word: sum(one["flops"][word] for one in done) for word in done[0]["flops"]}
        scores = [one["validation"] for one in done if one["validation"] is not None]
        self.phases += 1
        return Report(
            steps=sum(one["steps"] for one in done),
            examples=sum(one["examples"] for one in done),
            validation=math.fsum(scores) / len(scores) if scores else None,
            growth=growth,
            flops={**flops, "growth": growth["flops"] if growth else 0.0},
        )

    # -- answering -------------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Probabilities `[N, C]`, or of tokens `[N, L, V]`, where x is."""
        parts = []
        for part in x.split(self.training.eval_batch):
            total = sum(model(part.to(self.device)).softmax(-1) for model in self.models)
            parts.append((total / len(self.models)).to(x.device))
        return torch.cat(parts)

    def measure(self, data: Examples) -> dict[str, float]:
        """Error (share of wrong answers) and loss (mean −log p of the truth), of all targets."""
        wrong = loss = 0.0
        rows = self.training.eval_batch
        for x, y in zip(data.x.split(rows), data.y.split(rows)):
            p = self.predict(x)
            wrong += float((p.argmax(-1) != y).sum())
            true = p.gather(-1, y[..., None]).clamp(min=torch.finfo(p.dtype).tiny)
            loss -= float(true.double().log().sum())
        return {"error": wrong / data.y.numel(), "loss": loss / data.y.numel()}

    # -- what it costs and holds -----------------------------------------------------------------

    def parameters(self) -> int:
        """The number of parameters, frozen ones included."""
        return sum(cost.parameters(model) for model in self.models)

    def inference_flops(self, x: Tensor) -> float:
        """FLOPs of an answer to all rows of x."""
        return cost.forward_flops(lambda: self.predict(x), *self.models)

    def bytes(self) -> dict[str, int]:
        """Memory of the models, and of the optimizers of the last phase."""
        models = sum(tensor_bytes(model.state_dict()) for model in self.models)
        return {"model": models, "optimizer": self.optimizer_bytes}

    def words(self) -> dict[str, Any]:
        """What it was made with, as plain values: a state goes on under the same words only."""
        own = {name: getattr(self, name) for name in (*self.options, "seed", "optimizer")}
        return {"learner": self.name, **own, **self.training.words()}

    def state(self) -> dict[str, Any]:
        """Everything that a learner made with the same words needs to go on as this one.

        Like `state_dict`, its tensors are the live ones.
        """
        return {
            "words": self.words(),
            "phases": self.phases,
            "growth": self.growth,
            "optimizer_bytes": self.optimizer_bytes,
            "models": [model.state_dict() for model in self.models],
            "carried": self.carried,
            "counted": self.meter.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""
        for word, mine in self.words().items():
            if (other := state["words"].get(word)) != mine:
                raise ValueError(
                    f"this is the state of a learner with {word} = {other!r}, not {mine!r}: go on "
                    "with the same, or start in another folder"
                )
        self.phases, self.growth = state["phases"], copy.deepcopy(state["growth"])
        self.optimizer_bytes = state["optimizer_bytes"]
        self.carried = copy.deepcopy(state["carried"])
        self.meter.load(state["counted"])
        self.models = [self._rebuild(i, state) for i in range(len(state["models"]))]
        for model, weights in zip(self.models, state["models"]):
            model.load_state_dict(weights)

    def _rebuild(self, i: int, state: Mapping[str, Any]) -> nn.Module:
        """A model with the structure of the i-th one of a state."""
        return self.build(i)

    # -- helpers ---------------------------------------------------------------------------------

    def _made(self, seed: int) -> nn.Module:
        with seeded(seed, self.device):
            return self.make(seed).to(self.device).eval()

    def _phase_seed(self, phase: Phase) -> int:
        return step_seed(phase.seed, phase.number)

    def _grown_for_next(self) -> bool:
        return self.growth is not None and self.growth["before"] == self.phases
