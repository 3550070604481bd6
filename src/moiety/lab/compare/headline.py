"""What a comparison found, in a sentence: the best arm, its equals, and whether any beats dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...models.mixture import DENSE
from ...report import words
from ..statistics import paired, t_interval


def headline(result: Mapping[str, Any]) -> str:
    """Say which arm is best, which cannot be told from it, and which beat dense."""
    main = result["main"]
    about = result["metrics"][main]
    means = {arm["name"]: arm["metrics"][main]["mean"] for arm in result["arms"]}
    means = {name: mean for name, mean in means.items() if mean is not None}
    if not means:
        return "No trial came to an end, so that there is nothing to say."
    best = (min if about["better"] == "lower" else max)(means, key=lambda name: means[name])
    label, comma, over = about["label"].partition(",")
    value = f"{label} {words.number(means[best], about['format'])}{comma}{over}"
    others = [name for name in means if name != best]
    equal = [name for name in others if not told_apart(result, best, name)]
    seeds = f"{result['seeds']} seeds"
    if others and equal == others:
        said = f"No arm stands out: {best} is ahead ({value}), but none can be told from it with "
        said += seeds
    else:
        said = f"Best is {best} ({value}, on test data)"
        if equal:
            said += f"; {listed(equal)} cannot be told from it with {seeds}"
    return f"{said}. {beside_dense(result)}".strip()


def told_apart(result: Mapping[str, Any], best: str, other: str) -> bool:
    """Whether the interval of their paired difference leaves out zero.

    The best one was chosen by the same numbers, and so the level is shared among all others.
    """
    main = result["main"]
    values = {
        arm["name"]: {int(seed): value for seed, value in arm["metrics"][main]["values"].items()}
        for arm in result["arms"]
    }
    try:
        differences = paired(values[best], values[other])
    except ValueError:  # fewer than two seeds in common
        return False
    others = max(len(result["arms"]) - 1, 1)
    low, high = t_interval(differences, level=1 - 0.05 / others)
    return not low <= 0 <= high


def beside_dense(result: Mapping[str, Any]) -> str:
    """Say which routers beat dense by more than the margin, by the study's own verdicts."""
    claims = [claim for claim in result["claims"] if claim["b"] == DENSE]
    if not claims:
        return ""
    found = {claim["a"]: (claim["verdict"] or {}).get("word", "undecided") for claim in claims}
    by = {
        word: [arm for arm, said in found.items() if said == word]
        for word in ("holds", "reversed", "negligible", "undecided")
    }
    margin = f"{claims[0]['margin']:g}"
    if result["metrics"][result["main"]]["format"].endswith("%"):
        points = 100 * claims[0]["margin"]
        margin = f"{points:g} point" + "s" * (points != 1)
    if by["holds"]:
        return f"Better than dense by more than {margin}: {listed(by['holds'])}."
    said = f"No router is shown to beat dense by more than {margin}"
    if by["reversed"]:
        said += f"; {listed(by['reversed'])} lost by more than that"
    if by["negligible"]:
        said += f"; within it: {listed(by['negligible'])}"
    if by["undecided"]:
        said += f"; undecided: {listed(by['undecided'])}"
    return said + "."


def listed(names: list[str]) -> str:
    """Names with commas, and "and" before the last."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
