"""When to train, and on what: waiting and replay, the two choices of a learner on a stream.

    wait = read_wait("5")            # or "size:10000", "budget:1e12", "plateau:0.001"
    replay = read_replay("0.2")      # or "none", "reservoir:5000"

Time is logical: a policy sees the numbers of the journal, sizes, counted FLOPs and validation
results, never the clock, so that a run over the same journal always takes the same decisions.
Paper: Caccia et al., "On Anytime Learning at Macroscale", 2022 (waiting time and replay).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..train.draws import step_seed

# -- waiting ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """All that a policy of waiting may look at when mega-batch `t` has arrived."""

    t: int  # number of the newest mega-batch
    waiting: tuple[int, ...]  # rows of each mega-batch that was not trained on, the newest last
    flops: tuple[float, ...] = ()  # counted for the training of each phase so far
    validation: tuple[float, ...] = ()  # score of each phase so far, larger is better


class Wait(Protocol):
    """Decides whether to train now, on all that waits."""

    def ready(self, view: View) -> bool: ...


@dataclass(frozen=True)
class Fixed:
    """Train when `w` mega-batches wait: the paper's waiting time."""

    w: int

    def __post_init__(self) -> None:
        if self.w < 1:
            raise ValueError(f"a waiting time is at least 1 mega-batch, got {self.w}")

    def ready(self, view: View) -> bool:
        return len(view.waiting) >= self.w

    def __str__(self) -> str:
        return str(self.w)


@dataclass(frozen=True)
class BySize:
    """Train when so many rows wait, in however many mega-batches they came."""

    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"waiting by size takes at least 1 row, got {self.rows}")

    def ready(self, view: View) -> bool:
        return sum(view.waiting) >= self.rows

    def __str__(self) -> str:
        return f"size:{self.rows}"


@dataclass(frozen=True)
class ByBudget:
    """Every arrival earns `flops`; train when a phase as dear as the last one is paid for.

    It may overdraw: the first phase trains at once, because nothing is known of its price, and a
    later one, on all that waits, may be dearer than the last. What is spent never exceeds what was
    earned by more than the newest phase, and all of that is earned back before the next one begins.
    A phase grows with the rows that wait, so this is no limit of the total: where a row costs c
    times what it earns, c times as much is spent as was earned after each phase. (A price by rows
    would never be paid there, and nothing would train again.)
    """

    flops: float

    def __post_init__(self) -> None:
        if not 0 < self.flops < math.inf:
            raise ValueError(f"waiting by budget takes a positive number, got {self.flops}")

    def ready(self, view: View) -> bool:
        price = view.flops[-1] if view.flops else 0.0
        return not view.flops or sum(view.flops) + price <= self.flops * view.t

    def __str__(self) -> str:
        return f"budget:{self.flops:g}"


@dataclass(frozen=True)
class ByPlateau:
    """Wait twice as long after each phase in a row that gained less than `gain` on validation.

    A phase gains by what it adds to the best score before it. One that gains enough sets the wait
    back to 1 mega-batch; it never exceeds `most`.
    """

    gain: float
    most: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.gain < math.inf or self.most < 1:
            raise ValueError(
                "waiting by plateau takes a gain from 0 up and at least 1 mega-batch, "
                f"got {self.gain} and {self.most}"
            )

    def ready(self, view: View) -> bool:
        best, flat = -math.inf, 0
        for score in view.validation:
            flat = 0 if score - best >= self.gain else flat + 1
            best = max(best, score)
        return len(view.waiting) >= min(2 ** min(flat, 30), self.most)

    def __str__(self) -> str:
        return f"plateau:{self.gain:g}:{self.most}"


def _whole(word: str) -> int:
    """A whole number, also one that is written as 1e4."""
    number = float(word)
    if not number.is_integer():
        raise ValueError(f"{word} is no whole number")
    return int(number)


WAITS: dict[str, tuple[Callable[..., Wait], list[Callable[[str], float]]]] = {
    "fixed": (Fixed, [_whole]),
    "size": (BySize, [_whole]),
    "budget": (ByBudget, [float]),
    "plateau": (ByPlateau, [float, _whole]),
}


def read_wait(words: str | int | Wait) -> Wait:
    """Read a policy of waiting from words; one that is a policy already is returned as it is."""
    if not isinstance(words, str | int):
        return words
    kind, *values = (str(words) if ":" in str(words) else f"fixed:{words}").split(":")
    make, readers = WAITS.get(kind, (None, []))
    try:
        numbers = [read(value) for read, value in zip(readers, values)]
    except (ValueError, OverflowError):
        make = None
    if make is None or not 1 <= len(values) <= len(readers):
        raise ValueError(
            f"wait {words!r} is not known: give a number of mega-batches, size:ROWS, "
            "budget:FLOPS, plateau:GAIN or plateau:GAIN:MOST"
        )
    return make(*numbers)


# -- replay ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoReplay:
    """Train on what is new only."""

    def keep(self, keys: Tensor, seed: int, phase: int) -> Tensor:
        """The positions of the rows (their keys: `[M]`) of a phase that the next one uses again."""
        return torch.empty(0, dtype=torch.long)

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True)
class Fraction:
    """A share r of all that a phase used, new and replayed, is drawn for the next phase.

    Old data fade: of the rows that came k phases ago a share r^k is left. 1 keeps everything.
    """

    r: float

    def __post_init__(self) -> None:
        if not 0 < self.r <= 1:
            raise ValueError(f"a share to replay is above 0 and at most 1, got {self.r:g}")

    def keep(self, keys: Tensor, seed: int, phase: int) -> Tensor:
        generator = torch.Generator().manual_seed(step_seed(seed, phase))
        chosen = torch.randperm(len(keys), generator=generator)[: round(self.r * len(keys))]
        return chosen.sort().values

    def __str__(self) -> str:
        return f"{self.r:g}"


@dataclass(frozen=True)
class Reservoir:
    """A uniform sample of `rows` of all that was seen before a phase.

    Every row has a random key of its own, and those with the smallest keys are the sample: it does
    not depend on how the rows came in phases.
    """

    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"a reservoir holds at least 1 row, got {self.rows}")

    def keep(self, keys: Tensor, seed: int, phase: int) -> Tensor:
        return keys.argsort(stable=True)[: self.rows].sort().values

    def __str__(self) -> str:
        return f"reservoir:{self.rows}"


Replay = NoReplay | Fraction | Reservoir


def read_replay(words: str | float | Replay) -> Replay:
    """Read what is replayed from words; a policy is returned as it is."""
    if isinstance(words, NoReplay | Fraction | Reservoir):
        return words
    kind, _, value = str(words).partition(":")
    if kind == "none":
        return NoReplay()
    try:
        number = _whole(value) if kind == "reservoir" else float(kind)
    except (ValueError, OverflowError):
        raise ValueError(
            f"replay {words!r} is not known: give none, a share such as 0.2, or reservoir:ROWS"
        ) from None
    if kind == "reservoir":
        return Reservoir(int(number))
    return Fraction(number) if number else NoReplay()


def draw_keys(seed: int, number: int, rows: int) -> Tensor:
    """The random keys of a mega-batch's rows `[rows]`: the same whenever they are asked for."""
    generator = torch.Generator().manual_seed(step_seed(seed, number))
    return torch.rand(rows, generator=generator, dtype=torch.float64)
