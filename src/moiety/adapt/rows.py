"""Examples by number, as they are before an encoder reads them: token ids or images."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

AT_ONCE = 1000  # rows that are read


class Store(Protocol):
    """All examples of a source, by number."""

    def __len__(self) -> int: ...
    def take(self, numbers: np.ndarray) -> Any: ...


class Rows:
    """Some examples of a store, with their class ids and the names of the classes if labelled."""

    def __init__(
        self,
        store: Store,
        chosen: np.ndarray | None = None,
        labels: Tensor | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.store = store
        self.chosen = np.arange(len(store)) if chosen is None else chosen
        self.labels = labels
        self.classes = classes

    def __len__(self) -> int:
        return len(self.chosen)

    def take(self, rows: Sequence[int] | np.ndarray | Tensor) -> Any:
        """Raw examples, as `Encoder.batch` wants them."""
        return self.store.take(self.chosen[np.asarray(rows, dtype=np.int64)])

    def part(self, rows: Sequence[int] | np.ndarray | Tensor) -> Rows:
        """Only these, in this order; nothing is copied."""
        rows = np.asarray(rows, dtype=np.int64)
        labels = None if self.labels is None else self.labels[torch.from_numpy(rows)]
        return Rows(self.store, self.chosen[rows], labels, self.classes)


def are_rows(data: Any) -> bool:
    """Whether data are rows already; tensors and tables have a `take` of their own."""
    other = any(hasattr(data, word) for word in ("tolist", "columns", "column_names"))
    return hasattr(data, "take") and not other


@dataclass(frozen=True)
class Tokens:
    """Texts as token ids, one after the other; text i ends before `ends[i]`."""

    ids: np.ndarray
    ends: np.ndarray
    vocabulary: str | None = None  # that of the tokenizer, where it is known: a hash

    def __len__(self) -> int:
        return len(self.ends)

    def take(self, numbers: np.ndarray) -> list[np.ndarray]:
        starts = np.where(numbers > 0, self.ends[numbers - 1], 0)
        return [self.ids[start:end] for start, end in zip(starts, self.ends[numbers])]

    @staticmethod
    def of(rows: Iterable[Sequence[int]], vocabulary: str | None = None) -> Tokens:
        """From the ids of every text."""
        parts = [np.asarray(row, dtype=np.int32) for row in rows]
        ends = np.cumsum([len(part) for part in parts])
        return Tokens(np.concatenate(parts), ends, vocabulary)


@dataclass(frozen=True)
class Images:
    """Images [N, C, H, W]: uint8, or floats that are normalised already."""

    images: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def take(self, numbers: np.ndarray) -> Tensor:
        return self.images[torch.from_numpy(numbers)]


def repeated(rows: Rows, others: Rows) -> np.ndarray:
    """Which rows are also among others, as a model reads them."""
    known = set(_keys(others))
    return np.array([key in known for key in _keys(rows)])


def _keys(rows: Rows) -> Iterator[bytes]:
    for some in np.array_split(np.arange(len(rows)), max(len(rows) // AT_ONCE, 1)):
        for one in rows.take(some):
            yield hashlib.sha256(np.ascontiguousarray(one).tobytes()).digest()


def hold_out(rows: Rows, share: float, least: int, seed: int) -> tuple[Rows, Rows]:
    """The rows without a fixed part of them, and that part; both in their order.

    Of labelled rows every class gives its share, and none that has two rows gives all of them.
    """
    if not 0 < share < 1:
        raise ValueError(f"held must be a share between 0 and 1, got {share}")
    if len(rows) < 2:
        raise ValueError(
            f"the data hold {len(rows)} example{'' if len(rows) == 1 else 's'}; at least two are "
            "needed, one to train on and one to hold out"
        )
    count = min(max(least, math.ceil(share * len(rows))), len(rows) // 2)
    order = np.random.default_rng(seed).permutation(len(rows))
    out = order[:count] if rows.labels is None else _spread(order, rows.labels.numpy(), count)
    return rows.part(np.setdiff1d(order, out)), rows.part(np.sort(out))


def _spread(order: np.ndarray, labels: np.ndarray, count: int) -> np.ndarray:
    """At most `count` rows, evenly along the classes; the only row of a class is not taken."""
    several = order[np.bincount(labels)[labels[order]] > 1]
    if len(several) < 2:  # every class has one row
        return order[:count]
    line = several[np.argsort(labels[several], kind="stable")]
    count = min(count, len(line) // 2)  # so that no two neighbours are taken
    return line[((np.arange(count) + 0.5) * len(line) / count).astype(int)]
