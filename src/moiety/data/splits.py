"""Which example goes where: the given split or one by a seed, and no example twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .problem import Leak

SHARES = {"train": 0.70, "validation": 0.15, "test": 0.15}
WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
LEAST = 10  # examples, or no split says anything
Rows = dict[str, np.ndarray]  # of each split, in its order


def split_of(word: str) -> str | None:
    """The split that a word means, or none: "dev" is the validation split."""
    word = word.strip().lower()
    return next((name for name, words in WORDS.items() if word in words), None)


def choose(
    strata: np.ndarray, given: np.ndarray | None, *, seed: int, limit: int | None, notes: list[str]
) -> Rows:
    """Rows of each split: as `given` where it is, each stratum with its share where not.

    With `limit`, at most about so many examples in all, taken from every stratum alike.
    """
    draw = np.random.default_rng(seed)
    if len(strata) < LEAST:
        raise ValueError(f"there are {len(strata)} examples; at least {LEAST} are needed")
    if given is None:
        rows = _deal(np.arange(len(strata)), strata, SHARES, draw)
        found = {name: len(these) / len(strata) for name, these in rows.items()}
        shares = _shares({name: found[name] for name in SHARES})
        notes.append(f"split: {shares} of each class, by seed {seed}")
    else:
        rows = _complete(given, strata, draw, notes, seed)
    total = sum(map(len, rows.values()))
    if limit is not None and total > limit:
        part = limit / total
        rows = {name: _thin(these, strata, part, draw) for name, these in rows.items()}
        left = sum(map(len, rows.values()))
        notes.append(f"taken: {left} of {total} examples, of each class alike, by seed {seed}")
    return {name: np.sort(these) for name, these in rows.items()}


def _complete(
    given: np.ndarray, strata: np.ndarray, draw: np.random.Generator, notes: list[str], seed: int
) -> Rows:
    """The given splits; one that is missing is taken from train."""
    rows = {name: np.flatnonzero(given == name) for name in SHARES}
    missing = [name for name in ("validation", "test") if not len(rows[name])]
    if not len(rows["train"]):
        raise ValueError("the given split has no training examples; name some of them train")
    if missing:
        shares = {name: SHARES[name] for name in ("train", *missing)}
        rows |= _deal(rows["train"], strata, shares, draw)
        notes.append(
            f"split: given; {' and '.join(missing)}, not given, taken from train by seed {seed}"
        )
    else:
        notes.append("split: given")
    return rows


def _deal(
    rows: np.ndarray, strata: np.ndarray, shares: Mapping[str, float], draw: np.random.Generator
) -> Rows:
    """Deal every stratum out by `shares`; one example or two still reach train (and test)."""
    dealt: dict[str, list[np.ndarray]] = {name: [] for name in shares}
    others = [name for name in ("test", "validation") if name in shares]
    whole = sum(shares.values())
    for these in _by_stratum(rows, strata, draw):
        start = 0
        for place, name in enumerate(others):
            # Rounded up or down by lot, or many small strata would all round the same way.
            count = int(len(these) * shares[name] / whole + draw.random())
            count = max(count, 1) if len(these) >= place + 2 else 0
            dealt[name].append(these[start : start + count])
            start += count
        dealt["train"].append(these[start:])
    made = {name: np.concatenate(parts) for name, parts in dealt.items()}
    if all(map(len, made.values())):
        return made
    if not strata[rows].any():
        raise ValueError(f"{len(rows)} examples are too few for {', '.join(shares)}; add some")
    return _deal(rows, np.zeros_like(strata), shares, draw)  # strata too small to be dealt out


def _thin(
    rows: np.ndarray, strata: np.ndarray, part: float, draw: np.random.Generator
) -> np.ndarray:
    """A part of every stratum, at least one example of each."""
    kept = [
        these[: max(1, int(len(these) * part + draw.random()))]
        for these in _by_stratum(rows, strata, draw)
    ]
    return np.concatenate(kept) if kept else rows


def _by_stratum(
    rows: np.ndarray, strata: np.ndarray, draw: np.random.Generator
) -> Sequence[np.ndarray]:
    """The rows of every stratum, shuffled."""
    if not len(rows):
        return []
    rows = rows[draw.permutation(len(rows))]
    rows = rows[np.argsort(strata[rows], kind="stable")]
    ends = np.flatnonzero(np.diff(strata[rows])) + 1
    return np.split(rows, ends)


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{share:.0%} {name}" for name, share in shares.items())


def drop_repeats(
    keys: np.ndarray, rows: Rows, *, target: str, notes: list[str], most: float = 1.0
) -> list[Leak]:
    """Take out of train (then of validation) what is also in a later split; `rows` is changed.

    `keys` are equal for equal examples. Where more than the share `most` of train would go, the
    examples have so few different values that repeats are natural, and all stay.
    """
    before = np.concatenate([keys[rows["train"]], keys[rows["validation"]]])
    gone, leaked = 0, np.isin(keys[rows["test"]], before).mean()
    for name, later in (("train", ("validation", "test")), ("validation", ("test",))):
        seen = np.concatenate([keys[rows[other]] for other in later])
        repeated = np.isin(keys[rows[name]], seen)
        if repeated.mean() > most or repeated.all():
            notes.append(
                f"repeats: {repeated.mean():.0%} of {name} are also in a later split and stay, "
                "since the columns have few different values"
            )
            return []
        rows[name] = rows[name][~repeated]
        gone += int(repeated.sum())
    if not gone:
        notes.append("repeats: no example is in two splits")
        return []
    notes.append(f"repeats: {gone} examples that are also in a later split were taken out")
    if leaked < 0.01:
        return []
    reason = f"{leaked:.1%} of the test examples were also in other splits, and taken out there"
    return [Leak("(repeated examples)", target, float(leaked), reason, dropped=True)]
