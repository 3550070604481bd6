"""The gates of several tasks over seeds, for the page: from what trials told in `Running.extra`.

mean_similarity(records)     # {"tasks": [...], "values": [[...], ...]}: means over seeds
mean_gates(records)          # {task: {"selected", "binary", "binary_step", "weights"}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

WEIGHED = 16  # tasks whose weights are kept; a result file stays small
Record = Mapping[str, Any]


def mean_similarity(records: Sequence[Record]) -> dict[str, Any]:
    """The mean over seeds of the similarity of every pair of tasks.

    A mean makes sense though experts have other numbers in other seeds: how alike two gates are
    does not depend on the numbers.
    """
    found = [record["extra"].get("similarity") for record in records]
    told = [each for each in found if each and each["tasks"]]
    if not told:
        return {}
    same = [each["values"] for each in told if each["tasks"] == told[0]["tasks"]]
    values = np.mean(np.array(same, dtype=np.float64), 0).round(3)
    return {"tasks": told[0]["tasks"], "values": values.tolist()}


def mean_gates(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Each task's gate over seeds: experts selected, whether and when it became binary.

    The weights are those of the first seed: a mean over seeds would mix different experts.
    """
    told = [record["extra"]["gates"] for record in records if record["extra"].get("gates")]
    tasks = list(told[0]) if told else []
    return {
        task: _gate([gates[task] for gates in told if task in gates], place < WEIGHED)
        for place, task in enumerate(tasks)
    }


def _gate(seeds: Sequence[Mapping[str, Any]], weighed: bool) -> dict[str, Any]:
    binary = [float(gate["binary"]) for gate in seeds if gate["binary"] is not None]
    steps = [gate["binary_step"] for gate in seeds if gate["binary_step"] is not None]
    return {
        "selected": round(fmean(gate["selected"] for gate in seeds), 3),
        "binary": fmean(binary) if binary else None,
        "binary_step": round(fmean(steps), 1) if steps else None,
        "weights": [round(weight, 4) for weight in seeds[0]["weights"]] if weighed else [],
    }
