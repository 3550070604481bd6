"""A problem to learn: inputs and targets in three splits, and what was found out about them.

    problem = load_problem("people.csv", targets=["income"])
    problem.kind                                 # "table"
    problem.train.inputs["numbers"]              # [N, F], normalised with mean and std of train
    problem.train.targets["income"]              # [N] class ids; a number is standardised
    problem.targets[0].classes                   # ["<=50K", ">50K"]
    print(*problem.notes, *problem.leaks, sep="\\n")

| kind | `Split` | description |
|---|---|---|
| image | `inputs["images"]` uint8 [N, C, H, W] | `shape`; `mean`, `std` of train, in 0…1, a channel each |
| table | `inputs["numbers"]` [N, F] float32, `inputs["categories"]` [N, C] int64 | `numbers`, `categories`, `cardinalities` |
| text | `texts` | `text`, the name of the column |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Kind = Literal["image", "table", "text"]
MISSING = -100  # a class id where a label is missing, as in `multitask`; a missing number is NaN


@dataclass(frozen=True)
class Target:
    """What is to be predicted: one of several classes, or a number."""

    name: str
    kind: Literal["classes", "number"]
    classes: list[str] = field(default_factory=list)  # by class id
    mean: float = 0.0  # of train; the values of a number are (value − mean) / std
    std: float = 1.0


@dataclass
class Split:
    """Examples: tensors by name, or texts; and the targets, by name."""

    inputs: dict[str, Tensor]
    # [N] int64 class ids, or [N] float32 standardised numbers; masked gaps are MISSING and NaN
    targets: dict[str, Tensor]
    texts: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(next(iter(self.targets.values())))

    def __repr__(self) -> str:  # of the sizes alone: the tensors would fill the screen
        shapes = {name: list(t.shape) for name, t in (self.inputs | self.targets).items()}
        return f"Split({len(self)} examples: {shapes})"

    def take(self, rows: Sequence[int] | Tensor) -> Split:
        """Only these examples, in this order."""
        rows = [int(row) for row in rows]
        return Split(
            {name: values[rows] for name, values in self.inputs.items()},
            {name: values[rows] for name, values in self.targets.items()},
            [self.texts[row] for row in rows] if self.texts else [],
        )


@dataclass(frozen=True)
class Leak:
    """A column that gives a target away."""

    column: str  # or, in brackets, what else it is
    target: str
    score: float  # of the column alone: 1 is perfect, 0 no better than without it
    reason: str
    dropped: bool = False  # whether it was kept out of the inputs

    def __str__(self) -> str:
        if self.column.startswith("("):  # no column, but something about the examples
            return f"{self.target} is given away: {self.reason}"
        done = "left out of the inputs" if self.dropped else "still among the inputs"
        return f"{self.column} gives {self.target} away: {self.reason}; {done}"


@dataclass
class Problem:
    """Everything that a model needs to be built for some data, trained and tested on it."""

    name: str
    kind: Kind
    targets: list[Target]
    train: Split
    validation: Split
    test: Split
    notes: list[str] = field(default_factory=list)  # what was worked out, a short line each
    leaks: list[Leak] = field(default_factory=list)
    # image
    shape: tuple[int, int, int] | None = None  # C, H, W
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    # table
    numbers: list[str] = field(default_factory=list)  # names of the columns of inputs["numbers"]
    scales: list[tuple[float, float]] = field(default_factory=list)  # mean and std of each number
    dates: list[str] = field(default_factory=list)  # those numbers that are days since 1970
    categories: list[str] = field(default_factory=list)
    levels: list[list[str]] = field(default_factory=list)  # the words of each category, from 1
    cardinalities: list[int] = field(default_factory=list)  # of each category, with 0 = unseen
    # text
    text: str | None = None

    @property
    def splits(self) -> dict[str, Split]:
        """The splits by name."""
        return {"train": self.train, "validation": self.validation, "test": self.test}
