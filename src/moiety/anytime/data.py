"""What arrives: examples, and the mega-batches that they come in.

    batch = stream[3]                            # the third mega-batch
    batch.train.x, batch.train.y                 # [N, …] and [N]
    joined = Examples.join([batch.train, memory])

| data | `x` | `y` |
|---|---|---|
| images, tables | [N, …] float32 | [N] int64 class ids |
| text | [N, L] int64 tokens | [N, L] int64, the token after each |

So one loss serves both: the cross entropy of `model(x).flatten(0, -2)` and `y.flatten()`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data import Problem, Split
from ..train.draws import step_seed


@dataclass(frozen=True)
class Examples:
    """Inputs and targets, one row each."""

    x: Tensor
    y: Tensor
    left_out: int = 0  # rows of their file that have no target

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(
                f"there are {len(self.x)} inputs and {len(self.y)} targets; give one target each"
            )

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:  # of the sizes alone: the tensors would fill the screen
        return f"Examples(x={list(self.x.shape)}, y={list(self.y.shape)})"

    def take(self, rows: Sequence[int] | Tensor) -> Examples:
        """Only these rows, in this order."""
        rows = torch.as_tensor(rows, dtype=torch.long, device=self.y.device)
        return Examples(self.x[rows], self.y[rows])

    def to(self, device: torch.device | str) -> Examples:
        """The same examples on another device."""
        return Examples(self.x.to(device), self.y.to(device))

    def bytes(self) -> int:
        """What they take in memory."""
        return self.x.nbytes + self.y.nbytes

    @staticmethod
    def join(parts: Sequence[Examples]) -> Examples:
        """All rows of several, in order."""
        shapes = sorted({str(list(part.x.shape[1:])) for part in parts})
        if len(shapes) != 1:
            raise ValueError(f"examples of one shape can be joined, got {', '.join(shapes) or 0}")
        return Examples(
            torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
        )


@dataclass(frozen=True)
class Batch:
    """A mega-batch: what arrives at time `number`, with its own validation rows."""

    number: int  # from 1
    name: str
    train: Examples
    validation: Examples

    @property
    def rows(self) -> int:
        """How many examples arrived."""
        return len(self.train) + len(self.validation)


def shuffled(rows: int, seed: int, number: int) -> Tensor:
    """Row numbers in the order that a seed gives to a mega-batch (0: to the whole data set)."""
    generator = torch.Generator().manual_seed(step_seed(seed, number))
    return torch.randperm(rows, generator=generator)


def split_rows(rows: int, validation: float, seed: int, number: int) -> tuple[Tensor, Tensor]:
    """Row numbers of a mega-batch for training and for validation.

    Both get at least one row wherever `validation` is not 0.
    """
    if not 0 <= validation < 1:
        raise ValueError(f"validation must be a share from 0 up to below 1, got {validation}")
    held = max(1, round(rows * validation)) if validation else 0
    if rows - held < 1:
        raise ValueError(f"a mega-batch needs {held + 1} examples or more, got {rows}; add some")
    order = shuffled(rows, seed, number)
    return order[held:].sort().values, order[:held].sort().values


def token_blocks(tokens: Sequence[int] | Tensor, length: int) -> Examples:
    """Blocks of `length` tokens and, as targets, the token after each; the rest is left out."""
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    tokens = torch.as_tensor(tokens, dtype=torch.long)
    count = (len(tokens) - 1) // length
    if count < 1:
        raise ValueError(f"{len(tokens)} tokens are too few for a block of {length} and one more")
    used = count * length
    return Examples(tokens[:used].view(count, length), tokens[1 : used + 1].view(count, length))


def problem_examples(problem: Problem, split: Split) -> Examples:
    """The examples of a split, ready for a model: images and numbers standardised.

    Categories become one-hot columns behind the numbers. Mean and spread are the problem's own,
    as the paper takes those of the whole data set.
    """
    if len(problem.targets) != 1 or problem.targets[0].kind != "classes":
        names = ", ".join(f"{target.name} ({target.kind})" for target in problem.targets)
        raise ValueError(f"{problem.name}: a stream predicts one target of classes, not {names}")
    y = split.targets[problem.targets[0].name]
    if problem.kind == "image":
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (problem.mean, problem.std))
        return Examples((split.inputs["images"].float() / 255 - mean) / std, y)
    if problem.kind == "table":
        ids = split.inputs["categories"]
        words = [F.one_hot(ids[:, i], n) for i, n in enumerate(problem.cardinalities)]
        return Examples(torch.cat([split.inputs["numbers"], *words], 1).float(), y)
    raise ValueError(f"{problem.name} holds text; make tokens of it, then cut token_blocks(…)")


def row_keys(examples: Examples) -> set[bytes]:
    """A key of every different input, to find those that two sets share.

    row_keys(test) & row_keys(batch.train)
    """
    return set(key_rows(examples))


def key_rows(examples: Examples) -> list[bytes]:
    """A key of every row, the same for equal inputs."""
    rows = examples.x.detach().cpu().unsqueeze(-1).flatten(1).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]
