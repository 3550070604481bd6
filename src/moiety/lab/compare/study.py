"""The study of a comparison: its arms, metrics and claims, one trial, and how fast an arm is."""

from __future__ import annotations

import functools
import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import cost
from ...data.load import load_problem
from ...data.problem import Problem
from ...train.loop import Recipe, train
from ..claims import Claim, greater
from ..headline import listed
from ..study import Metrics, Running, Scale, Settings, Speed, Study
from ..tuning import LogUniform, Search
from . import measure
from .asked import Asked, AskedGates, Asking, read_asked
from .models import Maker, find_maker
from .task import Task

POINTS = 40  # of a curve
# Shares of the training after which validation data are asked: often early, since a long budget on
# a small table has its best model there.
CHECKS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
SMOKE = 8  # steps of a trial at the smallest scale
SAVE_EVERY = 5.0  # seconds between checkpoints
TIMED = 1.0  # seconds of training that a speed is read from


def from_toml(path: str | Path) -> Study:
    """The study that a TOML file asks for."""
    return make_study(read_asked(Path(path)))


def make_study(asked: Asking) -> Study:
    """The study of a comparison; its data are read now."""
    return make_comparison(asked).study()


def make_comparison(asked: Asking) -> Comparison:
    """A comparison of routers or of gates, with its data."""
    if isinstance(asked, AskedGates):
        from .gates import GateComparison

        return GateComparison.of(asked)
    return Comparison.of(asked)


@dataclass(frozen=True)
class Comparison:
    """A comparison with its data and the maker of its models."""

    asked: Asking
    problem: Problem
    maker: Maker
    task: Task

    @classmethod
    def of(cls, asked: Asking) -> Comparison:
        """Read the data and find the model."""
        assert isinstance(asked, Asked)
        problem = read_problem(asked, text=asked.text, image_size=asked.image_size)
        maker = find_maker(asked.model, problem)
        return cls(asked, problem, maker, Task.of(problem, maker.reader))

    def study(self) -> Study:
        """The study, with a claim for every arm but the one that all are compared with."""
        asked = self.asked
        start = "new head and routers" if self.maker.upcycled else "first weights"
        search = None
        if asked.tune:
            lr = self.settings["lr"]
            search = Search(
                space={"lr": LogUniform(lr / 5, lr * 5)},
                trials=asked.tune,
                metric=f"validation {self.task.main}",
            )
        return Study(
            name=f"compare/{self.slug}",
            title=self.title,
            question=self.question,
            notes=self.notes,
            arms=self.arms,
            metrics=self.task.metrics(),
            scales={
                "smoke": Scale(2, {**self.settings, "examples": SMOKE * self.settings["batch"]}),
                "small": Scale(asked.seeds, self.settings, budget=asked.budget),
            },
            run=self.run,
            speed=self.speed,
            claims=self.claims,
            varies=(start, "order of the examples", "noise of routers and dropout"),
            search=search,
        )

    # -- in words --------------------------------------------------------------------------------

    @property
    def slug(self) -> str:
        """The name of the data as a folder has it."""
        return re.sub(r"[^a-z0-9]+", "-", self.problem.name.lower()).strip("-") or "data"

    @property
    def title(self) -> str:
        return f"Routers on {self.problem.name}"

    @property
    def question(self) -> str:
        names = listed([target.name for target in self.problem.targets])
        return f"Which router predicts {names} of {self.problem.name} best?"

    # -- what is compared ------------------------------------------------------------------------

    @property
    def arms(self) -> dict[str, dict[str, Any]]:
        """The settings of every arm: its router or gate, and options of it where it has any."""
        found: dict[str, dict[str, Any]] = {}
        kind = self.asked.kind
        for name, given in self.asked.arms.items():
            options = {word: value for word, value in given.items() if word != kind}
            found[name] = {kind: given[kind], **({"options": options} if options else {})}
        return found

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """What all arms share; changed data or another model make new trials."""
        asked, maker = self.asked, self.maker
        shared = {
            "data": fingerprint(self.problem),
            "model": maker.name,
            "experts": asked.experts,
            "k": asked.k,
            "lr": asked.lr or maker.lr,
            "batch": asked.batch or maker.batch,
        }
        return (
            {**shared, "init": asked.init}
            if isinstance(asked, Asked) and maker.upcycled
            else shared
        )

    @property
    def claims(self) -> list[Claim]:
        """That each arm beats the one that all are compared with by more than the margin."""
        margin, main, reference = self.asked.margin, self.task.main, self.asked.reference
        return [
            greater(
                name,
                reference,
                margin,
                metric=main,
                quote=f"Is {name} better than {reference} on {self.problem.name}?",
                reason="the smallest difference that was asked for",
                tier="our own",
            )
            for name in self.arms
            if name != reference and reference in self.arms
        ]

    @property
    def notes(self) -> list[str]:
        """What a reader should know of data and training, a line each."""
        share, used = self.settings, self.maker
        trained = (
            f"Training: AdamW, learning rate {share['lr']:g} with a warm-up over a tenth of the "
            f"steps and a cosine down to zero, batches of {share['batch']}; of {len(CHECKS)} "
            "checks on validation data the best is kept and tested once"
        )
        costs = (
            "Memory: of a training step; on a CPU estimated from weights, gradients, AdamW's "
            "states and what a batch saves for the backward pass. FLOPs: active, forward, of one "
            "example, padding left out"
        )
        found = [note for note in self.problem.notes if not note.startswith("leaks:")]
        leaks = [f"Suspected leak: {leak}" for leak in self.problem.leaks]  # the same, in full
        return [*leaks, *found, f"Model: {used.about}", trained, costs]

    # -- a trial ---------------------------------------------------------------------------------

    def build(self, settings: Settings, seed: int, device: torch.device) -> nn.Module:
        """The model of an arm."""
        return self.maker.build(settings, seed).to(device)

    def run(self, running: Running) -> Metrics:
        """Train one arm from one seed, test it once, and tell what it cost."""
        settings, device = running.settings, running.device
        task, model = self.task.to(device), self.build(settings, running.seed, device)
        costs = measure.costs(model, task, settings["batch"])
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.train(model, task, settings, running)
        if device.type == "cuda":
            costs["memory"] = torch.cuda.max_memory_allocated(device)
        answers, told = self.tell(model, task)
        costs["flops"] = measure.flops(model, task)  # as it routes now that it has learned
        running.extra.update(costs, **told)
        validation = task.measure(answers, "validation")[task.main]
        tested = task.measure(task.answers(model, "test"), "test")
        found = {**tested, f"validation {task.main}": validation}
        return {name: found.get(name) for name in task.metrics()}  # None: labels do not define it

    def tell(self, model: nn.Module, task: Task) -> tuple[Tensor, dict[str, Any]]:
        """The answers to the validation data, and what the page shows of the routing."""
        answers, loads = measure.loads(model, task)
        return answers, {"loads": loads}

    def train(
        self, model: nn.Module, task: Task, settings: Settings, running: Running | None = None
    ) -> None:
        """Train a model for the examples that its settings say; the best check is kept."""
        there = len(task.splits["train"])
        batch = min(settings["batch"], there)
        recipe = Recipe(
            steps=max(round(settings["examples"] / batch), 1),
            batch=batch,
            lr=settings["lr"],
            points=POINTS,
            checks=CHECKS if running else 1,
        )

        def loss(rows: Tensor) -> Tensor:
            return task.batch_loss(model, "train", rows)

        def score() -> float:
            if running is None:
                return 0.0
            return task.measure(task.answers(model, "validation"), "validation")[task.main]

        words: Mapping[str, Any] = {}
        if running is not None:
            words = {
                "curve": running.curve,
                "checkpoint": running.checkpoint,
                "tick": running.tick,
                "save_every": SAVE_EVERY,
            }
        seed = running.seed if running else 0
        train(model, recipe, examples=there, seed=seed, loss=loss, score=score, **words)

    # -- how fast --------------------------------------------------------------------------------

    def speed(self, settings: Settings, device: torch.device) -> Speed:
        """Time a few steps and an evaluation of an arm."""
        task, model = self.task.to(device), self.build(settings, 0, device)
        batch = min(settings["batch"], len(task.splits["train"]))

        def timed(steps: int) -> float:
            start = time.perf_counter()
            self.train(model, task, {**settings, "examples": steps * batch})
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return (time.perf_counter() - start) / steps

        timed(2)  # the first of all is slower, and so is the first model that is built
        seconds = timed(min(max(int(TIMED / timed(3)), 3), 200))
        begin = time.perf_counter()
        measure.costs(self.build(settings, 0, device), task, settings["batch"])
        built = time.perf_counter() - begin
        flops = self.charged(model, settings, task)
        return Speed(seconds / batch, flops, built + self._testing(model, task))

    def charged(self, model: nn.Module, settings: Settings, task: Task) -> float:
        """The FLOPs of an example that equal FLOPs count, of a model that was just timed.

        Not of a new one, because routers with a capacity drop more before they have learned.
        """
        return measure.flops(model, task)

    def _testing(self, model: nn.Module, task: Task) -> float:
        """Seconds of all evaluations of a trial, from one of them."""
        middle = len(task.splits["validation"]) // 2  # texts lie there by their length
        rows = slice(max(middle - 256, 0), middle + 256)
        model.eval()
        start = time.perf_counter()
        with torch.no_grad():
            some = len(task.answer(model, "validation", rows).cpu())
        one = (time.perf_counter() - start) / some
        sizes = {name: len(split) for name, split in task.splits.items()}
        return one * ((len(CHECKS) + 1) * sizes["validation"] + sizes["test"])

    def cost(self, arm: str, device: torch.device) -> dict[str, Any]:
        """What an arm would cost, without training it: for a dry run."""
        settings = {**self.settings, **self.arms[arm]}
        task, model = self.task.to(device), self.build(settings, 0, device)
        found = measure.costs(model, task, settings["batch"])
        return {**found, "trained": cost.parameters(model, trainable=True)}


def read_problem(asked: Asking, **words: Any) -> Problem:
    """The data that were asked for."""
    return load_problem(
        asked.data,
        targets=asked.targets,
        data_dir=asked.data_dir,
        seed=asked.split_seed,
        max_examples=asked.max_examples,
        leaks="keep" if asked.keep_leaks else "drop",
        **words,
    )


def fingerprint(problem: Problem) -> str:
    """A hash of all examples and their split, so that trials on other data never mix."""
    digest = hashlib.sha256()
    for name, split in problem.splits.items():
        digest.update(name.encode())
        for values in (*split.inputs.values(), *split.targets.values()):
            digest.update(values.contiguous().numpy().tobytes())
        for text in split.texts:
            digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]
