"""What a result file must hold (schema 1): types, ranges, and numbers that follow from each other.

check_result(io.read_json("results/lab-routers.json"))     # raises one sentence, or nothing
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, get_args

from .claims import Kind, Tier
from .judging import judge
from .statistics import Word, paired, t_interval

SCHEMA = 1


def check_result(value: Any) -> None:
    """Raise one sentence that says where a value breaks schema 1."""
    found = value.get("schema") if isinstance(value, dict) else None
    if found != SCHEMA or type(found) is not int:
        raise ValueError(f"a result has schema {SCHEMA}, got {found!r}: run the study again")
    _check(value, RESULT, "result")
    for arm in value["arms"]:
        if arm["metrics"].keys() != value["metrics"].keys():
            raise ValueError(f"arm {arm['name']!r} must have the metrics of the result")
        for name, summary in arm["metrics"].items():
            _check_summary(summary, f"{name} of {arm['name']}")
    _check_claims(value)
    if value["main"] not in value["metrics"]:
        raise ValueError(f"main is {value['main']!r}, which is none of the metrics")


# -- types and ranges ------------------------------------------------------------------------------

Test = Callable[[Any], bool]


class Each:
    """A dict with any text as keys, and one shape of values."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape


class Maybe(Each):
    """A shape, or None."""


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


def text(value: Any) -> bool:
    """text"""
    return isinstance(value, str)


def sha256(value: Any) -> bool:
    """64 hexadecimal digits"""
    return text(value) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def plain(value: Any) -> bool:
    """a JSON object"""
    return isinstance(value, dict)


def one_of(*words: str) -> Test:
    def test(value: Any) -> bool:
        return value in words

    test.__doc__ = "one of " + ", ".join(repr(word) for word in words)
    return test


def _check(value: Any, shape: Any, where: str) -> None:
    """Compare a value with a shape: a dict of names, a list of one shape, or a test."""
    if isinstance(shape, Maybe):
        if value is not None:
            _check(value, shape.shape, where)
    elif isinstance(shape, Each):
        _check(value, plain, where)
        for name, item in value.items():
            _check(item, shape.shape, f"{where}.{name}")
    elif isinstance(shape, dict):
        _check(value, plain, where)
        if value.keys() != shape.keys():
            wrong = ", ".join(sorted(value.keys() ^ shape.keys()))
            raise ValueError(f"{where} has other names than the schema: {wrong}")
        for name, inner in shape.items():
            _check(value[name], inner, f"{where}.{name}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, got {value!r:.60}")
        for i, item in enumerate(value):
            _check(item, shape[0], f"{where}[{i}]")
    elif not shape(value):
        raise ValueError(f"{where} must be {shape.__doc__}, got {value!r:.60}")


LOOK = {"look": one_or_more, "seeds": one_or_more, "trials_sha256": sha256, "when": text}
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
    "cost": {name: Maybe(number) for name in ("flops", "parameters", "memory", "seconds")},
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
    "planned": {"seeds": one_or_more, "from": one_of("given", "pilot", "scale")},
    "varies": [text],
    "deviations": [text],
    "budget": Maybe(plain),
    "looks": [LOOK],
    "trials_sha256": sha256,
    "main": text,
    "metrics": Each(METRIC),
    "arms": [ARM],
    "claims": [CLAIM],
    "failures": [{"arm": text, "seed": count, "error": text}],
    "tuning": Maybe(plain),
    "curves": Each(Each(CURVE)),
    "loads": Each(Each([number])),
    "trajectories": Each(Each({"step": [count], "values": [[number]]})),
}


# -- numbers that follow from each other -----------------------------------------------------------


def _check_summary(summary: Mapping[str, Any], where: str) -> None:
    """The mean and the interval of an arm are those of its values."""
    values = list(summary["values"].values())
    mean = fmean(values) if values else None
    low, high = t_interval(values) if len(values) > 1 else (None, None)
    for name, right in (("n", len(values)), ("mean", mean), ("low", low), ("high", high)):
        _same(summary[name], right, f"{name} of {where}")


def _check_claims(result: Mapping[str, Any]) -> None:
    """Differences are those of the arms, and verdicts those of the differences."""
    arms = {arm["name"]: arm["metrics"] for arm in result["arms"]}
    looks = {look["trials_sha256"]: look["look"] for look in result["looks"]}
    for claim in result["claims"]:
        where = f"the claim on {claim['a']} and {claim['b']}"
        for arm in (claim["a"], claim["b"]):
            if arm not in arms:
                raise ValueError(f"{where} names an arm that is not there: {arm!r}")
        if claim["metric"] not in result["metrics"]:
            raise ValueError(f"{where} names a metric that is not there: {claim['metric']!r}")
        a, b = (arms[claim[arm]][claim["metric"]]["values"] for arm in ("a", "b"))
        if result["metrics"][claim["metric"]]["better"] == "lower":
            a, b = b, a
        right = paired({int(k): v for k, v in a.items()}, {int(k): v for k, v in b.items()})
        _same(claim["differences"], right, f"differences of {where}")
        _same(claim["look"], looks.get(result["trials_sha256"]), f"look of {where}")
    for claim, verdict in zip(result["claims"], judge(result["claims"])):
        for name, right in verdict.items():
            where = f"{name} of the verdict on {claim['a']} and {claim['b']}"
            _same(claim["verdict"][name], right, where)


def _same(value: Any, right: Any, where: str) -> None:
    """Raise where a stored value is not what its parts give, rounding aside."""
    if isinstance(right, list) and isinstance(value, list) and len(value) == len(right):
        for one, other in zip(value, right):
            _same(one, other, where)
        return
    close = number(value) and number(right) and math.isclose(value, right, abs_tol=1e-12)
    if not close and value != right:
        raise ValueError(f"{where} is {value!r:.60}, and follows as {right!r:.60}")
