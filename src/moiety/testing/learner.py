"""Checks of a learner: what it answers, what it keeps, and what growth does to it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..anytime.base import Learner, Phase
from ..anytime.data import Examples
from .contract import Check, need, same, tokens

CLASSES = 3
PHASES = 4
ROUND_OFF = 1e-5  # of a probability
# A learner that is not exact moves a probability by more than that in one of its growths.
FELT = 1e-4


@dataclass(frozen=True)
class Subject:
    """A way to make learners, and the phases they are given."""

    make: Callable[[int], Learner]
    data: Examples

    def __str__(self) -> str:
        return f"learner {self.make(0).name!r}"

    def phase(self, number: int, seed: int = 0, **words: Any) -> Phase:
        """A phase with a part of the data: the last fifth of it is validation."""
        rows = torch.arange(len(self.data))[number % PHASES :: PHASES]
        held = max(len(rows) // 5, 1)
        train, validation = self.data.take(rows[:-held]), self.data.take(rows[-held:])
        return Phase(train=train, validation=validation, number=number, seed=seed, **words)

    def trained(self, phases: int, seed: int = 0) -> Learner:
        """A learner after some phases."""
        learner = self.make(0)
        for number in range(1, phases + 1):
            learner.train(self.phase(number, seed))
        return learner


def subjects(make: Callable[[int], Learner], data: Examples | None = None) -> list[Subject]:
    """The one subject of a way to make learners."""
    if data is None:
        x = tokens(480)
        data = Examples(x, (x @ tokens(CLASSES, seed=1).T).argmax(1))
    return [Subject(make, data)]


# -- answers and bits --------------------------------------------------------------------------


def answers_are_probabilities(subject: Subject) -> None:
    """Before and after training, each answer is a distribution, and asking changes nothing."""
    for phases in (0, 2):
        learner = subject.trained(phases)
        before = copy.deepcopy(learner.state())
        p = learner.predict(subject.data.x)
        need(p.shape[:-1] == subject.data.y.shape, f"answers of shape {list(p.shape)}")
        need(torch.isfinite(p).all() and (p >= 0).all(), "a probability is negative or not finite")
        off = float((p.sum(-1) - 1).abs().max())
        need(off < ROUND_OFF, f"the probabilities of an answer sum to 1 only within {off:.1g}")
        need(torch.equal(p, learner.predict(subject.data.x)), "a second answer differs")
        changed = _differs(learner, before)
        need(not changed, f"asking changes {changed}")


def training_is_deterministic(subject: Subject) -> None:
    """Seed and phases decide every bit, and nothing but them; the caller's numbers are left."""
    torch.manual_seed(1)
    random = torch.get_rng_state()
    first = subject.trained(2)
    need(torch.equal(random, torch.get_rng_state()), "training draws the caller's random numbers")
    torch.manual_seed(2)
    found = _differs(first, subject.trained(2))
    need(not found, f"the same phases end in another {found}")
    need(_differs(first, subject.trained(2, seed=1)), "the seed of a phase changes nothing")


def states_round_trip(subject: Subject) -> None:
    """A state is plain values, and a learner that loads it answers and goes on as its owner."""
    learner = subject.trained(PHASES - 1)
    state = copy.deepcopy(learner.state())
    odd = [name for name, leaf in _leaves(state).items() if not _plain(leaf)]
    need(not odd, f"{odd[:1]} is neither a tensor, a text nor a number: it cannot be saved")
    other = subject.make(0)
    other.load(copy.deepcopy(state))
    x = subject.data.x
    need(torch.equal(learner.predict(x), other.predict(x)), "the loaded learner answers otherwise")
    need(learner.parameters() == other.parameters(), "the loaded learner has another size")
    need(learner.bytes() == other.bytes(), "the loaded learner reports other bytes")
    for each in (learner, other):
        each.train(subject.phase(PHASES))
    found = _differs(learner, other)
    need(not found, f"the loaded learner goes on to another {found}")


def killed_phases_resume(subject: Subject) -> None:
    """A phase that is killed and resumed ends in the same bits and the same report."""
    learner = subject.trained(2)
    start = copy.deepcopy(learner.state())
    report = learner.train(subject.phase(3))
    for after in (1, max(report.steps - 1, 2)):
        kept = _Memory()
        killed = subject.make(0)
        killed.load(copy.deepcopy(start))
        with contextlib.suppress(_Killed):
            killed.train(subject.phase(3, checkpoint=kept, tick=_Kill(after)))
        again = subject.make(0)
        again.load(copy.deepcopy(start))
        resumed = again.train(subject.phase(3, checkpoint=kept))
        found = _differs(learner, again)
        need(not found, f"killed after {after} steps it ends with another {found}")
        need(resumed == report, f"killed after {after} steps it reports {resumed}, not {report}")


# -- growth and costs --------------------------------------------------------------------------


def growth_as_declared(subject: Subject) -> None:
    """`exact` is true if and only if no growth moves an answer; the gap that it tells is right."""
    learner, gaps = subject.make(0), []
    for number in range(1, PHASES + 1):
        phase = subject.phase(number)
        size, before = learner.parameters(), learner.predict(phase.validation.x)
        told = learner.grow(phase)
        moved = float((learner.predict(phase.validation.x) - before).abs().max())
        if told is None:
            need(moved == 0, f"grow says that it did nothing, but an answer moved by {moved:.2g}")
        else:
            gaps.append(moved)
            need(abs(told - moved) < ROUND_OFF, f"it tells a gap of {told:.2g}, not {moved:.2g}")
            need(learner.parameters() > size, "it grew and has no parameter more")
        need(learner.grow(phase) is None, "it grows twice for one phase")
        report = learner.train(phase)
        need((report.growth is None) == (told is None), "its report is wrong about growth")
    widest = max(gaps, default=0.0)
    if learner.exact:
        need(widest < ROUND_OFF, f"exact is True, but growth moves an answer by {widest:.2g}")
    else:
        need(widest > FELT, f"exact is False, but no growth moves an answer (by {widest:.2g})")


def costs_are_told(subject: Subject) -> None:
    """Steps, examples, FLOPs, parameters and bytes are there and fit each other."""
    learner = subject.make(0)
    report = learner.train(subject.phase(1))
    need(report.steps >= 1 and report.examples >= report.steps, f"it reports {report}")
    forward, whole = report.flops["forward"], report.flops["train"]
    need(whole > forward > 0, f"{whole:g} FLOPs of training with {forward:g} forward")
    need(report.flops["validation"] > 0, "no FLOPs of validation")
    x = subject.data.x[:8]
    need(learner.inference_flops(x) > 0, "an answer costs no FLOPs")
    held = learner.bytes()
    need(learner.parameters() > 0 and held["model"] > 0, "no parameters, or no bytes of them")
    need(held["optimizer"] >= 0, f"bytes of the optimizer are {held['optimizer']}")


LEARNER = tuple(
    Check(run, subjects)
    for run in (
        answers_are_probabilities,
        training_is_deterministic,
        states_round_trip,
        killed_phases_resume,
        growth_as_declared,
        costs_are_told,
    )
)


def check_learner(make: Callable[[int], Learner], data: Examples | None = None) -> None:
    """Check the learners that `make(seed)` makes, as `check_router` does a router.

    data   examples that they can learn from, some hundreds; by default rows of 16 numbers in 3
           classes. It is cut into 4 phases, so a growth every 1 to 3 phases is seen

    Give them a short training, and one that saves often (`Training(epochs=2, save_every=0)`), or
    every phase is over before a kill finds a checkpoint.
    """
    for check in LEARNER:
        check(make, data)


# -- helpers -----------------------------------------------------------------------------------


class _Killed(Exception):
    """Stands for a kill."""


class _Kill:
    """A tick that ends a phase after some steps."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, share: float) -> None:
        self.left -= 1
        if self.left <= 0:
            raise _Killed


class _Memory:
    """A checkpoint that lives as long as the check."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None

    def save(self, state: Mapping[str, Any]) -> None:
        self.state = copy.deepcopy(dict(state))

    def load(self) -> dict[str, Any] | None:
        return copy.deepcopy(self.state)


def _leaves(value: Any, path: str = "state") -> dict[str, Any]:
    """What a state holds, by where it is."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {path: value}
    parts = [_leaves(part, f"{path}[{key!r}]") for key, part in value.items()]
    return {name: leaf for part in parts for name, leaf in part.items()}


def _differs(a: Learner, b: Learner | Mapping[str, Any]) -> str:
    """Where the states of two learners differ first, or one from what was noted; "": nowhere."""
    left = _leaves(a.state())
    right = _leaves(b.state() if isinstance(b, Learner) else b)
    if left.keys() != right.keys():
        return min(left.keys() ^ right.keys())
    return next((name for name in left if not same(left[name], right[name])), "")


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, Tensor | bool | int | float | str)
