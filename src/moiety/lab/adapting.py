"""Which way to a classifier is better on these labels, and how sure that is.

    said = judge(compared.answers, compared.labels, metric="accuracy", margin=0.01)
    said.best                                   # "self-distill"; None: undecided, or no difference
    for each in said.differences: print(each.a, each.b, each.effect, each.interval, each.word)

Arms are compared by paired differences over seeds. The variance has two parts: between seeds, and
between the examples that happened to be in the scored split (by resampling them), since five seeds
on 139 examples do not tell what the next 139 hold. The t intervals (Satterthwaite's degrees of
freedom) of all differences hold together with 95 %, by Bonferroni's rule. Not covered are another
pre-training and another source model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from scipy import special
from torch import Tensor

from .claims import Word, check_margin, word_of

LEVEL = 0.05  # two-sided, of all intervals together
ROUNDING = 1e-9
RESAMPLES, AT_ONCE = 1000, 2**24  # weights of examples in memory at once
METRICS = ("accuracy", "macro_f1")


@dataclass(frozen=True)
class Difference:
    """How much better arm a is than arm b."""

    a: str
    b: str
    effect: float
    interval: tuple[float, float]
    margin: float
    of_examples: float  # the share of the variance that more seeds cannot lower
    silent: bool = False  # there is nothing to compare, whatever the numbers

    @property
    def word(self) -> Word:
        """Of "a is better than b": by more than the margin, or the reverse, or within it."""
        return "undecided" if self.silent else word_of(self.interval, self.margin)


@dataclass(frozen=True)
class Judgement:
    """What the differences say together."""

    best: str | None
    reason: str
    means: dict[str, float]
    intervals: dict[str, tuple[float, float]]  # of each arm alone, 95 %
    differences: list[Difference]
    metric: str
    margin: float
    seeds: int
    examples: int
    floor: float  # of a classifier that gives all examples the commonest class

    def plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        each = [
            {**vars(one), "interval": list(one.interval), "word": one.word}
            for one in self.differences
        ]
        intervals = {arm: list(ends) for arm, ends in self.intervals.items()}
        return {**vars(self), "intervals": intervals, "differences": each, "level": 1 - LEVEL}


CONSTANT = (
    "undecided: every classifier gives all examples the same class; give them more --epochs or "
    "another --tune-lr"
)
BELOW = (
    "undecided: no arm is better than giving all examples the commonest class; change --epochs or "
    "--tune-lr: more seeds would not help"
)


def judge(
    answers: Mapping[str, Tensor],
    labels_N: Tensor,
    *,
    metric: str,
    margin: float,
    silent: str | None = None,
) -> Judgement:
    """Compare the answers [S, N] of all arms; the arms are in the order of what they cost.

    silent   why there is no verdict, where that is known
    """
    check_margin(margin)
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    weights_RN = torch.ones(1, len(labels_N))
    scores = {arm: _metric(a, labels_N, weights_RN, metric)[0] for arm, a in answers.items()}
    drawn = _resampled(answers, labels_N, metric)
    level = LEVEL / math.comb(len(answers), 2)
    commonest = labels_N.bincount().argmax().expand(1, len(labels_N))
    floor = float(_metric(commonest, labels_N, weights_RN, metric))
    if all((a == a[:, :1]).all() for a in answers.values()):
        silent = silent or CONSTANT
    elif max(float(each.mean()) for each in scores.values()) <= floor + ROUNDING:
        silent = silent or BELOW
    found = []
    for b, a in combinations(answers, 2):
        effect, interval, share = _interval(
            scores[a] - scores[b], drawn[a] - drawn[b], len(labels_N), level
        )
        within = max(interval[0], -1.0), min(interval[1], 1.0)  # what two scores can differ by
        found.append(Difference(a, b, effect, within, margin, share, silent is not None))
    alone = {arm: _interval(scores[arm], drawn[arm], len(labels_N), LEVEL) for arm in answers}
    best, reason = _choose(found, list(answers), margin)
    if silent is not None:
        best, reason = None, silent
    return Judgement(
        best,
        reason,
        {arm: each[0] for arm, each in alone.items()},
        {arm: (max(each[1][0], 0.0), min(each[1][1], 1.0)) for arm, each in alone.items()},
        found,
        metric,
        margin,
        len(next(iter(scores.values()))),
        len(labels_N),
        floor,
    )


# -- numbers ---------------------------------------------------------------------------------------


def _metric(answers_SN: Tensor, labels_N: Tensor, weights_RN: Tensor, metric: str) -> Tensor:
    """[R, S]: the metric with every example counted as often as its weight says."""
    weights_RN = weights_RN.double()
    right_SN = answers_SN == labels_N
    if metric == "accuracy":
        return weights_RN @ right_SN.double().T / weights_RN.sum(1, keepdim=True)
    total, classes = 0.0, torch.zeros(())
    for c in torch.cat([answers_SN.flatten(), labels_N]).unique().tolist():
        said_SN, true_N = answers_SN == c, labels_N == c
        both_RS = weights_RN @ (said_SN & true_N).double().T
        count_RS = weights_RN @ said_SN.double().T + (weights_RN @ true_N.double())[:, None]
        total = total + 2 * both_RS / count_RS.clamp(min=1.0)
        classes = classes + (count_RS > 0)  # that are there, or were answered
    return total / classes


def _resampled(answers: Mapping[str, Tensor], labels_N: Tensor, metric: str) -> dict[str, Tensor]:
    """[R] by arm: the mean over seeds on examples that are drawn again, the same for all arms."""
    count, lots = len(labels_N), torch.Generator().manual_seed(0)
    parts: dict[str, list[Tensor]] = {arm: [] for arm in answers}
    at_once = max(1, min(RESAMPLES, AT_ONCE // count))
    for start in range(0, RESAMPLES, at_once):
        rows = min(at_once, RESAMPLES - start)
        chosen = torch.randint(count, (rows, count), generator=lots)
        weights_RN = torch.zeros(rows, count).scatter_add_(
            1, chosen, torch.ones(1).expand(rows, count)
        )
        for arm, answered in answers.items():
            parts[arm].append(_metric(answered, labels_N, weights_RN, metric).mean(1))
    return {arm: torch.cat(part) for arm, part in parts.items()}


def _interval(
    by_seed: Tensor, drawn: Tensor, examples: int, level: float
) -> tuple[float, tuple[float, float], float]:
    """Mean, interval, and the share of the examples in its variance."""
    effect, seeds = float(by_seed.mean()), len(by_seed)
    of_seeds, of_examples = float(by_seed.var()) / seeds, float(drawn.var())
    total, half = of_seeds + of_examples, 0.0
    if total:
        free = total**2 / (of_seeds**2 / (seeds - 1) + of_examples**2 / max(examples - 1, 1))
        half = float(special.stdtrit(free, 1 - level / 2)) * math.sqrt(total)
    # Examples on which arms never differ show that they do so less often than about this (the rule
    # of three), and not that they never will.
    half = max(half, math.log(2 / level) / examples)
    return effect, (effect - half, effect + half), of_examples / total if total else 1.0


# -- words -----------------------------------------------------------------------------------------


def _choose(found: list[Difference], arms: list[str], margin: float) -> tuple[str | None, str]:
    """The arm that is better than all others; or the cheapest of those that are alike."""
    better = {(d.a, d.b) for d in found if d.word == "holds"}
    better |= {(d.b, d.a) for d in found if d.word == "reversed"}
    for middle in arms:  # the intervals hold together: better than the better one is better
        better |= {(a, b) for a in arms for b in arms if {(a, middle), (middle, b)} <= better}
    for arm in arms:
        if all((arm, other) in better for other in arms if other != arm):
            return arm, f"{arm} is better than both others by more than {margin:g}"
    left = [arm for arm in arms if not any((other, arm) in better for other in arms)]
    among = [d for d in found if d.a in left and d.b in left]
    worse = [arm for arm in arms if arm not in left]
    but = f"; {' and '.join(worse)} is worse" if worse else ""
    names = " and ".join([", ".join(left[:-1]), left[-1]] if len(left) > 1 else left)
    if all(d.word == "negligible" for d in among):
        return None, f"no difference that matters: {names} are less than {margin:g} apart{but}"
    return None, f"undecided between {names}{but}; {_would_help(among)} would tell more"


def _would_help(found: list[Difference]) -> str:
    widest = max(found, key=lambda d: d.interval[1] - d.interval[0])
    return "more scored examples" if widest.of_examples > 0.5 else "more seeds (--seeds)"
