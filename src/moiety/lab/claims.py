"""What a study claims, written before its results: a statement, a margin, and the reason for it.

greater("dselect-k", "top-k", margin=0.005, metric="accuracy", quote="over 1 point better",
        mark="2 §5", number="> 0.01", reason="half of what is reported", tier="scaled down")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .statistics import Kind, _check_margin

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
        _check_margin(self.margin)


def greater(a: str, b: str, margin: float, **words: Any) -> Claim:
    """Claim that arm a is better than arm b by more than `margin`; see `Claim` for the rest."""
    return Claim(kind="greater", a=a, b=b, margin=margin, **words)


def equivalent(a: str, b: str, margin: float, **words: Any) -> Claim:
    """Claim that arms a and b differ by less than `margin` either way."""
    return Claim(kind="equivalent", a=a, b=b, margin=margin, **words)
