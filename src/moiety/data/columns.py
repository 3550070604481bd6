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
LARGEST = 1e30  # a number; the square of one that is much larger has no place in a float
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
            found.ignored[name] = "an id, or short text to be named as text"
        else:
            found.categories.append(name)
            made[name] = _as_categories(values)
    import pandas

    return pandas.DataFrame(made, index=frame.index), found


def is_text(values: pandas.Series) -> bool:
    """Whether a column holds running text, or short text under a usual name."""
    words = values.dropna()
    if not len(words) or not isinstance(words.iloc[0], str):
        return False
    some = words.iloc[:1000].astype(str)
    long = some.str.split().str.len().mean() > WORDS or str(values.name).lower() in TEXT_NAMES
    return bool(long and some.nunique() > 0.5 * len(some))


def has_structures(values: pandas.Series) -> bool:
    """Whether some value is a list, an object of JSON or the like."""
    kinds = list | dict | set | tuple | np.ndarray | bytes
    return values.dtype == object and any(isinstance(value, kinds) for value in values)


def _useless(values: pandas.Series) -> str | None:
    if values.isna().all():
        return "empty in all rows"
    if has_structures(values):
        return "lists or other structures"
    if values.nunique(dropna=False) == 1:
        return "the same in all rows"
    return None


def _as_numbers(values: pandas.Series, notes: list[str]) -> pandas.Series | None:
    """The column as floats where it is one of numbers; what is not finite counts as missing."""
    import pandas

    kinds = pandas.api.types
    if isinstance(values.dtype, pandas.CategoricalDtype):  # somebody said so
        return None
    if kinds.is_datetime64_any_dtype(values):
        zone_free = values.dt.tz_localize(None) if values.dt.tz is not None else values
        return (zone_free - pandas.Timestamp(0)) / pandas.Timedelta(days=1)
    if not (kinds.is_numeric_dtype(values) or kinds.is_bool_dtype(values)):
        # By the different values, of which a category has few: millions of words are slow to try.
        codes, words = pandas.factorize(values)
        tried = pandas.to_numeric(pandas.Series(words, dtype=object), errors="coerce")
        coerced = np.append(tried.to_numpy(np.float64), np.nan)[codes]
        wrong = (codes >= 0) & np.isnan(coerced)
        if wrong.sum() > 0.05 * (codes >= 0).sum():
            return None
        if wrong.any():
            notes.append(
                f"{values.name}: {wrong.sum()} values that are no numbers, such as "
                f"{str(words[codes[wrong][0]])!r}, count as missing"
            )
        values = pandas.Series(coerced, index=values.index, name=values.name)
    numbers = values.astype("float64")
    wild = numbers.abs() > LARGEST
    if wild.any():
        notes.append(f"{values.name}: {wild.sum()} infinite or huge values count as missing")
    return numbers.mask(wild)


def _as_categories(values: pandas.Series) -> pandas.Series:
    """The column as words, without the blanks around them."""
    import pandas

    codes, words = pandas.factorize(values)
    merged, names = pandas.factorize(np.array([str(word).strip() for word in words], dtype=object))
    categories = pandas.Categorical.from_codes(np.append(merged, -1)[codes], names)
    return pandas.Series(categories, index=values.index)


def _counts_rows(name: str, numbers: pandas.Series) -> bool:
    """Whether a column of numbers only numbers the rows."""
    if numbers.isna().any() or numbers.nunique() < len(numbers) or len(numbers) < 3:
        return False
    whole = bool((numbers % 1 == 0).all())
    steps = bool((numbers.diff().dropna() == 1).all())
    return whole and (steps or bool(ID_NAME.search(name)))


def encode_numbers(
    frame: pandas.DataFrame, rows: Rows
) -> tuple[dict[str, Tensor], list[tuple[float, float]]]:
    """[N, F] of each split, with mean 0 and variance 1 in train; a gap becomes the mean, 0.

    And mean and spread of each column.
    """
    values = frame.to_numpy(np.float64)
    train = values[rows["train"]]
    known = np.isfinite(train).any(0)
    mean, std = np.zeros(train.shape[1]), np.ones(train.shape[1])
    mean[known], std[known] = np.nanmean(train[:, known], 0), np.nanstd(train[:, known], 0)
    # Division by a spread that is only rounding would blow noise up.
    std = np.where(std > 1e-9 * np.maximum(1.0, np.abs(mean)), std, 1.0)
    scaled = np.clip(np.nan_to_num((values - mean) / std), -CUT, CUT).astype(np.float32)
    scales = [*zip(mean.tolist(), std.tolist())]
    return {split: torch.from_numpy(scaled[these]) for split, these in rows.items()}, scales


def encode_categories(
    frame: pandas.DataFrame, rows: Rows, notes: list[str]
) -> tuple[dict[str, Tensor], list[list[str]]]:
    """[N, C] ids of each split, and the words of each column; the first is 1, 0 is unseen."""
    coded = np.zeros((len(frame), frame.shape[1]), dtype=np.int64)
    kept: list[list[str]] = []
    for place, name in enumerate(frame):
        codes, words = frame[name].cat.codes.to_numpy(), frame[name].cat.categories
        train = codes[rows["train"]]
        counts = np.bincount(train[train >= 0], minlength=len(words))
        seen = np.flatnonzero(counts)
        if len(seen) > MOST:
            notes.append(f"{name}: {MOST} of {len(seen)} different values kept, the commonest")
            seen = np.argsort(-counts, kind="stable")[:MOST]
        levels = sorted(seen, key=lambda code: words[code])
        ids = np.zeros(len(words) + 1, dtype=np.int64)  # the last is where code −1, missing, looks
        ids[levels] = np.arange(1, len(levels) + 1)
        coded[:, place] = ids[codes]
        kept.append([words[code] for code in levels])
    return {split: torch.from_numpy(coded[these]) for split, these in rows.items()}, kept
