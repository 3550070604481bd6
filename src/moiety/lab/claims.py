"""What a study claims, written before its results, and what the seeds say of it.

    greater("dselect-k", "top-k", margin=0.005, metric="accuracy", quote="over 1 point better",
            mark="2 §5", number="> 0.01", reason="half of what is reported", tier="scaled down")

A claim has a margin δ, the smallest difference that matters, and the reason for it. `judge` gives
the verdicts on claims with their differences, as a result file stores them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ..report.words import difference
from .statistics import MOST, Evidence, Kind, check_margin, seeds_to_decide, spent, verdicts

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


def judge(rows: Sequence[Mapping[str, Any]], untested: int = 0) -> list[dict[str, Any]]:
    """The verdicts on rows with kind, differences, margin and look, corrected as one family.

    untested: further claims of the family that have no differences yet. A row with fewer than two
    differences is undecided, with None for what needs two. It counts in the family too, so that a
    verdict never weakens because another study of the paper was run.
    """
    family = {
        i: Evidence(row["kind"], row["differences"], row["margin"], row["look"])
        for i, row in enumerate(rows)
        if len(row["differences"]) > 1
    }
    said = verdicts(list(family.values()), untested=untested + len(rows) - len(family))
    by_row = {i: asdict(verdict) for i, verdict in zip(family, said)}
    return [
        {**by_row[i], "interval": list(by_row[i]["interval"])} if i in by_row else _unable(row)
        for i, row in enumerate(rows)
    ]


def _unable(row: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on a claim with fewer than two differences."""
    differences = row["differences"]
    return {
        "word": "undecided",
        "effect": differences[0] if differences else None,
        "interval": None,
        "seeds": len(differences),
        "p": 1.0,
        "level": spent(row["look"]),
        "detectable": None,
    }


def would_change(
    row: Mapping[str, Any], verdict: Mapping[str, Any], *, form: str = ".3g", claims: int = 1
) -> str:
    """Say in one sentence what would change a verdict; claims: how many are in the family."""
    a, b, margin = row["a"], row["b"], difference(row["margin"], form, signed=False)
    if verdict["word"] == "undecided":
        return _would_decide(row, margin, claims)
    if verdict["word"] == "negligible":
        ends = difference(max(map(abs, verdict["interval"])), form, signed=False)
        return (
            f"Seeds in which {a} and {b} differ by {margin} or more, or a smallest effect below "
            f"{ends}, declared before a new run."
        )
    if row["kind"] == "equivalent":
        how = "or more" if verdict["word"] == "holds" else "or less"
        return f"Seeds in which {a} and {b} differ by {margin} {how}."
    first, second = (a, b) if verdict["word"] == "holds" else (b, a)
    return f"Seeds in which {first} is better than {second} by {margin} or less."


def _would_decide(row: Mapping[str, Any], margin: str, claims: int) -> str:
    """Say how many seeds would decide a claim, at the next look and with its correction."""
    if len(row["differences"]) < 2:
        return f"Two seeds or more that {row['a']} and {row['b']} both finish."
    level = spent(row["look"] + 1) / claims
    seeds = seeds_to_decide(row["differences"], row["margin"], level)
    if seeds is None:
        return (
            f"A difference further from the smallest effect of {margin}: as it is, more than "
            f"{MOST} seeds would be needed."
        )
    return f"About {seeds} seeds would decide it, if effect and spread stay."
