"""Where settings are searched, and the samplers that draw from there.

LogUniform(1e-4, 1e-1).at(0.5)          # 0.003162
for batch in random_batches({"lr": LogUniform(1e-4, 1e-1)}, seed=0, count=20): ...

A sampler is a generator: it yields settings, a batch at a time, and is sent what they came to (a
number that is better when higher, or None where a setting was discarded).
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

BATCH = 8  # settings that optuna proposes before it hears of them

Sampler = Generator[list[dict[str, Any]], list[float | None], None]


class Range(Protocol):
    """The values that a setting may take."""

    def at(self, u: float) -> Any:
        """The value at u of the way through, 0 ≤ u < 1."""
        ...


@dataclass(frozen=True)
class Choice:
    """One of some values."""

    values: Sequence[Any]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("Choice has nothing to choose from: give at least one value")

    def at(self, u: float) -> Any:
        return self.values[int(u * len(self.values))]

    def __str__(self) -> str:
        return "one of " + ", ".join(f"{v:g}" if _number(v) else str(v) for v in self.values)


@dataclass(frozen=True)
class Uniform:
    """A number between two, each as likely as any other."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_ends(self, self.low, self.high)

    def at(self, u: float) -> float:
        return _short(self.low + u * (self.high - self.low), self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class LogUniform:
    """A positive number between two, each order of magnitude as likely as any other."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_ends(self, self.low, self.high)
        if self.low <= 0:
            raise ValueError(f"{self!r}: the logarithm needs numbers above 0; use Uniform")

    def at(self, u: float) -> float:
        return _short(self.low * (self.high / self.low) ** u, self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}, log"


@dataclass(frozen=True)
class Integers:
    """A whole number between two, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_ends(self, self.low, self.high)

    def at(self, u: float) -> int:
        return self.low + int(u * (self.high - self.low + 1))

    def __str__(self) -> str:
        return f"{self.low} to {self.high}, whole"


def _check_ends(values: Range, low: float, high: float) -> None:
    if not (_number(low) and _number(high) and low < high):
        raise ValueError(f"{values!r}: the first number must be smaller than the second")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


def _short(value: float, low: float, high: float) -> float:
    """Four digits: what a page prints is what was run."""
    return min(max(float(f"{value:.4g}"), low), high)


# -- samplers ------------------------------------------------------------------------------------


def random_batches(space: Mapping[str, Range], seed: int, count: int) -> Sampler:
    """All draws in one batch.

    Draw number i of a setting depends on nothing but the seed: it is the same for every arm, and
    however many draws there are.
    """
    yield [
        {
            name: values.at(random.Random(f"{seed}/{name}/{i}").random())
            for name, values in space.items()
        }
        for i in range(count)
    ]


def optuna_batches(space: Mapping[str, Range], seed: int, count: int) -> Sampler:
    """Draws by optuna's tree-structured Parzen estimator; the same answers bring the same draws."""
    try:
        import optuna
    except ImportError:
        raise ImportError(
            'the sampler "optuna" needs optuna: pip install "moiety[lab]", or use "random"'
        ) from None
    loud = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # one study an arm is not news
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), direction="maximize")
    optuna.logging.set_verbosity(loud)
    kinds = {name: _distribution(optuna.distributions, values) for name, values in space.items()}
    for start in range(0, count, BATCH):
        asked = [study.ask(kinds) for _ in range(min(BATCH, count - start))]
        answers = yield [
            {name: _setting(space[name], value) for name, value in one.params.items()}
            for one in asked
        ]
        for one, answer in zip(asked, answers):
            lost = None if answer is not None else optuna.trial.TrialState.FAIL
            study.tell(one, answer, state=lost)


SAMPLERS = {"random": random_batches, "optuna": optuna_batches}


def _distribution(kinds: Any, values: Range) -> Any:
    if isinstance(values, Integers):
        return kinds.IntDistribution(values.low, values.high)
    if isinstance(values, Uniform | LogUniform):
        return kinds.FloatDistribution(values.low, values.high, log=isinstance(values, LogUniform))
    if isinstance(values, Choice):  # by number: optuna takes no lists as values
        return kinds.CategoricalDistribution(range(len(values.values)))
    raise ValueError(f'optuna cannot search {values!r}: use the sampler "random"')


def _setting(values: Range, proposed: Any) -> Any:
    """What optuna proposed, as a setting."""
    if isinstance(values, Choice):
        return values.values[proposed]
    if isinstance(values, Uniform | LogUniform):
        return _short(proposed, values.low, values.high)
    return proposed
