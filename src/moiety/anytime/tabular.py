"""Tables of a stream: columns, scales, levels and classes are those of mega-batch 1.

rows = Rows.of(Path("monday.csv"), target="label", classes=None)
rows.read(Path("tuesday.csv"))               # [N, F] numbers and one-hot categories, [N] classes
rows.inputs(Path("new.csv"))                 # [N, F] of a table with or without the target
Rows(**rows.plain())                         # the same form, from plain values
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

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
CLASSES = "--classes (in Python, classes=…)"


class NewClass(ValueError):
    """A file has a class that its form does not know; `what` says which."""

    def __init__(self, what: str, known: str = "") -> None:
        super().__init__(
            f"{what}, which mega-batch 1 did not have; name all of them beforehand, by {CLASSES}, "
            f"or remove it{known}"
        )
        self.what = what


@dataclass(frozen=True)
class Rows:
    """The form of a stream of tables."""

    kind: ClassVar[str] = "a table"
    columns: list[str]  # all, as they stand in the file
    target: str
    classes: list[str]
    scales: dict[str, tuple[float, float]]  # mean and spread of each column of numbers
    dates: list[str]  # those of them that are dates, as days
    levels: dict[str, list[str]]  # the words of each category
    unused: dict[str, str]  # columns that are no inputs, and why

    @classmethod
    def of(cls, path: Path, target: str | None, classes: list[str] | None) -> Rows:
        """The form that a first file sets."""
        frame = _frame(path)
        name, kind = _target(target, frame, path)
        if classes is None or kind == "number":
            _check_classes(frame[[name]], kind, path)
        inputs, labels = _parts(frame, name, path)
        # Numbers in the order of numbers, words in that of words.
        words = sorted(labels.unique(), key=lambda word: (len(word), word))
        _, found = sort_columns(inputs, [])
        if not found.numbers and not found.categories:
            raise ValueError(f"{path.name} has no column of numbers or categories to learn from")
        # The commonest, then by name; all others count as unseen.
        levels = {each: _words(inputs[each]).value_counts()[:MOST] for each in found.categories}
        return cls(
            columns=list(frame),
            target=name,
            classes=classes or (words if all(map(str.isdecimal, words)) else sorted(words)),
            scales={each: _scale(_numbers(inputs[each], path.name)) for each in found.numbers},
            dates=[each for each in found.numbers if _is_date(inputs[each])],
            levels={each: sorted(counts.index) for each, counts in levels.items()},
            unused={**dict.fromkeys(found.texts, "running text"), **found.ignored},
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the inputs of a row."""
        return (len(self.scales) + sum(len(words) + 1 for words in self.levels.values()),)

    def plain(self) -> dict[str, Any]:
        """Its fields, as JSON holds them."""
        return asdict(self)

    def read(self, path: Path) -> Examples:
        """The examples of a file that has the same columns and no new class."""
        frame = _frame(path)
        self._check_columns(frame, path)
        inputs, labels = _parts(frame, self.target, path)
        ids = {word: number for number, word in enumerate(self.classes)}
        unseen = sorted(set(labels) - ids.keys())
        if unseen:
            raise NewClass(f"{path.name} has the class {unseen[0]!r} of {self.target}")
        y = torch.tensor([ids[word] for word in labels], dtype=torch.long)
        return Examples(self._inputs(inputs, path.name), y, left_out=len(frame) - len(y))

    def inputs(self, rows: Path | pandas.DataFrame) -> torch.Tensor:
        """The inputs of all rows, which may have further columns and need no target."""
        name = rows.name if isinstance(rows, Path) else "the table"
        frame = read_table(rows) if isinstance(rows, Path) else rows
        if not hasattr(frame, "columns"):
            raise ValueError(f"this run learns from tables: give one, not a {type(rows).__name__}")
        frame = frame.rename(columns=str).reset_index(drop=True)
        lost = [column for column in (*self.scales, *self.levels) if column not in frame]
        if lost:
            raise ValueError(
                f"{name} lacks the column {lost[0]!r}, which the model looks at; add it"
            )
        return self._inputs(frame, name)

    def _check_columns(self, frame: pandas.DataFrame, path: Path) -> None:
        more = [name for name in frame if name not in self.columns]
        less = [name for name in self.columns if name not in frame]
        if more or less:
            what = f"has the new column {more[0]!r}" if more else f"lacks the column {less[0]!r}"
            if more and less:  # one was renamed
                what += f" and lacks {less[0]!r}"
            raise ValueError(f"{path.name} {what}; give it the columns of mega-batch 1")

    def _inputs(self, frame: pandas.DataFrame, file: str) -> torch.Tensor:
        parts = []
        for name, (mean, std) in self.scales.items():
            _check_date(frame[name], name in self.dates, file)
            scaled = (_numbers(frame[name], file) - mean) / std
            values = np.nan_to_num(np.clip(scaled, -CUT, CUT)).astype(np.float32)
            parts.append(torch.from_numpy(values)[:, None])
        for name, levels in self.levels.items():
            _check_words(frame[name], levels, file)
            ids = {word: number for number, word in enumerate(levels, start=1)}
            known = torch.tensor([ids.get(word, 0) for word in _words(frame[name])])
            parts.append(F.one_hot(known.long(), len(levels) + 1).float())
        return torch.cat(parts, 1)


def _parts(
    frame: pandas.DataFrame, target: str, path: Path
) -> tuple[pandas.DataFrame, pandas.Series]:
    """Inputs and classes of the rows that have a class."""
    labels, _ = settle_kinds(frame[[target]], {target: "classes"}, path.name, [])
    return frame.loc[labels.index].drop(columns=target), labels[target]


def _target(target: str | None, frame: pandas.DataFrame, path: Path) -> tuple[str, Kind | None]:
    """The column to predict, and its kind where the user said it."""
    one = None if target is None else [target]  # a comma may be part of the name of a column
    try:
        ((name, kind),) = find_targets(one, list(frame), path.name).items()
    except ValueError as error:
        how = ": --target (in Python, target=…)" if target is None else ""
        raise ValueError(f"{error}{how}") from None
    return name, kind


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
            f"the classes; name all of them: {CLASSES}"
        )


def _frame(path: Path) -> pandas.DataFrame:
    frame = read_table(path).rename(columns=str)
    if not len(frame):
        raise ValueError(f"{path.name} holds no example; a mega-batch needs some")
    return frame.reset_index(drop=True)


def _is_date(values: pandas.Series) -> bool:
    import pandas

    return pandas.api.types.is_datetime64_any_dtype(values)


def _check_date(values: pandas.Series, date: bool, file: str) -> None:
    """Raise where a column of dates is one of numbers now, or the other way round."""
    if _is_date(values) != date and values.notna().any():
        was, now = ("dates", "none") if date else ("numbers", "dates")
        raise ValueError(
            f"{file}: {values.name!r} held {was} in mega-batch 1, and here {now}; correct that "
            "column"
        )


def _check_words(values: pandas.Series, levels: list[str], file: str) -> None:
    """Raise where a column of words holds numbers now; a word that is new counts as unseen."""
    import pandas

    if not pandas.api.types.is_numeric_dtype(values) or values.isna().all():
        return
    codes = pandas.to_numeric(pandas.Series(levels), errors="coerce").notna().any()
    if not codes and not _words(values).isin(levels).any():
        raise ValueError(
            f"{file}: {values.name!r} held words in mega-batch 1, such as {levels[0]!r}, and here "
            f"is {str(values.dropna().iloc[0])!r}; correct that column"
        )


def _numbers(values: pandas.Series, file: str) -> np.ndarray:
    """A column as float64; what is no finite number is missing, NaN."""
    import pandas

    if _is_date(values):
        start = pandas.Timestamp(0, tz=values.dt.tz)
        values = (values - start) / pandas.Timedelta(days=1)
    numbers = pandas.to_numeric(values, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    wrong = np.isnan(numbers) & values.notna().to_numpy()
    if wrong.sum() > WRONG * len(values):
        raise ValueError(
            f"{file}: {values.name!r} was a number in mega-batch 1, and here is "
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
