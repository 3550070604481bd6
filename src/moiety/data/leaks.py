"""Columns that give a target away.

    find_leaks(frame, labels, {"never_married": "classes"})
    # [Leak("marital-status", "never_married", 1.0, …, dropped=True), Leak("relationship", …)]

Each column is scored alone, on rows that it was not fitted to, from 0 (no better than the commonest
class, or the mean) to 1 (perfect). A column that is near-perfect, or the target under other names,
is an *exact* leak. A column is *suspicious* when it comes close, or when it is a category that
settles the class on many rows though not on all: what was made from the same source often does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .problem import Leak
from .targets import Kinds

if TYPE_CHECKING:
    import pandas

EXACT = {"classes": 0.99, "number": 0.999}
SUSPICIOUS = {"classes": 0.9, "number": 0.95}
SETTLED = 0.25  # of the rows, and of what there is to know of the class, settled by single values
CHANCE = 1e-6  # of a value that settles nothing doing so on as many rows as it has
LEAST = 30  # rows; with fewer, chance looks like a leak
FOLDS, BINS, LEVELS, ROWS = 5, 200, 2000, 200_000


def find_leaks(
    frame: pandas.DataFrame,
    labels: pandas.DataFrame,
    kinds: Kinds,
) -> list[Leak]:
    """Every column of `frame` that gives a target of `labels` away; `dropped` marks exact ones."""
    if len(frame) < LEAST:
        return []
    if len(frame) > ROWS:
        draw = np.random.default_rng(0).choice(len(frame), ROWS, replace=False)
        frame, labels = frame.iloc[draw], labels.iloc[draw]
    coded = {column: _levels(frame[column]) for column in frame}
    found = []
    for target, kind in kinds.items():
        there = labels[target].notna().to_numpy()  # a label may be missing
        if there.sum() < LEAST:
            continue
        for column in frame:
            find = _of_number if kind == "number" else _of_classes
            values, known = frame[column][there], labels[target][there]
            leak = find(column, target, coded[column][there], values, known)
            if leak is not None:
                found.append(leak)
    return found


def _of_classes(
    column: str, target: str, levels: np.ndarray, values: pandas.Series, words: pandas.Series
) -> Leak | None:
    import pandas

    ids = pandas.factorize(words)[0]
    score, (share, told) = class_score(levels, ids), (0.0, 0.0)
    if values.dtype.kind in "iuf":  # whose ends settle the class whenever it is a good predictor
        score = max(score, threshold_score(values.to_numpy(np.float64), ids))
    else:
        share, told = settled(levels, ids)
    if score >= SUSPICIOUS["classes"]:
        commonest = np.bincount(ids).max() / len(ids)
        right = commonest + score * (1 - commonest)
        reason = f"alone it gets {right:.1%} right, the commonest class would be {commonest:.1%}"
    elif min(share, told) >= SETTLED:
        reason = f"its value alone settles the class on {share:.0%} of the rows"
    else:
        return None
    exact = score >= EXACT["classes"]
    return Leak(column, target, round(max(score, told), 4), reason, dropped=exact)


def _of_number(
    column: str, target: str, levels: np.ndarray, values: pandas.Series, numbers: pandas.Series
) -> Leak | None:
    score = number_score(levels, numbers.to_numpy(np.float64))
    if values.dtype.kind in "iuf":  # a line, or any other monotone curve, also where rows are few
        ranks = values.corr(numbers, method="spearman"), values.corr(numbers)
        score = max(score, *(float(r) ** 2 for r in ranks if r == r), 0.0)
    if score < SUSPICIOUS["number"]:
        return None
    reason = f"alone it explains {score:.1%} of the variance"
    return Leak(column, target, round(score, 4), reason, dropped=score >= EXACT["number"])


def class_score(levels: np.ndarray, ids: np.ndarray) -> float:
    """Share of the errors of always guessing the commonest class that the column alone avoids."""
    table = _table(levels, ids)
    right = 0
    for these in _folds(len(ids)):
        # The fold's own rows are taken out of the counts, so a level of its own says nothing.
        others = table - _table(levels[these], ids[these], table.shape)
        guess = np.where(others.sum(1) > 0, others.argmax(1), others.sum(0).argmax())
        right += int((guess[levels[these]] == ids[these]).sum())
    commonest = table.sum(0).max()
    return max(0.0, float((right - commonest) / max(len(ids) - commonest, 1)))


def threshold_score(values: np.ndarray, ids: np.ndarray) -> float:
    """As `class_score`, for the best single threshold: bins would blur it."""
    counts = np.bincount(ids)
    missed = len(ids) - counts.max()
    # One rare example at the end of a range is chance; ten of them are not.
    if missed < 10 or len(counts) > 20:
        return 0.0
    order = np.argsort(values)  # gaps come last
    below = np.cumsum(np.eye(len(counts), dtype=np.int64)[ids[order]], 0)[:-1]
    right = below.max(1) + (counts - below).max(1)
    apart = np.diff(values[order]) != 0
    best = right[apart].max(initial=counts.max())
    return float((best - counts.max()) / missed)


def settled(levels: np.ndarray, ids: np.ndarray) -> tuple[float, float]:
    """Share of rows whose level always goes with one class, and how much of the class it tells.

    The second is the information of "settled, and as which class" about the class, from 0 to 1:
    that children earn little settles many rows of a census, and says little of who earns much.
    """
    table = _table(levels, ids)
    rows, top, base = table.sum(1), table.max(1), table.sum(0) / len(ids)
    chance = rows * np.log(np.clip(base[table.argmax(1)], 1e-12, 1 - 1e-12))
    pure = (top >= 0.999 * rows) & (chance < np.log(CHANCE))
    rest = table[~pure].sum(0)
    whole, left = _entropy(table.sum(0)), _entropy(rest) * rest.sum() / len(ids)
    return float(rows[pure].sum() / len(ids)), float(1 - left / whole) if whole else 0.0


def _entropy(counts: np.ndarray) -> float:
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(shares * np.log(shares)).sum())


def number_score(levels: np.ndarray, values: np.ndarray) -> float:
    """R² of the mean of each level, on rows that it was not taken from."""
    count = levels.max() + 1
    sums = np.bincount(levels, values - values.mean(), count)
    rows = np.bincount(levels, minlength=count)
    wrong = 0.0
    for these in _folds(len(values)):
        centred = values[these] - values.mean()
        left = rows - np.bincount(levels[these], minlength=count)
        mean = (sums - np.bincount(levels[these], centred, count)) / np.maximum(left, 1)
        wrong += float(((centred - mean[levels[these]]) ** 2).sum())
    whole = float(((values - values.mean()) ** 2).sum())
    return max(0.0, 1 - wrong / whole) if whole else 0.0


def _levels(values: pandas.Series) -> np.ndarray:
    """A small number for each value: a missing one has its own, a long number that of its bin."""
    import pandas

    if values.dtype.kind in "iuf" and values.nunique() > min(BINS, len(values) // LEAST):
        bins = int(np.clip(len(values) // LEAST, 10, BINS))
        codes = pandas.qcut(values, bins, labels=False, duplicates="drop").fillna(-1)
        return codes.to_numpy().astype(np.int64) + 1
    codes, names = pandas.factorize(values)
    if len(names) > LEVELS:  # the commonest ones; the rest are as one
        common = np.argsort(-np.bincount(codes + 1), kind="stable")[: LEVELS - 1]
        place = np.full(len(names) + 1, LEVELS - 1)
        place[common] = np.arange(len(common))
        return place[codes + 1]
    return codes + 1


def _table(levels: np.ndarray, ids: np.ndarray, shape: tuple[int, ...] | None = None) -> np.ndarray:
    high, wide = shape or (int(levels.max()) + 1, int(ids.max()) + 1)
    return np.bincount(levels * wide + ids, minlength=high * wide).reshape(high, wide)


def _folds(count: int) -> list[np.ndarray]:
    return np.array_split(np.random.default_rng(0).permutation(count), FOLDS)
