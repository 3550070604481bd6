"""The columns of a table: which are numbers, which categories, which are of no use; as tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .splits import Rows

if TYPE_CHECKING:
    import pandas

TEXT_NAMES = ("text", "sentence", "tweet", "review", "content", "document", "message", "comment")
ID_NAME = re.compile(r"(^|[_\-. ])(id|uuid|guid|key|index|row)$|^unnamed: 0$", re.IGNORECASE)
WORDS = 4  # a column whose values have more words than this, on average, is text
MOST = 1000  # levels of a category; rarer ones count as unseen
CUT = 10.0  # standard deviations at which numbers are cut


@dataclass
class Columns:
    """What each column of a table is good for."""

    numbers: list[str] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)  # and why


def sort_columns(frame: pandas.DataFrame, notes: list[str]) -> tuple[pandas.DataFrame, Columns]:
    """Decide about each column; numbers are returned as numbers, categories as words."""
    found, made = Columns(), {}
    for name in frame:
        values = frame[name]
        why = _useless(values)
        if why:
            found.ignored[name] = why
            continue
        numbers = _as_numbers(values, notes)
        if numbers is not None:
            if _counts_rows(name, numbers):
                found.ignored[name] = "an id: a different one in each row"
            else:
                found.numbers.append(name)
                made[name] = numbers
        elif is_text(values):
            found.texts.append(name)
            made[name] = values
        elif values.nunique() > 0.9 * len(values):
            found.ignored[name] = "an id: a different one in almost each row"
        else:
            found.categories.append(name)
            made[name] = values.where(values.isna(), values.astype(str).str.strip())
    import pandas

    return pandas.DataFrame(made, index=frame.index), found


def is_text(values: pandas.Series) -> bool:
    """Whether a column holds running text."""
    words = values.dropna()
    if not len(words) or not isinstance(words.iloc[0], str):
        return False
    some = words.iloc[:1000].astype(str)
    return some.str.split().str.len().mean() > WORDS and some.nunique() > 0.5 * len(some)


def _useless(values: pandas.Series) -> str | None:
    if values.isna().all():
        return "empty in all rows"
    if isinstance(values.dropna().iloc[0], list | dict | set | tuple | np.ndarray | bytes):
        return "lists or other structures"
    if values.nunique(dropna=False) == 1:
        return "the same in all rows"
    return None


def _as_numbers(values: pandas.Series, notes: list[str]) -> pandas.Series | None:
    """The column as floats where it is one of numbers; what is not finite counts as missing."""
    import pandas

    kinds = pandas.api.types
    if kinds.is_datetime64_any_dtype(values):
        zone_free = values.dt.tz_localize(None) if values.dt.tz is not None else values
        return (zone_free - pandas.Timestamp(0)) / pandas.Timedelta(days=1)
    if not (kinds.is_numeric_dtype(values) or kinds.is_bool_dtype(values)):
        coerced = pandas.to_numeric(values, errors="coerce")
        wrong = values.notna() & coerced.isna()
        if wrong.sum() > 0.05 * values.notna().sum():
            return None
        notes.append(
            f"{values.name}: {wrong.sum()} values that are no numbers, such as "
            f"{str(values[wrong].iloc[0])!r}, count as missing"
        )
        values = coerced
    numbers = values.astype("float64")
    wild = np.isinf(numbers)
    if wild.any():
        notes.append(f"{values.name}: {wild.sum()} infinite values count as missing")
    return numbers.mask(wild)


def _counts_rows(name: str, numbers: pandas.Series) -> bool:
    """Whether a column of numbers only numbers the rows."""
    if numbers.isna().any() or numbers.nunique() < len(numbers) or len(numbers) < 3:
        return False
    whole = bool((numbers % 1 == 0).all())
    steps = bool((numbers.diff().dropna() == 1).all())
    return whole and (steps or bool(ID_NAME.search(name)))


def encode_numbers(frame: pandas.DataFrame, rows: Rows) -> dict[str, Tensor]:
    """[N, F] of each split, with mean 0 and variance 1 in train; a gap becomes the mean, 0."""
    values = frame.to_numpy(np.float64)
    train = values[rows["train"]]
    known = np.isfinite(train).any(0)
    mean, std = np.zeros(train.shape[1]), np.ones(train.shape[1])
    mean[known], std[known] = np.nanmean(train[:, known], 0), np.nanstd(train[:, known], 0)
    # Division by a spread that is only rounding would blow noise up.
    std = np.where(std > 1e-9 * np.maximum(1.0, np.abs(mean)), std, 1.0)
    scaled = np.clip(np.nan_to_num((values - mean) / std), -CUT, CUT).astype(np.float32)
    return {split: torch.from_numpy(scaled[these]) for split, these in rows.items()}


def encode_categories(
    frame: pandas.DataFrame, rows: Rows, notes: list[str]
) -> tuple[dict[str, Tensor], list[int]]:
    """[N, C] ids of each split, and the number of ids of each column; 0 is unseen or missing."""
    coded = np.zeros((len(frame), frame.shape[1]), dtype=np.int64)
    cardinalities = []
    for place, name in enumerate(frame):
        counts = frame[name].iloc[rows["train"]].value_counts()
        if len(counts) > MOST:
            notes.append(f"{name}: {MOST} of {len(counts)} different values kept, the commonest")
        levels = sorted(counts.index[:MOST])
        ids = {level: id for id, level in enumerate(levels, start=1)}
        coded[:, place] = frame[name].map(ids).fillna(0).to_numpy(np.int64)
        cardinalities.append(len(levels) + 1)
    return {split: torch.from_numpy(coded[these]) for split, these in rows.items()}, cardinalities
