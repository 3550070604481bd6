"""What a study claims, written before its results.

    greater("dselect-k", "top-k", margin=0.005, metric="accuracy", quote="over 1 point better",
            mark="2 §5", number="> 0.01", reason="half of what is reported", tier="scaled down")

A claim has a margin δ, the smallest difference that matters, and the reason for it. What the seeds
say of it, `judging.py` tells. Every worker imports this file: nothing heavy belongs here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["greater", "equivalent"]
Word = Literal["holds", "reversed", "negligible", "undecided"]  # what the seeds may say of one
Tier = Literal["exact", "scaled down", "proxy", "our own"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Arm a is better than arm b by more than δ ("greater"), or within ±δ of it ("equivalent")."""

    kind: Kind
    a: str
    b: str
    margin: float  # δ, in the unit of the metric
    metric: str
    quote: str  # what the paper says, or our own question
    reason: str  # for this margin
    tier: Tier
    mark: str = ""  # where in the digest: "2 §5"
    number: str = ""  # the paper's own number

    def __post_init__(self) -> None:
        check_margin(self.margin)
        if self.kind not in get_args(Kind):
            raise ValueError(f'a claim is "greater" or "equivalent", got {self.kind!r}')
        if self.tier not in get_args(Tier):
            raise ValueError(f"a claim's tier is one of {', '.join(get_args(Tier))}: {self.tier!r}")
        if self.a == self.b:
            raise ValueError(f"a claim compares two arms, got {self.a!r} twice")
        if not (self.quote.strip() and self.reason.strip()):
            raise ValueError(
                f"the claim on {self.a!r} and {self.b!r} needs a quote and a reason for its margin"
            )


def greater(a: str, b: str, margin: float, **words: Any) -> Claim:
    """Claim that arm a is better than arm b by more than `margin`; see `Claim` for the rest."""
    return Claim(kind="greater", a=a, b=b, margin=margin, **words)


def equivalent(a: str, b: str, margin: float, **words: Any) -> Claim:
    """Claim that arms a and b differ by less than `margin` either way."""
    return Claim(kind="equivalent", a=a, b=b, margin=margin, **words)


def word_of(interval: tuple[float, float], margin: float) -> Word:
    """Of "greater", by an interval: above the margin, below its negative, within both, or none."""
    low, high = interval
    if low > margin:
        return "holds"
    if high < -margin:
        return "reversed"
    return "negligible" if max(-low, high) < margin else "undecided"


def check_margin(margin: float) -> None:
    """Refuse what is no smallest effect."""
    if not (isinstance(margin, int | float) and 0 < margin < math.inf):
        raise ValueError(f"the smallest effect that matters must be positive, got {margin!r}")
