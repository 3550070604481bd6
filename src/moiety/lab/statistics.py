"""What a comparison over seeds says, and how sure it is.

    difference = paired(accuracy_of_a, accuracy_of_b)         # by shared seed
    (said,) = verdicts([Evidence("greater", difference, margin=0.01)])
    print(said.word, said.effect, said.interval)              # holds 0.021 (0.013, 0.029)

Against a smallest effect δ that was written down before (the margin), a difference d of two arms is

    holds       above δ       reversed    below −δ       negligible    inside ±δ       undecided

each by a one-sided t test over seeds. Over all looks at a claim a false word has 2.5 %: the first
look, at the planned number of seeds, spends four fifths of that, each further one half of what is
left, so that adding seeds until it fits does not raise the rate of false claims. Several claims of
one paper are corrected by Holm's rule.

Nothing but t is offered, at any number of seeds: a percentile bootstrap covers 74 to 89 % at 3 to
10 seeds, Wilcoxon's test cannot reach the level with five or fewer, and from 30 seeds on they would
say what t says. docs/statistics.md has the measured rates.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from .claims import Kind, Word, check_margin

LEVEL = 0.025  # one-sided, over all looks
FIRST = 0.8  # of which the first look spends this share
POWER = 0.8
FEWEST = 5
MOST = 1000
SAME = 1e-6  # of δ: a spread below it is no spread


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> list[float]:
    """a − b over the seeds that both have, in the order of the seeds."""
    differences = [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
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


def seeds_needed(pilot: ArrayLike, margin: float, claims: int = 1) -> int:
    """How many seeds decide a difference of 0 (negligible) or of 2δ (holds), with a power of 80 %.

    pilot: differences of some seeds. Their spread is itself uncertain, so an upper limit of it is
    used, which the true one exceeds once in five pilots. claims: of the family, corrected together.
    """
    x = _values(pilot)
    check_margin(margin)
    free = len(x) - 1
    spread = float(x.std(ddof=1)) * math.sqrt(free / stats.chi2.ppf(0.2, free))
    level = spent(1) / claims
    # Dismissing a difference of 0 takes more seeds than holding one of 2δ, by two tests for one.
    n = FEWEST + bisect.bisect_left(
        range(FEWEST, MOST + 1), POWER, key=lambda n: _power_to_dismiss(spread, margin, n, level)
    )
    if n > MOST:
        raise ValueError(
            f"{MOST} seeds would not decide an effect of {margin:g} at a spread of {spread:.2g}: "
            "declare a larger smallest effect"
        )
    return n


def detectable(values: ArrayLike, look: int = 1) -> float:
    """The smallest distance from a margin that these seeds tell with a power of 80 %."""
    x = _values(values)
    free, level = len(x) - 1, spent(look)
    quantiles = special.stdtrit(free, 1 - level) + special.stdtrit(free, POWER)
    return float(quantiles * _error(x))


def _power_to_dismiss(spread: float, margin: float, n: int, level: float) -> float:
    """At least P(both one-sided tests say inside ±δ) where the truth is 0 (Bonferroni's bound)."""
    if spread <= SAME * margin:
        return float(0.5**n <= level)
    shift, critical = margin / (spread / math.sqrt(n)), stats.t.isf(level, n - 1)
    return max(2 * float(stats.nct.sf(critical, n - 1, shift)) - 1, 0.0)


def seeds_to_decide(values: ArrayLike, margin: float, level: float) -> int | None:
    """How many seeds decide at that level, if effect and spread stay; None: more than MOST."""
    x = _values(values)
    distance = abs(abs(float(x.mean())) - margin)
    n = np.arange(len(x) + 1, MOST + 1)
    if np.ptp(x) <= SAME * margin:
        enough = n[(0.5**n <= level) & (distance > SAME * margin)]
    else:
        quantiles = special.stdtrit(n - 1, 1 - level) + special.stdtrit(n - 1, POWER)
        enough = n[quantiles * float(x.std(ddof=1)) / np.sqrt(n) <= distance]
    return int(enough[0]) if len(enough) else None


# -- after it --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """What the seeds gave for a claim, with the smallest effect that would matter."""

    kind: Kind
    differences: Sequence[float]
    margin: float
    look: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("greater", "equivalent"):
            raise ValueError(f'a claim is "greater" or "equivalent", got {self.kind!r}')
        check_margin(self.margin)
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


def verdicts(family: Sequence[Evidence], untested: int = 0) -> list[Verdict]:
    """The verdicts on all claims of one family (a paper), corrected for their number.

    untested: claims of the family without evidence; each counts like one with p = 1.
    """
    if not family:
        return []
    levels = np.array([spent(each.look) for each in family] + [spent(1)] * untested)
    table = np.array(
        [_p_values(np.asarray(e.differences, float), e.margin) for e in family]
        + [(1.0, 1.0, 1.0)] * untested
    )
    adjusted = np.stack([holm(ps, levels) for ps in table.T], 1)  # [claims, (above, below, inside)]
    return [_verdict(each, ps) for each, ps in zip(family, adjusted)]


def holm(p: ArrayLike, levels: ArrayLike = 1.0) -> NDArray[np.float64]:
    """Holm's adjusted p values: reject those below the level, and the family errs no more often.

    levels: of each p, where they differ, because claims of one paper may have been looked at more
    or less often; they are then compared in units of their level.
    """
    p = np.asarray(p, dtype=np.float64)
    units = p / levels
    order = np.argsort(units)
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(units[order] * np.arange(len(p), 0, -1))
    return np.minimum(adjusted * levels, 1.0)


def _p_values(x: NDArray[np.float64], margin: float) -> tuple[float, float, float]:
    """Of: not above δ; not below −δ; not inside ±δ (the larger of two one-sided t tests)."""
    mean, error, free = float(x.mean()), _error(x), len(x) - 1
    blur = SAME * margin
    if np.ptp(x) <= blur:
        # Equal differences come of a coarse metric, and t would be certain of two of them: a sign
        # test, in which n seeds fall on the wrong side of the median once in 2ⁿ.
        said = mean > margin + blur, mean < -margin - blur, abs(mean) < margin - blur
        above, below, inside = (0.5 ** len(x) if it else 1.0 for it in said)
        return above, below, inside
    from_top, from_bottom = (mean - margin) / error, (mean + margin) / error
    above, below = special.stdtr(free, -from_top), special.stdtr(free, from_bottom)
    inside = max(special.stdtr(free, from_top), special.stdtr(free, -from_bottom))
    return float(above), float(below), float(inside)


def _verdict(evidence: Evidence, p: NDArray[np.float64]) -> Verdict:
    """The word for the adjusted p values of above, below and inside."""
    words: tuple[Word, ...] = ("holds", "reversed", "negligible")
    level = spent(evidence.look)
    best = int(np.argmin(p))
    word: Word = words[best] if p[best] <= level else "undecided"
    if evidence.kind == "equivalent" and word != "undecided":
        word = "holds" if word == "negligible" else "reversed"
    x = evidence.differences
    return Verdict(
        word=word,
        effect=float(np.mean(x)),
        interval=t_interval(x),
        seeds=len(x),
        p=float(p[best]),
        level=level,
        detectable=detectable(x, evidence.look),
    )


def _values(values: ArrayLike) -> NDArray[np.float64]:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or len(x) < 2 or not np.isfinite(x).all():
        raise ValueError("at least two finite numbers are needed, one for each seed")
    return x


def _error(x: NDArray[np.float64]) -> float:
    return float(x.std(ddof=1)) / math.sqrt(len(x))
