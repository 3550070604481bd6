"""Tables of a stream: columns, scales, levels and classes are those of mega-batch 1.

rows = Rows(Path("monday.csv"), target="label", classes=None)
rows.read(Path("tuesday.csv"))               # [N, F] numbers and one-hot categories, [N] classes
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional as F

from ..data.columns import CUT, LARGEST, MOST, sort_columns
from ..data.targets import Kind, find_targets, settle_kinds
from ..tables import read_table
from .data import Examples

if TYPE_CHECKING:
    import pandas

WRONG = 0.05  # of the values of a column of numbers may be words, which count as missing


class Rows:
    """The form of a stream of tables."""

    kind = "a table"

    def __init__(self, path: Path, target: str | None, classes: list[str] | None) -> None:
        frame = _frame(path)
        self.columns = list(frame)
        ((self.target, kind),) = find_targets(_one(target), self.columns, path.name).items()
        if classes is None or kind == "number":
            _check_classes(frame[[self.target]], kind, path)
        inputs, labels = self._parts(frame, path)
        # Numbers in the order of numbers, words in that of words.
        words = sorted(labels.unique(), key=lambda word: (len(word), word))
        self.classes = classes or (words if all(map(str.isdecimal, words)) else sorted(words))
        _, found = sort_columns(inputs, [])
        self.unused = {**dict.fromkeys(found.texts, "running text"), **found.ignored}
        if not found.numbers and not found.categories:
            raise ValueError(f"{path.name} has no column of numbers or categories to learn from")
        self.scales = {name: _scale(_numbers(inputs[name], path)) for name in found.numbers}
        # The commonest, then by name; all others count as unseen.
        levels = {name: _words(inputs[name]).value_counts()[:MOST] for name in found.categories}
        self.levels = {name: sorted(counts.index) for name, counts in levels.items()}

    def read(self, path: Path) -> Examples:
        """The examples of a file that has the same columns and no new class."""
        frame = _frame(path)
        self._check_columns(frame, path)
        inputs, labels = self._parts(frame, path)
        ids = {word: number for number, word in enumerate(self.classes)}
        unseen = sorted(set(labels) - ids.keys())
        if unseen:
            raise ValueError(
                f"{path.name} has the class {unseen[0]!r} of {self.target}, which mega-batch 1 "
                "did not have; name all classes (classes=…) beforehand, or remove it"
            )
        y = torch.tensor([ids[word] for word in labels], dtype=torch.long)
        return Examples(self._inputs(inputs, path), y)

    def _check_columns(self, frame: pandas.DataFrame, path: Path) -> None:
        more = [name for name in frame if name not in self.columns]
        less = [name for name in self.columns if name not in frame]
        if more or less:
            what = f"has the new column {more[0]!r}" if more else f"lacks the column {less[0]!r}"
            raise ValueError(f"{path.name} {what}; give it the columns of mega-batch 1")

    def _parts(self, frame: pandas.DataFrame, path: Path) -> tuple[pandas.DataFrame, pandas.Series]:
        """Inputs and classes of the rows that have a class."""
        wanted = {self.target: "classes"}
        labels, _ = settle_kinds(frame[[self.target]], wanted, path.name, [])  # type: ignore[arg-type]
        return frame.loc[labels.index].drop(columns=self.target), labels[self.target]

    def _inputs(self, frame: pandas.DataFrame, path: Path) -> torch.Tensor:
        parts = []
        for name, (mean, std) in self.scales.items():
            scaled = (_numbers(frame[name], path) - mean) / std
            values = np.nan_to_num(np.clip(scaled, -CUT, CUT)).astype(np.float32)
            parts.append(torch.from_numpy(values)[:, None])
        for name, levels in self.levels.items():
            ids = {word: number for number, word in enumerate(levels, start=1)}
            known = torch.tensor([ids.get(word, 0) for word in _words(frame[name])])
            parts.append(F.one_hot(known.long(), len(levels) + 1).float())
        return torch.cat(parts, 1)


def _one(target: str | None) -> list[str] | None:
    return None if target is None else [target]  # a comma may be part of the name of a column


def _check_classes(labels: pandas.DataFrame, kind: Kind | None, path: Path) -> None:
    """Raise where a first file shows that a stream cannot tell classes of this target apart."""
    name = labels.columns[0]
    labels, kinds = settle_kinds(labels, {name: kind}, path.name, [])
    if kinds[name] == "number":
        raise ValueError(
            f"{path.name}: {name!r} is a number, and a stream predicts classes; give another "
            f"target, or {name}:classes where its values are classes"
        )
    if labels[name].nunique() == 1:
        raise ValueError(
            f"{path.name}: all rows have {name} = {labels[name].iloc[0]!r}, and mega-batch 1 sets "
            "the classes; name all classes (classes=…) beforehand"
        )


def _frame(path: Path) -> pandas.DataFrame:
    frame = read_table(path).rename(columns=str)
    if not len(frame):
        raise ValueError(f"{path.name} holds no example; a mega-batch needs some")
    return frame.reset_index(drop=True)


def _numbers(values: pandas.Series, path: Path) -> np.ndarray:
    """A column as float64; what is no finite number is missing, NaN."""
    import pandas

    if pandas.api.types.is_datetime64_any_dtype(values):
        start = pandas.Timestamp(0, tz=values.dt.tz)
        values = (values - start) / pandas.Timedelta(days=1)
    numbers = pandas.to_numeric(values, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    wrong = np.isnan(numbers) & values.notna().to_numpy()
    if wrong.sum() > WRONG * len(values):
        raise ValueError(
            f"{path.name}: {values.name!r} was a number in mega-batch 1, and here is "
            f"{str(values[wrong].iloc[0])!r}; correct that column"
        )
    return np.where(np.abs(numbers) > LARGEST, np.nan, numbers)


def _scale(values: np.ndarray) -> tuple[float, float]:
    """Mean and spread of what is there; a spread that is only rounding would blow noise up."""
    known = values[np.isfinite(values)]
    mean, std = (float(known.mean()), float(known.std())) if len(known) else (0.0, 1.0)
    return mean, std if std > 1e-9 * max(1.0, abs(mean)) else 1.0


def _words(values: pandas.Series) -> pandas.Series:
    """A column of categories as words; a gap stays one."""
    return values.dropna().astype(str).str.strip().reindex(values.index)
