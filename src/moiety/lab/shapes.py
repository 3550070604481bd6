"""The shape of a result file (schema 1) and of what a trial gives to its page: types and ranges.

    check(value, RESULT, "result")     # raises one sentence that says where, or nothing

Every worker imports this file: nothing heavy belongs here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

from .claims import Kind, Tier, Word

Test = Callable[[Any], bool]


class Each:
    """A dict with any text as keys, and one shape of values."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape


class Maybe(Each):
    """A shape, or None."""


class Absent(Each):
    """A shape, of a name that a dict need not have: results of before lack it."""


def number(value: Any) -> bool:
    """a finite number"""
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


def positive(value: Any) -> bool:
    """a positive number"""
    return number(value) and value > 0


def chance(value: Any) -> bool:
    """a number from 0 to 1"""
    return number(value) and 0 <= value <= 1


def count(value: Any) -> bool:
    """an integer from 0 on"""
    return type(value) is int and value >= 0


def one_or_more(value: Any) -> bool:
    """an integer from 1 on"""
    return type(value) is int and value >= 1


def yes_or_no(value: Any) -> bool:
    """true or false"""
    return type(value) is bool


def text(value: Any) -> bool:
    """text"""
    return isinstance(value, str)


def sha256(value: Any) -> bool:
    """64 hexadecimal digits"""
    return text(value) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def plain(value: Any) -> bool:
    """a JSON object"""
    return isinstance(value, dict)


def similarity(value: Any) -> bool:
    """the names of tasks and, in values, a row and a column of finite numbers for each"""
    if not plain(value) or value.keys() != {"tasks", "values"}:
        return False
    tasks, rows = value["tasks"], value["values"]
    if not isinstance(tasks, list) or not isinstance(rows, list) or len(rows) != len(tasks):
        return False
    full = (isinstance(row, list) and len(row) == len(tasks) for row in rows)
    return all(map(text, tasks)) and all(full) and all(number(v) for row in rows for v in row)


def one_of(*words: str) -> Test:
    def test(value: Any) -> bool:
        return value in words

    test.__doc__ = "one of " + ", ".join(repr(word) for word in words)
    return test


def check(value: Any, shape: Any, where: str) -> None:
    """Compare a value with a shape: a dict of names, a list of one shape, or a test."""
    if isinstance(shape, Maybe):
        if value is not None:
            check(value, shape.shape, where)
    elif isinstance(shape, Absent):
        check(value, shape.shape, where)
    elif isinstance(shape, Each):
        check(value, plain, where)
        for name, item in value.items():
            check(item, shape.shape, f"{where}.{name}")
    elif isinstance(shape, dict):
        check(value, plain, where)
        needed = {name for name, inner in shape.items() if not isinstance(inner, Absent)}
        if wrong := (value.keys() - shape.keys()) | (needed - value.keys()):
            raise ValueError(f"{where} has other names than the schema: {', '.join(sorted(wrong))}")
        for name in value:
            check(value[name], shape[name], f"{where}.{name}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, got {value!r:.60}")
        for i, item in enumerate(value):
            check(item, shape[0], f"{where}[{i}]")
    elif not shape(value):
        raise ValueError(f"{where} must be {shape.__doc__}, got {value!r:.60}")


# What a trial may give beside its metrics, in `Running.extra`.
COST = ("flops", "parameters", "memory")
LOADS = Each([number])
TRAJECTORIES = Each({"step": [count], "values": [[number]]})
GATE = {"selected": number, "binary": Maybe(yes_or_no), "binary_step": Maybe(count)}
EXTRA = {
    **dict.fromkeys(COST, Maybe(number)),
    "seconds": number,
    "loads": LOADS,
    "trajectories": TRAJECTORIES,
    "similarity": similarity,
    "gates": Each({**GATE, "weights": [number]}),
}
# Over seeds: means, and the share of seeds whose gate is binary; the weights are of the first one.
GATES = {"selected": number, "binary": Maybe(chance), "binary_step": Maybe(number)}

LOOK = {
    "look": one_or_more,
    "seeds": one_or_more,
    "trials_sha256": sha256,
    "claims_sha256": sha256,
    "when": text,
}
METRIC = {
    "label": text,
    "better": one_of("higher", "lower", ""),
    "format": text,
    "split": one_of("test", "validation", "train", ""),
}
ARM = {
    "name": text,
    "settings": plain,
    "metrics": Each(
        {
            "mean": Maybe(number),
            "low": Maybe(number),
            "high": Maybe(number),
            "n": count,
            "values": Each(number),
        }
    ),
    "examples": Maybe(count),
    "cost": {name: Maybe(number) for name in (*COST, "seconds")},
    "finished": count,
    "failed": count,
}
VERDICT = {
    "word": one_of(*get_args(Word)),
    "effect": Maybe(number),
    "interval": Maybe([number]),
    "seeds": count,
    "p": chance,
    "level": chance,
    "detectable": Maybe(number),
}
CLAIM = {
    "kind": one_of(*get_args(Kind)),
    "a": text,
    "b": text,
    "margin": positive,
    "metric": text,
    "quote": text,
    "mark": text,
    "number": text,
    "reason": text,
    "tier": one_of(*get_args(Tier)),
    "look": one_or_more,
    "differences": [number],
    "a_seeds": count,
    "b_seeds": count,
    "failed": count,
    "verdict": VERDICT,
    "would_change": text,
}
CURVE = {"step": [count], "mean": [number], "low": [Maybe(number)], "high": [Maybe(number)]}
RESULT = {
    "schema": count,
    "study": text,
    "title": text,
    "question": text,
    "notes": [text],
    "paper": text,
    "scale": text,
    "command": text,
    "when": text,
    "machine": {"device": text, "cores": one_or_more, "threads": one_or_more},
    "versions": Each(text),
    "seeds": one_or_more,
    "planned": {
        "seeds": one_or_more,
        "from": one_of("given", "pilot", "scale"),
        "pilot": Absent(one_or_more),
        "asked": Absent(Maybe(one_or_more)),
    },
    "varies": [text],
    "along": Absent(text),
    "deviations": [text],
    "budget": Maybe(plain),
    "spent": Absent(Each({"trials": one_or_more, "seconds": number})),
    "looks": [LOOK],
    "trials_sha256": sha256,
    "main": text,
    "metrics": Each(METRIC),
    "arms": [ARM],
    "claims": [CLAIM],
    "failures": [{"arm": text, "seed": count, "error": text}],
    "tuning": Maybe(plain),
    "curves": Each(Each(CURVE)),
    "loads": Each(LOADS),
    "trajectories": Each(TRAJECTORIES),
    "similarity": Absent(Each(similarity)),
    "gates": Absent(Each(Each({**GATES, "weights": [number]}))),
}
