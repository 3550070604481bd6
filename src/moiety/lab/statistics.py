"""What a comparison over seeds says, and how sure it is.

    difference = paired(accuracy_of_a, accuracy_of_b)         # by shared seed
    (said,) = verdicts([Claim("greater", difference, margin=0.01)])
    print(said.word, said.effect, said.interval)              # holds 0.021 (0.013, 0.029)

Against a smallest effect δ that was written down before (the margin), a difference d of two arms is

    holds       above δ       reversed    below −δ       negligible    inside ±δ       undecided

each by a one-sided t test over seeds at 2.5 %, so that for one claim and one look it is the same as
asking where the 95 % interval lies. Below 30 seeds nothing else is offered: a percentile bootstrap
covers 74 to 89 % at 3 to 10 seeds, and Wilcoxon's test cannot reach the level with five or fewer.

Several claims of one paper are corrected by Holm's rule. Looking again after more seeds costs: the
first look at the planned number of seeds spends four fifths of the 2.5 %, each further one half of
what is left, so that adding seeds until it fits does not raise the rate of false claims.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

LEVEL = 0.025  # one-sided, over all looks
FIRST = 0.8  # of which the first look spends this share
POWER = 0.8
FEWEST = 5
MOST = 1000

Word = Literal["holds", "reversed", "negligible", "undecided"]
Kind = Literal["greater", "equivalent"]


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> list[float]:
    """a − b over the seeds that both have, in the order of the seeds."""
    shared = sorted(a.keys() & b.keys())
    if len(shared) < 2:
        raise ValueError(f"two arms share {len(shared)} seeds: a comparison needs at least two")
    differences = [a[seed] - b[seed] for seed in shared]
    if not all(map(math.isfinite, differences)):
        raise ValueError("a metric is NaN or infinite: record a trial that broke down as failed")
    return differences


def t_interval(values: ArrayLike, level: float = 0.95) -> tuple[float, float]:
    """The t interval of the mean."""
    x = _values(values)
    half = special.stdtrit(len(x) - 1, (1 + level) / 2) * _error(x)
    return float(x.mean() - half), float(x.mean() + half)


def spent(look: int) -> float:
    """The one-sided level that a look may use; over all looks they add up to LEVEL."""
    if look < 1:
        raise ValueError(f"looks are counted from 1, got {look}")
    return LEVEL * FIRST if look == 1 else LEVEL * (1 - FIRST) * 0.5 ** (look - 1)


# -- before the study ------------------------------------------------------------------------------


def seeds_needed(pilot: ArrayLike, margin: float) -> int:
    """How many seeds decide a difference of 0 (negligible) or of 2δ (holds), with a power of 80 %.

    pilot: differences of some seeds. Their spread is itself uncertain, so an upper limit of it is
    used, which the true one exceeds once in five pilots.
    """
    x = _values(pilot)
    _check_margin(margin)
    free = len(x) - 1
    spread = float(x.std(ddof=1)) * math.sqrt(free / stats.chi2.ppf(0.2, free))
    for n in range(FEWEST, MOST + 1):
        if min(_power_to_hold(spread, margin, n), _power_to_dismiss(spread, margin, n)) >= POWER:
            return n
    raise ValueError(
        f"{MOST} seeds would not decide an effect of {margin:g} at a spread of {spread:.2g}: "
        "declare a larger smallest effect"
    )


def detectable(values: ArrayLike, look: int = 1) -> float:
    """The smallest distance from a margin that these seeds tell with a power of 80 %."""
    x = _values(values)
    free, level = len(x) - 1, spent(look)
    quantiles = special.stdtrit(free, 1 - level) + special.stdtrit(free, POWER)
    return float(quantiles * _error(x))


def _power_to_hold(spread: float, margin: float, n: int) -> float:
    """P(the test says more than δ) where the truth is 2δ."""
    if spread == 0:
        return 1.0
    shift = margin / (spread / math.sqrt(n))
    return float(stats.nct.sf(stats.t.isf(spent(1), n - 1), n - 1, shift))


def _power_to_dismiss(spread: float, margin: float, n: int) -> float:
    """At least P(both one-sided tests say inside ±δ) where the truth is 0 (Bonferroni's bound)."""
    if spread == 0:
        return 1.0
    shift, critical = margin / (spread / math.sqrt(n)), stats.t.isf(spent(1), n - 1)
    return max(2 * float(stats.nct.sf(critical, n - 1, shift)) - 1, 0.0)


# -- after it --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """A statement about a difference, with the smallest effect that would matter."""

    kind: Kind
    differences: Sequence[float]
    margin: float
    look: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("greater", "equivalent"):
            raise ValueError(f'a claim is "greater" or "equivalent", got {self.kind!r}')
        _check_margin(self.margin)
        _values(self.differences)
        spent(self.look)


@dataclass(frozen=True)
class Verdict:
    """What the seeds say of a claim."""

    word: Word
    effect: float  # mean difference
    interval: tuple[float, float]  # 95 %, of this difference alone
    seeds: int
    p: float  # adjusted over the family: of the word, or of the nearest one where undecided
    level: float  # that p was held against
    detectable: float

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.word}: {self.effect:.4g} [{low:.4g}, {high:.4g}], {self.seeds} seeds"


def verdicts(claims: Sequence[Claim]) -> list[Verdict]:
    """The verdicts on all claims of one family (a paper), corrected for their number."""
    if not claims:
        return []
    table = np.array([_p_values(np.asarray(c.differences, float), c.margin) for c in claims])
    adjusted = np.stack([holm(ps) for ps in table.T], 1)  # [claims, (above, below, inside)]
    return [_verdict(claim, ps) for claim, ps in zip(claims, adjusted, strict=True)]


def holm(p: ArrayLike) -> NDArray[np.float64]:
    """Holm's adjusted p values: reject those below the level, and the family errs no more often."""
    p = np.asarray(p, dtype=np.float64)
    order = np.argsort(p)
    steps = p[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted


def _p_values(x: NDArray[np.float64], margin: float) -> tuple[float, float, float]:
    """Of: not above δ; not below −δ; not inside ±δ (the larger of two one-sided t tests)."""
    mean, error, free = float(x.mean()), _error(x), len(x) - 1
    if error == 0:  # no spread: the mean is known
        return float(not mean > margin), float(not mean < -margin), float(not abs(mean) < margin)
    from_top, from_bottom = (mean - margin) / error, (mean + margin) / error
    above, below = special.stdtr(free, -from_top), special.stdtr(free, from_bottom)
    inside = max(special.stdtr(free, from_top), special.stdtr(free, -from_bottom))
    return float(above), float(below), float(inside)


def _verdict(claim: Claim, p: NDArray[np.float64]) -> Verdict:
    words: tuple[Word, ...] = ("holds", "reversed", "negligible")
    level = spent(claim.look)
    best = int(np.argmin(p))
    word: Word = words[best] if p[best] <= level else "undecided"
    if claim.kind == "equivalent" and word != "undecided":
        word = "holds" if word == "negligible" else "reversed"
    x = claim.differences
    return Verdict(
        word=word,
        effect=float(np.mean(x)),
        interval=t_interval(x),
        seeds=len(x),
        p=float(p[best]),
        level=level,
        detectable=detectable(x, claim.look),
    )


def _values(values: ArrayLike) -> NDArray[np.float64]:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or len(x) < 2 or not np.isfinite(x).all():
        raise ValueError("at least two finite numbers are needed, one for each seed")
    return x


def _error(x: NDArray[np.float64]) -> float:
    return float(x.std(ddof=1)) / math.sqrt(len(x))


def _check_margin(margin: float) -> None:
    if not (isinstance(margin, (int, float)) and 0 < margin < math.inf):
        raise ValueError(f"the smallest effect that matters must be positive, got {margin!r}")
