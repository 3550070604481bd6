"""What is to be predicted: columns, as class ids or as standardised numbers."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from .columns import LARGEST, has_structures
from .problem import MISSING, Target
from .splits import Rows

if TYPE_CHECKING:
    import pandas

Kind = Literal["classes", "number"]
Kinds = dict[str, Kind]  # by the name of the target
USUAL = ("label", "labels", "target", "class", "y")
FEW = 20  # an integer column with more different values is a number, with fewer it is classes
WHOLE = 10  # rows that a part of the targets should hold on average, to be dealt out


def near(word: str, words: Sequence[str]) -> str:
    """A hint at what was perhaps meant: "; did you mean income?", or nothing."""
    lower = {str(other).lower(): str(other) for other in words}
    found = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.65)
    return f"; did you mean {lower[found[0]]}?" if found else ""


def find_targets(
    wanted: str | Sequence[str] | None, columns: Sequence[str], name: str
) -> dict[str, Kind | None]:
    """The columns to predict, with their kind where the user said it ("age:number")."""
    if isinstance(wanted, str):
        wanted = wanted.split(",")
    if not wanted:
        usual = [column for column in columns if column.lower() in USUAL]
        if len(usual) != 1:
            raise ValueError(f"{name}: say which column to predict, of {', '.join(columns)}")
        wanted = usual
    found: dict[str, Kind | None] = {}
    for word in map(str.strip, wanted):
        column, _, kind = word.rpartition(":")
        if word in columns:
            found[word] = None
        elif column in columns and kind in ("classes", "number"):
            found[column] = kind  # type: ignore[assignment]
        else:
            hint = near(word, columns)
            raise ValueError(
                f"{name} has no column {word!r} to predict; it has {', '.join(columns)}{hint}"
            )
    return found


def settle_kinds(
    labels: pandas.DataFrame,
    wanted: dict[str, Kind | None],
    name: str,
    notes: list[str],
    missing: Literal["drop", "mask"] = "drop",
) -> tuple[pandas.DataFrame, dict[str, Kind]]:
    """Rows that have their targets, numbers as numbers and classes as words; and the kinds.

    missing: "drop" leaves out rows that lack some target, "mask" those that lack all of them.
    """
    masked, most = missing == "mask", 0.5
    gone = labels.isna().all(axis=1) if masked else labels.isna().any(axis=1)
    for column in labels:
        if has_structures(labels[column]):
            raise ValueError(
                f"{name}: {column!r} holds lists; a target needs one value in each row"
            )
        share = labels[column].isna().mean()
        if share == 1 or (share > most and not masked):
            raise ValueError(
                f"{name}: {labels[column].isna().sum()} of {len(labels)} rows have no {column!r}; "
                "fill that column, or predict another"
            )
    if gone.any():
        some = "any" if masked and labels.shape[1] > 1 else "a"
        notes.append(f"targets: {gone.sum()} rows without {some} target were left out")
        labels = labels[~gone]
    gaps = {column: int(labels[column].isna().sum()) for column in labels}
    if any(gaps.values()):
        shown = ", ".join(f"{column} in {count}" for column, count in gaps.items() if count)
        notes.append(f"missing targets: {shown} of {len(labels)} rows; masked, the rows are kept")
    kinds = {column: wanted[column] or _kind(labels[column].dropna(), name) for column in labels}
    for column, kind in kinds.items():
        values = labels[column]
        labels = labels.assign(
            **{column: _numbers(values, name) if kind == "number" else _words(values)}
        )
    return labels, kinds


def _kind(values: pandas.Series, name: str) -> Kind:
    import pandas

    if pandas.api.types.is_bool_dtype(values):
        return "classes"
    numbers = pandas.to_numeric(values, errors="coerce")
    share = numbers.notna().mean()
    if share == 1:
        whole = bool(np.equal(np.mod(numbers, 1), 0).all())
        return "classes" if whole and numbers.nunique() <= FEW else "number"
    if share > 0.9 and values.nunique() > FEW:
        raise ValueError(
            f"{name}: {values.name!r} is a number but for {int(numbers.isna().sum())} rows such as "
            f"{str(values[numbers.isna()].iloc[0])!r}; correct or remove those rows"
        )
    return "classes"


def _numbers(values: pandas.Series, name: str) -> pandas.Series:
    import pandas

    numbers = pandas.to_numeric(values, errors="coerce").astype("float64")
    bad = ~(numbers.abs() <= LARGEST) & values.notna()
    if bad.any():
        raise ValueError(
            f"{name}: {values.name!r} is not a finite number in {int(bad.sum())} rows, such as "
            f"{str(values[bad].iloc[0])!r}; correct or remove those rows"
        )
    if numbers.nunique() == 1:
        raise ValueError(f"{name}: {values.name!r} is the same in all rows: nothing to predict")
    return numbers


def _words(values: pandas.Series) -> np.ndarray:
    """Classes as text: 1.0, as a column with a gap reads, is "1"; a gap is no text."""
    import pandas

    def word(value: Any) -> str:
        whole = isinstance(value, float) and value.is_integer()
        return str(int(value)) if whole else str(value).strip()

    codes, different = pandas.factorize(values)
    # The last one is where code −1, missing, looks.
    return np.array([*(word(value) for value in different), None], dtype=object)[codes]


def strata(labels: pandas.DataFrame, kinds: Kinds) -> np.ndarray:
    """A number for each row, the same for equal classes and for numbers of the same size.

    With several targets the parts soon hold a row or two, which no split can deal out. A target
    that would make them so small, numbers before classes, counts by its rare classes alone.
    """
    import pandas

    codes = np.zeros(len(labels), dtype=np.int64)
    for column, kind in sorted(kinds.items(), key=lambda each: each[1] == "number"):
        values = labels[column]
        if kind == "number":
            parts = int(np.clip(len(values) // 10, 1, 10))
            values = pandas.qcut(values, parts, labels=False, duplicates="drop")
        these = pandas.factorize(values)[0] + 1  # a missing one is 0
        finer = _finer(codes, these)
        if codes.any() and len(labels) < WHOLE * (finer.max() + 1):
            rare = (np.bincount(these)[these] < WHOLE) & (kind == "classes")
            finer = _finer(codes, np.where(rare, these, 0))
        codes = finer
    return codes


def _finer(codes: np.ndarray, these: np.ndarray) -> np.ndarray:
    """A number for each pair."""
    import pandas

    return pandas.factorize(codes * (these.max() + 1) + these)[0]


def check_classes(labels: pandas.DataFrame, kinds: Kinds, name: str, *, ours: bool) -> None:
    """Raise where there is nothing to learn, or (in a split of `ours`) too little of a class."""
    for column in (column for column, kind in kinds.items() if kind == "classes"):
        counts = labels[column].value_counts()
        if len(counts) == 1:
            raise ValueError(
                f"{name}: all rows have {column} = {counts.index[0]!r}; at least two classes "
                "are needed"
            )
        if len(counts) > max(FEW, len(labels) / 2):
            raise ValueError(
                f"{name}: {column!r} has {len(counts)} different values in {len(labels)} rows; "
                f"predict a column with classes, or a number as {column}:number"
            )
        if ours and counts.iloc[-1] == 1:
            raise ValueError(
                f"{name}: the class {counts.index[-1]!r} of {column} has a single example, too "
                "few to train and test on; add examples of it, or remove or rename it"
            )


def encode(
    labels: pandas.DataFrame,
    kinds: Kinds,
    rows: Rows,
    name: str,
    notes: list[str],
    order: Sequence[str] = (),
) -> tuple[list[Target], dict[str, dict[str, Tensor]]]:
    """The targets, and their values in each split; classes and scale are those of train.

    `order` is that of the classes, where the data have one; else it is that of their names.
    """
    targets: list[Target] = []
    values: dict[str, dict[str, Tensor]] = {split: {} for split in rows}
    for column, kind in kinds.items():
        all_values = labels[column].to_numpy()
        if kind == "number":
            train = all_values[rows["train"]].astype(np.float64)
            train = train[~np.isnan(train)]
            if not len(train):
                raise ValueError(f"{name}: no row of train has {column!r}; add rows that do")
            target = Target(column, kind, [], float(train.mean()), float(train.std()) or 1.0)
            coded = ((all_values.astype(np.float64) - target.mean) / target.std).astype(np.float32)
            notes.append(
                f"{column}: a number, standardised (mean {target.mean:.4g}, std {target.std:.4g})"
            )
        else:
            target = Target(column, kind, list(order) or _sorted(_there(all_values[rows["train"]])))
            coded = _class_ids(all_values, target, rows, name)
            notes.append(f"{column}: {_counts(coded[rows['train']], target.classes)}")
        targets.append(target)
        for split, these in rows.items():
            values[split][column] = torch.from_numpy(coded[these])
    return targets, values


def _class_ids(words: np.ndarray, target: Target, rows: Rows, name: str) -> np.ndarray:
    ids = {word: id for id, word in enumerate(target.classes)}
    for split, these in rows.items():
        unseen = _sorted(_there(words[these]) - ids.keys())
        if unseen:
            raise ValueError(
                f"{name}: {split} has the class {unseen[0]!r} of {target.name}, which train lacks; "
                "add training examples of it, or remove it"
            )
    return np.array([ids.get(word, MISSING) for word in words], dtype=np.int64)


def _there(words: np.ndarray) -> set[str]:
    """The different classes, without the gaps."""
    return {word for word in words if isinstance(word, str)}


def _sorted(words: set[str]) -> list[str]:
    """In order; words that are all numbers in that of their values."""
    ordered = sorted(words)  # first: "1" and "1.0" are equal as numbers, and a set has no order
    try:
        return sorted(ordered, key=float)
    except ValueError:
        return ordered


def _counts(ids: np.ndarray, classes: list[str]) -> str:
    counts = np.bincount(ids[ids >= 0], minlength=len(classes))
    shown = [f"{word} {count}" for word, count in zip(classes, counts)]
    if len(shown) > 12:
        shown = [*shown[:10], f"… ({counts.min()} to {counts.max()} each)"]
    return f"{len(classes)} classes; in train: {', '.join(shown)}"
