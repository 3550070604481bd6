"""What a result says in plain words: which arm is best, how sure that is, and what it costs.

answers(result)     # {"Best": "top-k: Accuracy …", "How sure": "…", "Cost": "…"}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..models.mixture import DENSE
from ..report import words
from .statistics import paired, t_interval

Result = Mapping[str, Any]
FEW = 4  # arms that are named one by one
COSTS = {
    "flops": ("active FLOPs an example", lambda v: words.quantity(v, words.THOUSANDS)),
    "parameters": ("parameters", lambda v: words.quantity(v, words.THOUSANDS)),
    "memory": ("of memory", lambda v: words.quantity(v, words.BYTES, "B")),
    "seconds": ("a trial", words.duration),
}


def answers(result: Result) -> dict[str, str]:
    """The best arm by the main metric, what is known of the others, and the cost, a text each."""
    main = result["main"]
    way = result["metrics"][main]["better"]
    means = {arm["name"]: arm["metrics"][main]["mean"] for arm in result["arms"]}
    means = {name: mean for name, mean in means.items() if mean is not None}
    if not means:
        return {"Best": "No trial came to an end, so that there is nothing to say."}
    said = {}
    if way and len(means) > 1:
        best = (min if way == "lower" else max)(means, key=lambda name: means[name])
        others = [name for name in means if name != best]
        apart = [name for name in others if told_apart(result, best, name)]
        ahead = "" if apart else "No arm stands out; ahead is "
        said["Best"] = f"{ahead}{_value(result, best)}."
        said["How sure"] = f"{_sure(result, others, apart)} {_claims(result)}".strip()
    else:
        best = next(iter(means)) if len(means) == 1 else None  # no arm is: no cost is that of all
        named = [_value(result, name) for name in list(means)[:FEW]]
        rest = f"; {len(means) - FEW} more below" if len(means) > FEW else ""
        said["Found"] = f"{'; '.join(named)}{rest}."
        said["How sure"] = _claims(result) or f"{_seeds(result)}, and nothing to compare with."
    return said | (_cost(result, best) if best else {})


def _value(result: Result, name: str) -> str:
    """An arm with its main metric and the interval of it."""
    about = result["metrics"][result["main"]]
    found = next(arm for arm in result["arms"] if arm["name"] == name)["metrics"][result["main"]]
    label, comma, over = about["label"].partition(",")  # "Accuracy, mean of two targets"
    spread = words.interval(found.get("low"), found.get("high"), about["format"])
    spread = f" (95\N{NO-BREAK SPACE}% interval {spread})" if spread else ""
    on = f"{comma} on {about['split']} data" if about["split"] else ""
    mean = words.number(found["mean"], about["format"])
    return f"{name}: {label} {mean}{comma}{over}{on}{spread}"


# -- how sure --------------------------------------------------------------------------------------


def told_apart(result: Result, best: str, other: str) -> bool:
    """Whether the interval of their paired difference leaves out zero.

    The best one was chosen by the same numbers, and so the level is shared among all others.
    """
    main = result["main"]
    values = {
        arm["name"]: {int(seed): value for seed, value in arm["metrics"][main]["values"].items()}
        for arm in result["arms"]
    }
    others = max(len(result["arms"]) - 1, 1)
    try:
        differences = paired(values[best], values[other])
        low, high = t_interval(differences, level=1 - 0.05 / others)
    except ValueError:  # fewer than two seeds in common
        return False
    return not low <= 0 <= high


def _sure(result: Result, others: Sequence[str], apart: Sequence[str]) -> str:
    """Which arms the best one can be told from, in the shorter way."""
    equal = [name for name in others if name not in apart]
    if not equal or not apart:
        return f"With {_seeds(result)} it can{'not' * (not apart)} be told from any other arm."
    if len(equal) <= FEW:
        return f"With {_seeds(result)} it cannot be told from {listed(equal)}."
    return f"With {_seeds(result)} it can be told only from {few(apart)}."


def _claims(result: Result) -> str:
    """The verdicts: which arms beat one other where that was the question, else how many."""
    claims, other = result["claims"], reference(result)
    if not claims:
        return ""
    if other is None:
        counted = [c["verdict"]["word"] for c in claims]
        parts = [f"{w} {counted.count(w)}" for w in words.VERDICTS if w in counted]
        return f"Verdicts on {len(claims)} claim{'s' * (len(claims) != 1)}: {', '.join(parts)}."
    by = {w: [c["a"] for c in claims if c["verdict"]["word"] == w] for w in words.VERDICTS}
    form = result["metrics"][result["main"]]["format"]
    margin = listed(sorted({words.difference(c["margin"], form, signed=False) for c in claims}))
    said = f"Shown to be better than {other} by more than {margin}: {few(by['holds']) or 'none'}"
    for word, text in (("reversed", "worse"), ("negligible", "equal within that")):
        said += f"; {text}: {few(by[word])}" if by[word] else ""
    return said + (f"; {len(by['undecided'])} undecided." if by["undecided"] else ".")


def reference(result: Result) -> str | None:
    """The arm that all others were asked to beat; None where the claims ask something else."""
    asked = {(c["b"], c["kind"], c["metric"]) for c in result["claims"]}
    names = {name for name, kind, metric in asked if (kind, metric) == ("greater", result["main"])}
    return names.pop() if len(asked) == len(names) == 1 else None


def _seeds(result: Result) -> str:
    return f"{result['seeds']} seed{'s' * (result['seeds'] != 1)}"


# -- at what cost ----------------------------------------------------------------------------------


def _cost(result: Result, best: str) -> dict[str, str]:
    """What the best arm costs, with the one that was to be beaten in brackets."""
    costs = {arm["name"]: arm["cost"] for arm in result["arms"]}
    name_of = reference(result) or DENSE
    beside = costs.get(name_of) if best != name_of else None
    parts: list[str] = []
    for name, (unit, write) in COSTS.items():
        if costs[best].get(name) is None:
            continue
        other = beside.get(name) if beside else None
        before = "" if parts else f"{name_of}: "
        bracket = "" if other is None else f" ({before}{write(other)})"
        parts.append(f"{write(costs[best][name])}{bracket} {unit}")
    return {"Cost": f"{listed(parts)}."} if parts else {}


def few(names: Sequence[str]) -> str:
    """Some names, or how many there are."""
    return listed(names) if len(names) <= FEW else f"{len(names)} arms"


def listed(names: Sequence[str]) -> str:
    """Names with commas, and "and" before the last."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
