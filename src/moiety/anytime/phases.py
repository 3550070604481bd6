"""What a phase uses: new rows and replayed ones, and the record of it from before it trains.

    memory = Memory(read_replay("0.2"), seed=0)
    train, validation = memory.use(1, [stream[1], stream[2]])
    train, validation = memory.use(2, [stream[3], stream[4]])     # and a share of phase 1

What is replayed follows from the seed and from what the phases before were: it is rebuilt after a
kill by using them again in order. Rows of training and of validation stay apart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import io
from ..train.draws import step_seed
from .data import Batch, Examples
from .policies import Replay, draw_keys


class Memory:
    """What is kept for the next phase."""

    def __init__(self, replay: Replay, seed: int) -> None:
        self.train, self.validation = (_Side(replay, step_seed(seed, side)) for side in (1, 2))

    def use(self, phase: int, new: Sequence[Batch]) -> tuple[Examples, Examples]:
        """All rows of a phase, the new ones first; what the next phase replays is kept."""
        numbers = [batch.number for batch in new]
        return (
            self.train.use(phase, numbers, [batch.train for batch in new]),
            self.validation.use(phase, numbers, [batch.validation for batch in new]),
        )

    def counts(self) -> dict[str, int]:
        """How many training rows of each mega-batch are kept, by its number."""
        numbers, counts = self.train.numbers.unique(return_counts=True)
        return {str(int(n)): int(c) for n, c in zip(numbers, counts)}

    def bytes(self) -> int:
        """What is kept, in memory."""
        sides = (self.train.held, self.validation.held)
        return sum(held.bytes() for held in sides if held is not None)


class _Side:
    """The memory of training, or of validation."""

    def __init__(self, replay: Replay, seed: int) -> None:
        self.replay, self.seed = replay, seed
        self.held: Examples | None = None
        self.keys = torch.empty(0, dtype=torch.float64)
        self.numbers = torch.empty(0, dtype=torch.long)

    def use(self, phase: int, numbers: Sequence[int], new: Sequence[Examples]) -> Examples:
        rows = Examples.join([*new, *([self.held] if self.held is not None else [])])
        fresh = [draw_keys(self.seed, n, len(part)) for n, part in zip(numbers, new)]
        keys = torch.cat([*fresh, self.keys])
        sources = torch.cat([*(_all(n, part) for n, part in zip(numbers, new)), self.numbers])
        kept = self.replay.keep(keys, self.seed, phase)
        self.held, self.keys, self.numbers = rows.take(kept), keys[kept], sources[kept]
        return rows


def _all(number: int, part: Examples) -> Tensor:
    return torch.full((len(part),), number)


def fingerprint(*parts: Examples) -> str:
    """A digest of the very rows, to tell whether a phase that is resumed has the same ones."""
    digest = hashlib.sha256()
    for part in parts:
        for tensor in (part.x, part.y):
            digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Records:
    """The journal of phases: which data each one uses, on disk before it trains."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        for number, text in enumerate(io.read_lines(path), start=1):
            try:
                self.lines.append(json.loads(text))
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {number} is not JSON ({error}); restore it"
                ) from error

    def begin(self, record: dict[str, Any]) -> None:
        """Write the record of a phase; one that was begun before must use the same again."""
        if len(self.lines) < record["phase"]:
            io.append_line(self.path, json.dumps(record, allow_nan=False))
            self.lines.append(record)
        elif self.lines[record["phase"] - 1] != record:
            raise ValueError(
                f"phase {record['phase']} was begun with other data (see {self.path}); give the "
                "same stream again, or use another folder"
            )
