"""Learners that walk through a stream together, each kind in the way that makes one program of it.

`Stack`: single models, ensembles and growing ensembles, all copies of one structure; `Grown`:
learners of the library with one model each, such as a mixture that grows. What they cost is counted
as the library counts it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ... import cost
from ...anytime.base import Learner, Phase, Report
from ...anytime.data import Examples
from ...anytime.fitting import Training, batch_sizes
from ...anytime.learners import learner as make_learner
from ...anytime.ledger import Line
from ...anytime.metering import Meter
from ...anytime.together import numbers_of
from ...train.draws import step_seed
from ...train.phased import Ended, Phased, Rules
from .firefly import Firefly, cut_back, padded, unit_of

Key = tuple[str, int]  # a learner by name, and its seed


@dataclass(frozen=True, kw_only=True)
class Cell:
    """All that the learners of a comparison share, but their seeds."""

    train: Examples  # of all mega-batches, on the device
    test: Examples
    batches: int  # B
    make: Callable[[int], nn.Module]
    training: Training
    wait: str = "1"
    replay: str = "none"
    validation: float = 0.1
    classes: int = 10
    members: int = 3
    every: int = 1  # phases between growths
    options: Mapping[str, Any] = field(default_factory=dict)  # of a learner that is not stacked
    meter: Meter = field(default_factory=Meter)  # cells of equal models may share one
    until: int | None = None  # the last mega-batch that is looked at, where it is not the last

    @property
    def device(self) -> torch.device:
        return self.train.x.device

    def rules(self) -> Rules:
        """The training as `Phased` knows it."""
        words = ("batch", "epochs", "patience", "min_gain", "score", "augment")
        if self.training.clip is not None or self.training.steps is not None:
            raise ValueError("cells are trained without clip and steps: leave them out")
        own = {word: getattr(self.training, word) for word in words}
        return Rules(optimizer=self.training.method, **own, **numbers_of(self.training))


@dataclass
class Course:
    """What came of a cell."""

    lines: dict[str, list[list[Line]]]  # by learner and seed
    checks: list[list[int]] = field(default_factory=list)  # of each phase, by copy

    def by_seed(self, i: int) -> dict[str, list[Line]]:
        return {name: each[i] for name, each in self.lines.items()}


@dataclass(frozen=True)
class Rows:
    """What a phase uses: row numbers of training and of validation, by seed."""

    train: list[Tensor]
    held: list[Tensor]
    fresh: int  # rows of training that are not replayed
    number: int


# -- what learners cost ----------------------------------------------------------------------------


class Prices:
    """FLOPs of one model structure, counted once for each number of rows and steps."""

    def __init__(self, cell: Cell, model: nn.Module, meter: Meter) -> None:
        self.cell, self.model, self.meter = cell, model, meter
        self.parameters = cost.parameters(model)
        self.known: dict[tuple[int, ...], Any] = {}

    def training(self, rows: int, held: int, steps: int, checks: int) -> dict[str, float]:
        """Of a phase of one model, by the words of the ledger."""
        key = rows, held, steps, checks
        if key not in self.known:
            batches = batch_sizes(rows, self.cell.training.batch, steps)
            forward, whole = self.meter.training(self.model, self.cell.train, batches)
            check = checks * self.answers(held)
            self.known[key] = {"train": whole, "forward": forward, "validation": check}
        return self.known[key]

    def answers(self, rows: int) -> float:
        """Of the answers of one model to so many rows."""
        if (rows,) not in self.known:
            x, batch = self.cell.train.x[:rows], self.cell.training.eval_batch
            self.known[rows,] = self.meter.answers(self.model, x, batch)
        return self.known[rows,]

    def done(self, rows: Rows, ended: Ended, i: int) -> dict[str, Any]:
        """What `Learner._report` is told of a model."""
        sizes = len(rows.train[0]), len(rows.held[0])
        steps = ended.steps[i]
        batches = batch_sizes(sizes[0], self.cell.training.batch, steps)
        return {
            "steps": steps,
            "examples": sum(size * taken for size, taken in batches.items()),
            "validation": ended.best[i],
            "flops": self.training(*sizes, steps, ended.checks[i]),
            "bytes": 0,
        }


def _joined(done: Sequence[Mapping[str, Any]], growth: float = 0.0) -> Report:
    """The report of a learner from those of its models."""
    flops = {word: sum(one["flops"][word] for one in done) for word in done[0]["flops"]}
    return Report(
        steps=sum(one["steps"] for one in done),
        examples=sum(one["examples"] for one in done),
        validation=math.fsum(one["validation"] for one in done) / len(done),
        growth=None,
        flops={**flops, "growth": growth},
    )


def _measured(p_KNC: Tensor, y: Tensor) -> list[dict[str, float]]:
    """Error and loss of some learners' answers; one wait for the device."""
    wrong_K = (p_KNC.argmax(-1) != y).double().mean(-1)
    true_KN = p_KNC.gather(-1, y.expand(len(p_KNC), -1)[..., None]).squeeze(-1)
    loss_K = -true_KN.clamp(min=torch.finfo(p_KNC.dtype).tiny).double().log().mean(-1)
    found = torch.stack([wrong_K, loss_K], 1).tolist()
    return [{"error": error, "loss": loss} for error, loss in found]


# -- models of one structure -----------------------------------------------------------------------


class Stack:
    """Single models, ensembles and growing ensembles: their copies are one program."""

    def __init__(
        self, cell: Cell, names: Sequence[str], seeds: Sequence[int], like: Course | None
    ) -> None:
        self.cell, self.names, self.seeds, self.like = cell, names, list(seeds), like
        self.keys = [(name, seed) for name in names for seed in seeds]
        count = cell.members if "ensemble" in names else 1 if "single" in names else 0
        self.growing = "growing-ensemble" in names
        # The copies of a seed lie side by side: members, then the one of a growing ensemble.
        self.members, self.each = count, count + self.growing
        common = {"training": cell.training, "device": cell.device}
        models = []
        for seed in seeds:
            ensemble = make_learner(
                "ensemble", cell.make, seed=seed, members=max(count, 1), **common
            )
            models += [*ensemble.models[:count], *ensemble.models[:1] * self.growing]
        self.phased = Phased(models, cell.train.x, cell.train.y, cell.rules())
        self.prices = Prices(cell, models[0], cell.meter)
        self.grown = 1  # members of a growing ensemble
        self.frozen: Tensor | float = 0.0  # the sum of their answers, by seed
        self.newest: Tensor | float = 0.0  # the answers of the one that trained last
        self.taken: list[list[int]] = []

    def train(self, rows: Rows, tick: Callable[[float], None] | None) -> list[Report]:
        growth = self._grow(rows) if self.growing else 0.0
        seeds = [
            step_seed(step_seed(seed, rows.number), i)
            for seed in self.seeds
            for i in [*range(self.members), *[self.grown - 1] * self.growing]
        ]
        train, held = (
            torch.stack(each).repeat_interleave(self.each, 0) for each in (rows.train, rows.held)
        )
        ended = self.phased.phase(train, held, seeds, tick=tick, **self._steps(rows))
        self.taken.append(ended.checks)
        done = [self.prices.done(rows, ended, i) for i in range(len(seeds))]
        reports = []
        for name, seed in self.keys:
            own = self._copies(name, seed)
            reports.append(
                _joined([done[i] for i in own], growth if name == "growing-ensemble" else 0.0)
            )
        return reports

    def _steps(self, rows: Rows) -> dict[str, Any]:
        """As many as another course took, checked as often, or as the rules say."""
        if self.like is None:
            return {}
        every = math.ceil(rows.fresh / self.cell.training.batch)
        checks, count = self.like.checks[rows.number - 1], len(self.seeds)
        # The other course may have a growing ensemble beside each seed's members.
        by_seed = zip(*[iter(checks)] * (len(checks) // count))
        return {"every": every, "checks": [n for own in by_seed for n in own[: self.each]]}

    def _grow(self, rows: Rows) -> float:
        """Freeze the newest member where it is time; returns the FLOPs of measuring the gap."""
        before = rows.number - 1
        if not before or before % self.cell.every:
            return 0.0
        self.frozen = self.frozen + self.newest
        self.grown += 1
        probe = min(len(rows.held[0]), 512)
        return (2 * self.grown - 1) * self.prices.answers(probe)

    def _copies(self, name: str, seed: int) -> list[int]:
        first = self.seeds.index(seed) * self.each
        if name == "growing-ensemble":
            return [first + self.members]
        return [*range(first, first + (self.members if name == "ensemble" else 1))]

    def measure(self) -> list[dict[str, float]]:
        p_SNC = self.phased.probabilities(self.cell.test.x)
        p_SMNC = p_SNC.unflatten(0, (len(self.seeds), self.each))
        answers = {"single": p_SMNC[:, 0], "ensemble": p_SMNC[:, : self.members].mean(1)}
        if self.growing:
            self.newest = p_SMNC[:, -1].clone()
            answers["growing-ensemble"] = (self.frozen + self.newest) / self.grown
        return _measured(torch.cat([answers[name] for name in self.names]), self.cell.test.y)

    def state(self) -> dict[str, Any]:
        """What it needs to go on after a phase."""
        words = {word: getattr(self, word) for word in ("grown", "frozen", "newest", "taken")}
        return {**words, "copies": self.phased.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.grown, self.taken = state["grown"], state["taken"]
        self.frozen, self.newest = (
            each.to(self.cell.device) if isinstance(each, Tensor) else each
            for each in (state["frozen"], state["newest"])
        )
        self.phased.load(state["copies"])

    def costs(self) -> list[dict[str, Any]]:
        counts = {"single": 1, "ensemble": self.members, "growing-ensemble": self.grown}
        one = {
            "parameters": self.prices.parameters,
            "inference_flops": self.prices.answers(1),
        }
        return [
            {word: counts[name] * value for word, value in one.items()} for name, _ in self.keys
        ]


# -- models that change their structure ------------------------------------------------------------


class Grown:
    """Learners of the library with one model each; those of equal structure are one program.

    They grow by themselves, and are stacked anew after it; those of Firefly, no two of which have
    the same widths, are padded to one.
    """

    def __init__(self, cell: Cell, name: str, seeds: Sequence[int]) -> None:
        self.cell, self.keys = cell, [(name, seed) for seed in seeds]
        common: dict[str, Any] = {"training": cell.training, "meter": cell.meter}
        make = Firefly if name == "firefly" else functools.partial(make_learner, name)
        self.learners: list[Learner] = [
            make(cell.make, seed=seed, device=cell.device, **common, **cell.options)
            for seed in seeds
        ]
        self.pads = name == "firefly"
        compiles = self.pads and cell.device.type == "cuda"
        self.unit = unit_of(self.learners[0].models[0]) if compiles else 1
        self.groups: list[tuple[list[int], list[nn.Module], Phased]] = []
        self.prices: list[Prices] = []
        self.shape: list[str] = []

    def train(self, rows: Rows, tick: Callable[[float], None] | None) -> list[Report]:
        phases = [self._phase(rows, i) for i in range(len(self.keys))]
        for one, phase in zip(self.learners, phases):
            one.grow(phase)
            one.begin(phase)
        self._group()
        reports: dict[int, Report] = {}
        for own, twins, phased in self.groups:
            train, held = (torch.stack([each[i] for i in own]) for each in (rows.train, rows.held))
            seeds = [step_seed(step_seed(self.keys[i][1], rows.number), 0) for i in own]
            ended = phased.phase(train, held, seeds, tick=tick)
            phased.write_to(twins)
            for place, i in enumerate(own):
                if self.pads:
                    cut_back(self.learners[i].models[0], twins[place])
                reports[i] = self.learners[i]._report([self.prices[i].done(rows, ended, place)])
        return [reports[i] for i in range(len(self.keys))]

    def _phase(self, rows: Rows, i: int) -> Phase:
        train, held = (self.cell.train.take(each[i]) for each in (rows.train, rows.held))
        return Phase(train=train, validation=held, number=rows.number, seed=self.keys[i][1])

    def _group(self) -> None:
        """Put models of one structure together, where any has changed."""
        models = [one.models[0] for one in self.learners]
        shape = [_structure(model) for model in models]
        if shape == self.shape:
            return
        self.shape, self.groups = shape, []
        self.prices = [Prices(self.cell, model, self.cell.meter) for model in models]
        twins = padded(models, self.unit) if self.pads else models
        shape = [_structure(model) for model in twins]
        for kind in dict.fromkeys(shape):
            own = [i for i, found in enumerate(shape) if found == kind]
            alike = [twins[i] for i in own]
            data, rules = self.cell.train, self.cell.rules()
            self.groups.append((own, alike, Phased(alike, data.x, data.y, rules)))

    def measure(self) -> list[dict[str, float]]:
        found: dict[int, dict[str, float]] = {}
        for own, _, phased in self.groups:
            answers = phased.probabilities(self.cell.test.x)
            found |= zip(own, _measured(answers, self.cell.test.y))
        return [found[i] for i in range(len(self.keys))]

    def state(self) -> dict[str, Any]:
        return {"learners": [one.state() for one in self.learners]}

    def load(self, state: Mapping[str, Any]) -> None:
        for one, own in zip(self.learners, state["learners"], strict=True):
            one.load(own)

    def costs(self) -> list[dict[str, Any]]:
        x = self.cell.train.x[:1]
        return [
            {"parameters": one.parameters(), "inference_flops": one.inference_flops(x)}
            for one in self.learners
        ]


def _structure(model: nn.Module) -> str:
    return repr([(name, tuple(t.shape)) for name, t in model.state_dict().items()])
