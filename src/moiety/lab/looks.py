"""Looks: each time that verdicts were computed, by hashes of what was looked at.

    number, looks = next_look(looks, seeds, trials_sha256="…", claims_sha256="…")

The first look at a study spends most of its level, and each further one less (`statistics.spent`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any


def next_look(
    looks: Sequence[Mapping[str, Any]], seeds: int, **hashes: str
) -> tuple[int, list[dict[str, Any]]]:
    """The number of the look at these trials by these claims, and all looks with it.

    What was looked at before keeps its number. Any other trials, more seeds or fewer or changed
    settings, and any other claims, such as a margin that was changed when results were known, are
    one look more, which `statistics.spent` makes pay; only the very first is the first.
    """
    taken = [dict(look) for look in looks]
    for look in taken:
        if hashes.items() <= look.items():
            return look["look"], taken
    number = 1 + max((look["look"] for look in taken), default=0)
    return number, [*taken, {"look": number, "seeds": seeds, **hashes, "when": now()}]


def trials_sha256(records: Mapping[str, Mapping[str, Any]]) -> str:
    """A hash of what the trials say: keys (which hold all settings) and metrics, in any order."""
    said = sorted((key, record["metrics"]) for key, record in records.items())
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def claims_sha256(rows: Iterable[Mapping[str, Any]], metrics: Mapping[str, Any]) -> str:
    """A hash of what is tested: arms, metrics with their direction, and margins; not the words."""
    said = sorted(
        (row["kind"], row["a"], row["b"], row["metric"], better, float(row["margin"]))
        for row in rows
        for better in [metrics[row["metric"]]["better"]]
    )
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def now() -> str:
    """The time, as all files of a run write it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")
