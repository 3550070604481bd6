"""A study: arms compared over seeds, with the claims and their margins written down beforehand.

    study = Study(
        name="lab/routers",
        title="Routers on handwritten digits",
        question="Does any router beat a dense model at equal active FLOPs?",
        run=train_and_test,                       # (Running) -> {"accuracy": 0.97}
        arms={"dense": {"router": "dense"}, "top-k": {"router": "top-k", "k": 2}},
        metrics={"accuracy": Metric("Accuracy", format=".1%")},
        scales={"smoke": Scale(seeds=2, settings={"epochs": 1}), "small": Scale(seeds=5, ...)},
        claims=[greater("top-k", "dense", margin=0.01, metric="accuracy", ...)],
        varies=("first weights", "order of the examples", "noise"),
    )

A file that holds one such value named `study` is all there is to it: `moiety study run FILE`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from ..report.words import difference, number
from ..train import loop
from .claims import Claim
from .store import Trial

Settings = Mapping[str, Any]  # plain JSON values
Metrics = Mapping[str, float | None]
NAME = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")


@dataclass(frozen=True)
class Metric:
    """A number that every trial reports."""

    label: str
    better: Literal["higher", "lower", ""] = "higher"  # "": neither, such as a count
    format: str = ".3g"
    split: Literal["test", "validation", "train", ""] = "test"  # what it was measured on

    def __post_init__(self) -> None:
        if self.better not in ("higher", "lower", ""):
            raise ValueError(f'better is "higher", "lower" or "", not {self.better!r}')
        if self.split not in ("test", "validation", "train", ""):
            raise ValueError(f'split is "test", "validation", "train" or "", not {self.split!r}')
        try:
            difference(0.5, self.format)  # as pages and tables write it, and its differences
            number(0.5, self.format)
        except (ValueError, TypeError):
            raise ValueError(
                f"metric {self.label!r} cannot be written in the format {self.format!r}; give one "
                'such as ".3g", ".1%" or "d"'
            ) from None


@dataclass(frozen=True)
class Scale:
    """How large a study is run; `settings` lie under those of every arm."""

    seeds: int
    settings: Settings = field(default_factory=dict)
    budget: float | None = None  # seconds for all trials together; None: as `settings` say

    def __post_init__(self) -> None:
        if type(self.seeds) is not int or self.seeds < 1:
            raise ValueError(f"a scale needs at least one seed, not {self.seeds!r}")


@dataclass(frozen=True)
class Speed:
    """What an arm costs; from it a time budget is turned into a number of examples."""

    seconds: float  # of training, for one example
    flops: float  # active FLOPs of a forward pass, for one example
    start: float = 0.0  # seconds of a trial that do not grow with the examples: building, testing


class Checkpoint(loop.Checkpoint, Protocol):
    """The state of a trial in flight."""

    def exists(self) -> bool: ...


@dataclass
class Running:
    """What the code of a trial sees of the lab.

    A trial with checkpoints begins with `state = running.checkpoint.load()` and
    `running.curve.rewind(state["step"] if state else -1)`; then it gives the same bits, killed or
    not.
    """

    trial: Trial
    device: torch.device
    curve: loop.Curve
    checkpoint: Checkpoint
    tick: Callable[[float], None]  # how much of the trial is done, 0 to 1
    extra: dict[str, Any] = field(default_factory=dict)  # for the page: see docs/lab.md

    @property
    def arm(self) -> str:
        return self.trial.arm

    @property
    def seed(self) -> int:
        return self.trial.seed

    @property
    def settings(self) -> Settings:
        """Those of scale, arm and search together, with "examples" where there is a budget."""
        return self.trial.settings


@dataclass(frozen=True, kw_only=True)
class Study:
    """A comparison: data and methods in `run`, arms, seeds, budget, metrics and claims."""

    name: str  # "room/name": letters, digits, - and _
    title: str
    question: str
    arms: Mapping[str, Settings]
    metrics: Mapping[str, Metric]  # the first one is the main one
    scales: Mapping[str, Scale]
    run: Callable[[Running], Metrics] | None = None
    run_block: Callable[[Sequence[Running]], Sequence[Metrics]] | None = None  # e.g. by fit_many
    block: int = 1  # seeds that `run_block` gets at once; a block is the unit of resume
    claims: Sequence[Claim] = ()
    varies: Sequence[str] = ()  # what a seed decides
    along: str = "Step"  # what the curves run over
    paper: str = ""  # its claims are corrected together; "" is a study of our own
    deviations: Sequence[str] = ()  # from the paper
    notes: Sequence[str] = ()  # on data and training, "what: text"; the page marks leaks
    speed: Callable[[Settings, torch.device], Speed] | None = None  # needed for a time budget
    search: Any = None  # a `tuning.Search`, or none
    threads: int = 1  # of a trial on a CPU; fixed, so that every executor gives the same bits

    def __post_init__(self) -> None:
        if (self.run is None) == (self.run_block is None):
            raise ValueError(f"study {self.name!r}: give run (a trial) or run_block (several)")
        if not (self.arms and self.metrics and self.scales):
            raise ValueError(
                f"study {self.name!r} needs at least one arm, one metric and one scale"
            )
        for parts, kind, said in (
            (self.arms.values(), Mapping, "the settings of an arm are a dict"),
            (self.metrics.values(), Metric, "a metric is a Metric(...)"),
            (self.scales.values(), Scale, "a scale is a Scale(...)"),
            (self.claims, Claim, "a claim is made by greater(...) or equivalent(...)"),
        ):
            for part in parts:
                if not isinstance(part, kind):
                    raise ValueError(f"study {self.name!r}: {said}, not {part!r}")
        if not NAME.fullmatch(self.name):
            raise ValueError(
                f"a study is named like room/name, by letters, digits, - and _, not {self.name!r}"
            )
        if self.block < 1 or self.threads < 1:
            raise ValueError(f"study {self.name!r}: block and threads must be at least 1")
        for claim in self.claims:
            self._check_claim(claim)

    def _check_claim(self, claim: Claim) -> None:
        for arm in (claim.a, claim.b):
            if arm not in self.arms:
                raise ValueError(
                    f"study {self.name!r}: a claim names the arm {arm!r}; there are "
                    f"{', '.join(self.arms)}"
                )
        metric = self.metrics.get(claim.metric)
        if metric is None:
            raise ValueError(
                f"study {self.name!r}: a claim names the metric {claim.metric!r}; there are "
                f"{', '.join(self.metrics)}"
            )
        if claim.kind == "greater" and not metric.better:
            raise ValueError(
                f"study {self.name!r}: a claim says that {claim.a} is better than {claim.b} in "
                f"{claim.metric!r}, of which neither more nor less is better; say which is"
            )

    @property
    def main(self) -> str:
        """The main metric."""
        return next(iter(self.metrics))

    def scale(self, name: str) -> Scale:
        """The scale of that name."""
        if name not in self.scales:
            raise ValueError(
                f"study {self.name!r} has no scale {name!r}; it has {', '.join(self.scales)}"
            )
        return self.scales[name]
