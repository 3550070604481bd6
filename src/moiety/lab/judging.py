"""What the seeds say of the claims of a study.

for row, verdict in zip(rows, judge(rows)): ...    # rows as a result file stores its claims
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..report.words import difference
from .statistics import MOST, Evidence, seeds_to_decide, spent, verdicts


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
    row: Mapping[str, Any],
    verdict: Mapping[str, Any],
    *,
    form: str = ".3g",
    claims: int = 1,
    lost: Mapping[str, str] | None = None,
) -> str:
    """Say in one sentence what would change a verdict.

    claims: how many are in the family. lost: arms that were not measured, with the reason.
    """
    reasons = [reason for arm, reason in (lost or {}).items() if arm in (row["a"], row["b"])]
    if reasons:
        return " ".join(reason[:1].upper() + reason[1:] for reason in reasons)
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
