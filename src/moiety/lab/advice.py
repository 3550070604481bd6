"""What trials of waits and of growing recommend for a stream, and how sure that is.

    trials = moiety.anytime.advise(stream, makers, first=8)
    advice = recommend(trials, margin=0.01)
    advice.wait, advice.grow                     # 4, True; None: undecided, or no difference
    print(advice)

Arms are compared by paired differences over seeds. The variance has two parts: between seeds, and
between the rows that each mega-batch happened to bring to be scored (their mean over the seeds),
since five seeds on two hundred rows do not tell what the next two hundred hold. The t intervals
(Satterthwaite's degrees of freedom) of all differences hold together with 95 %, by Bonferroni's
rule, and are no narrower than so many rows allow where none of them was answered differently. Not
covered is which rows were trained on: only another stream could show that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from scipy import special
from torch import Tensor

from ..anytime.advise import SEEDS, Arm, Trials
from .claims import Word, check_margin, word_of
from .progress import duration

LEVEL = 0.05  # two-sided, of all intervals together


@dataclass(frozen=True)
class Difference:
    """How much larger the error of arm a is than that of arm b."""

    a: Arm
    b: Arm
    effect: float
    interval: tuple[float, float]
    margin: float
    of_rows: float  # the share of the variance that more seeds cannot lower

    @property
    def word(self) -> Word:
        """Of "b is better than a": by more than the margin, or the reverse, or within it."""
        return word_of(self.interval, self.margin)


@dataclass(frozen=True)
class Advice:
    """A recommendation, or none, with what it rests on."""

    wait: int | None
    grow: bool | None
    wait_reason: str
    grow_reason: str  # empty where growing was not tried
    errors: Mapping[Arm, float]
    flops: Mapping[Arm, float]
    differences: Sequence[Difference]
    trials: Trials
    margin: float

    def plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        arms = [
            {"wait": wait, "learner": name, "error": error, "flops": self.flops[wait, name]}
            for (wait, name), error in self.errors.items()
        ]
        differences = [
            {
                "a": list(each.a),
                "b": list(each.b),
                "effect": each.effect,
                "interval": list(each.interval),
                "word": each.word,
            }
            for each in self.differences
        ]
        return {
            "wait": self.wait,
            "grow": self.grow,
            "reasons": {"wait": self.wait_reason, "grow": self.grow_reason},
            "mega_batches": len(self.trials.rows),
            "rows": sum(self.trials.rows),
            "horizon": self.trials.horizon,
            "seeds": len(self.trials.done),
            "budget": self.trials.budget,
            "seconds": self.trials.spent,
            "margin": self.margin,
            "level": 1 - LEVEL,
            "arms": arms,
            "differences": differences,
        }

    def __str__(self) -> str:
        return "\n".join([_head(self.trials), "", *_tables(self), *_said(self)])


def recommend(trials: Trials, margin: float = 0.01) -> Advice:
    """Recommend a wait, and to grow or not, where the trials show a difference above the margin."""
    check_margin(margin)
    errors, flops = {}, {}
    for arm in trials.arms if trials.done else []:
        errors[arm] = float((_scores(trials, arm) @ trials.weights()).mean())
        flops[arm] = math.fsum(t.flops for t in trials.of(arm)) / len(trials.done)
    found: list[Difference] = []
    if len(trials.done) >= SEEDS:
        pairs = _pairs(trials.arms)
        found = [_compare(a, b, trials, margin, LEVEL / len(pairs)) for a, b in pairs]
        wait, wait_reason = _choose_wait(found, trials.arms)
        grow, grow_reason = _choose_growth(found, wait)
    else:
        wait, grow, wait_reason, grow_reason = None, None, _too_few(trials), ""
    return Advice(wait, grow, wait_reason, grow_reason, errors, flops, found, trials, margin)


def _pairs(arms: Sequence[Arm]) -> list[tuple[Arm, Arm]]:
    """All waits with each other, the shorter first; and growing beside not growing at each wait."""
    base = arms[0][1]
    waits = [arm for arm in arms if arm[1] == base]
    grown = [((wait, base), (wait, name)) for wait, name in arms if name != base]
    return [*combinations(waits, 2), *grown]


def _compare(a: Arm, b: Arm, trials: Trials, margin: float, level: float) -> Difference:
    """The difference of two arms, with an interval whose variance has two parts."""
    rows_SN = _scores(trials, a) - _scores(trials, b)
    by_seed = rows_SN @ trials.weights()
    of_seeds = float(by_seed.var()) / len(by_seed)
    # Rows vary within the mega-batch that brought them: what differs between times is no chance.
    times = zip(rows_SN.mean(0).split(trials.rows), trials.weights().split(trials.rows))
    of_rows = sum(float(len(w) * w[0] ** 2 * rows.var()) for rows, w in times if len(w) > 1)
    effect, total = float(by_seed.mean()), of_seeds + of_rows
    free_rows = max(sum(trials.rows) - len(trials.rows), 1)
    half = 0.0
    if total:
        free = total**2 / (of_seeds**2 / (len(by_seed) - 1) + of_rows**2 / free_rows)
        half = float(special.stdtrit(free, 1 - level / 2)) * math.sqrt(total)
    if trials.metric == "error":
        # n rows on which arms never differ show that they do so less often than about this (the
        # rule of three), and not that they never will.
        half = max(half, math.log(2 / level) * float(trials.weights().square().sum()))
    share = of_rows / total if total else 1.0
    return Difference(a, b, effect, (effect - half, effect + half), margin, share)


def _scores(trials: Trials, arm: Arm) -> Tensor:
    return torch.stack([trial.scores for trial in trials.of(arm)])


# -- what follows ----------------------------------------------------------------------------------


def _choose_wait(found: Sequence[Difference], arms: Sequence[Arm]) -> tuple[int | None, str]:
    """The wait that the differences leave, and why."""
    base = arms[0][1]
    waits = [wait for wait, name in arms if name == base]
    among = [each for each in found if each.a[1] == each.b[1] == base]
    better = {(e.b[0], e.a[0]) for e in among if e.word == "holds"}
    better |= {(e.a[0], e.b[0]) for e in among if e.word == "reversed"}
    for middle in waits:  # the intervals hold together: better than the better one is better
        better |= {(a, b) for a in waits for b in waits if {(a, middle), (middle, b)} <= better}
    left = [wait for wait in waits if not any((other, wait) in better for other in waits)]
    if left == [1]:
        return 1, "train at once: every longer wait is worse"
    good = [wait for wait in left if (wait, 1) in better]
    if 1 not in left and good:
        others = [wait for wait in left if wait != good[0]]
        alike = f", and not told apart from {_list(others)}" if others else ""
        alike += ", the longest that was tried" if good[0] == waits[-1] else ""
        return good[0], f"wait for {good[0]} mega-batches: better than training at once{alike}"
    worse = [wait for wait in waits if wait not in left]
    but = f" (worse: {_list(worse)})" if worse else ""
    pairs = [each for each in among if each.a[0] in left and each.b[0] in left]
    which = _list(left)
    if pairs and {each.word for each in pairs} == {"negligible"}:
        return None, f"no recommendation: the waits {which} differ by less than the margin{but}"
    return None, f"undecided between the waits {which}{but}{_would_help(pairs)}"


def _choose_growth(found: Sequence[Difference], wait: int | None) -> tuple[bool | None, str]:
    """Whether to grow, at the recommended wait or, without one, at all waits alike."""
    grown = [each for each in found if each.a[1] != each.b[1]]
    if not grown:
        return None, ""
    name = grown[0].b[1]
    if wait is not None:
        grown = [each for each in grown if each.a[0] == wait]
        if not grown:
            return (
                None,
                f"not seen: at a wait of {wait}, {name} grows too late; try on more mega-batches",
            )
    waits = [each.a[0] for each in grown]
    where = f"at a wait of {waits[0]}" if len(waits) == 1 else f"at the waits {_list(waits)}"
    words = {each.word for each in grown}
    if words == {"holds"}:
        return True, f"grow ({name}): better {where}"
    if words == {"reversed"}:
        return False, f"do not grow: {name} is worse {where}"
    if words == {"negligible"}:
        return None, f"no recommendation: {name} differs by less than the margin {where}"
    if {"holds", "reversed"} <= words:
        up, down = (
            _list([e.a[0] for e in grown if e.word == word]) for word in ("holds", "reversed")
        )
        return None, f"it depends on the wait: {name} is better at {up}, worse at {down}"
    return None, f"undecided: {name} cannot be told apart from not growing {where}" + _would_help(
        grown
    )


def _would_help(found: Sequence[Difference]) -> str:
    """What would narrow the intervals most."""
    if not found:
        return ""
    rows = max(found, key=lambda each: each.interval[1] - each.interval[0]).of_rows > 0.5
    return "; more mega-batches or rows would tell more" if rows else "; more seeds would tell more"


def _too_few(trials: Trials) -> str:
    larger = "a larger one"
    if trials.ended:
        needed = trials.spent / trials.ended * len(trials.arms) * SEEDS
        larger = f"--budget {_budget(needed)}, about what {SEEDS} seeds take,"
    return (
        f"undecided: {len(trials.done)} of at least {SEEDS} seeds were finished within the budget "
        f"of {duration(trials.budget or 0)}; the same command with {larger} goes on from here"
    )


def _budget(seconds: float) -> str:
    """A time as --budget takes it, rounded up: "40s", "3m" or "1h20m"."""
    if seconds <= 90:
        return f"{math.ceil(seconds / 10) * 10}s"
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes else "")


def _list(waits: Sequence[int]) -> str:
    words = list(map(str, waits))
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


# -- what is said ----------------------------------------------------------------------------------


def _head(trials: Trials) -> str:
    m, half = len(trials.rows), len(trials.rows) // 2
    budget = f" of {duration(trials.budget)}" if trials.budget else ""
    over = f"mega-batches {half + 1} to {m}"
    if trials.horizon:
        over = (
            f"all {trials.horizon} mega-batches, of which 1 to {half} are as measured and "
            f"{half + 1} to {m} stand for the rest"
        )
    seeds = "1 seed" if len(trials.done) == 1 else f"{len(trials.done)} seeds"
    return (
        f"Tried on mega-batches 1 to {m} ({sum(trials.rows):,} rows) with {seeds} "
        f"in {duration(trials.spent)}{budget}.\n"
        f"The {trials.metric} is that over {over}; each is scored before it is trained on."
    )


def _tables(advice: Advice) -> list[str]:
    lines = []
    if advice.errors:
        width = max(len(name) for _, name in advice.errors)
        lines += [f"{'wait':>4}  {'learner':<{width}}  {advice.trials.metric:>6}  FLOPs"]
        for (wait, name), error in advice.errors.items():
            lines += [f"{wait:>4}  {name:<{width}}  {error:6.4f}  {advice.flops[wait, name]:.2e}"]
        lines += [""]
    if advice.differences:
        what = f"Differences in {advice.trials.metric}, with intervals"
        lines += [f"{what} that hold together with {1 - LEVEL:.0%}:"]
        names = [_name(each) for each in advice.differences]
        for name, each in zip(names, advice.differences):
            low, high = each.interval
            lines += [
                f"  {name:<{max(map(len, names))}}  {each.effect:+.4f}  [{low:+.4f}, {high:+.4f}]  "
                f"{_verdict(each, advice.margin)}"
            ]
        lines += [""]
    return lines


def _name(each: Difference) -> str:
    (wait, name), (other, grown) = each.a, each.b
    return f"wait {wait} − wait {other}" if name == grown else f"wait {wait}: {name} − {grown}"


def _verdict(each: Difference, margin: float) -> str:
    first, second = (
        (f"wait {each.a[0]}", f"wait {each.b[0]}")
        if each.a[1] == each.b[1]
        else (each.a[1], each.b[1])
    )
    return {
        "holds": f"{second} is better by more than {margin:g}",
        "reversed": f"{first} is better by more than {margin:g}",
        "negligible": f"less than {margin:g} apart",
        "undecided": "undecided",
    }[each.word]


def _said(advice: Advice) -> list[str]:
    grow = [f"Growing: {advice.grow_reason}."] if advice.grow_reason else []
    return [f"Waiting: {advice.wait_reason}.", *grow]
