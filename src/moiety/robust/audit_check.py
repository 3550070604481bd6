"""What the result of an audit must hold (schema 1): types, ranges, lengths, and what follows.

check_audit(json.loads(Path("audit.json").read_text()))     # nothing, or one sentence
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Test = Callable[[Any], bool]


def number(value: Any) -> bool:
    """a finite number"""
    return isinstance(value, (int, float)) and type(value) is not bool and math.isfinite(value)


def share(value: Any) -> bool:
    """a number from 0 to 1"""
    return number(value) and -1e-9 <= value <= 1 + 1e-9


def count(value: Any) -> bool:
    """a whole number from 0 on"""
    return type(value) is int and value >= 0


def positive(value: Any) -> bool:
    """a number from 0 on"""
    return number(value) and value >= 0


def text(value: Any) -> bool:
    """a text"""
    return isinstance(value, str)


def flag(value: Any) -> bool:
    """true or false"""
    return isinstance(value, bool)


def anything(value: Any) -> bool:
    """anything"""
    return True


class Maybe:
    """A shape, or None."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape


class Each(Maybe):
    """A dict with any names, and one shape of values."""


ERRORS = {"error": [share], "low": [share], "high": [share]}
USE = {"load": [share], "dropped": share, "dead": [count]}
SPREAD = {"median": Maybe(number), "max": Maybe(number)}
FROZEN = {"error": [share], "input": [Maybe(number)], "routes": [Maybe(number)]}
RESULT: dict[str, Any] = {
    "schema": count,
    "kind": text,
    "command": text,
    "when": text,
    "machine": {"device": text, "cores": count, "threads": count},
    "versions": Each(text),
    "model": {"name": text, "parameters": count, "flops": Maybe(positive), "layers": [text]},
    "data": {"name": text, "examples": count, "classes": count},
    "threat": {
        "norm": text,
        "bounds": Maybe([number]),
        "group": count,
        "label": text,
        "coupled": Maybe(text),
    },
    "eps": [positive],
    "seed": number,
    "clean": {"error": share, "loss": Maybe(number)},
    "attacks": Each(
        {
            "settings": Each(anything),
            **ERRORS,
            "loss": [Maybe(number)],
            "changed": [share],
            "seconds": positive,
        }
    ),
    "union": {**ERRORS, "of": [text]},
    "routing": Maybe(
        Each(
            {
                "experts": count,
                "clean": USE,
                "attacks": Each(
                    {
                        "change": [Maybe(share)],
                        "load": [[share]],
                        "dropped": [share],
                        "dead": [[count]],
                    }
                ),
            }
        )
    ),
    "noise": {"error": share, "change": Each(Maybe(share))},
    "attribution": Maybe(
        {
            "attack": text,
            "eps": [positive],
            "total": [Maybe(number)],
            "input": [Maybe(number)],
            "routes": [Maybe(number)],
            "frozen": {"choices": FROZEN, "weights": FROZEN},
        }
    ),
    "masking": {
        "flagged": flag,
        "reasons": [text],
        "random": Maybe(share),
        "transfer": Maybe(share),
        "strongest": Maybe(share),
        "examples": count,
        "eps": positive,
    },
    "lipschitz": Maybe(
        {"end_to_end": SPREAD, "layers": Each({**SPREAD, "jump": Maybe(number)})},
    ),
}


def check_audit(value: Any) -> None:
    """Raise one sentence that says where a value breaks schema 1."""
    found = value.get("schema") if isinstance(value, dict) else None
    if found != 1 or type(found) is not int:
        raise ValueError(f"an audit has schema 1, got {found!r}: run the audit again")
    _check(value, RESULT, "audit")
    many = len(value["eps"])
    for name, attack in {**value["attacks"], "union": value["union"]}.items():
        for word in ("error", "low", "high", "loss", "changed"):
            if word in attack and len(attack[word]) != many:
                raise ValueError(f"{word} of {name} must have a number for each of {many} eps")
        for low, error, high in zip(attack["low"], attack["error"], attack["high"]):
            if not low <= error <= high:
                raise ValueError(f"the error {error} of {name} is outside [{low}, {high}]")
    _check_union(value)
    _check_parts(value["attribution"])


def _check_union(value: dict[str, Any]) -> None:
    """All attacks together are never weaker than one."""
    for name, attack in value["attacks"].items():
        for one, all_ in zip(attack["error"], value["union"]["error"]):
            if one > all_ + 1e-9:
                raise ValueError(f"the union has error {all_}, less than {one} of {name} alone")


def _check_parts(found: dict[str, Any] | None) -> None:
    for total, *parts in zip(*(found[w] for w in ("total", "input", "routes"))) if found else ():
        if total is not None and not math.isclose(sum(parts), total, abs_tol=1e-9, rel_tol=1e-9):
            raise ValueError(f"the parts {parts} of an attribution must sum to {total}")


def _check(value: Any, shape: Any, where: str) -> None:
    if isinstance(shape, Each):
        _is(value, dict, where)
        for name, each in value.items():
            _check(each, shape.shape, f"{where}[{name!r}]")
    elif isinstance(shape, Maybe):
        if value is not None:
            _check(value, shape.shape, where)
    elif isinstance(shape, dict):
        _is(value, dict, where)
        for name, each in shape.items():
            if name not in value:
                raise ValueError(f"{where} has no {name!r}")
            _check(value[name], each, f"{where}[{name!r}]")
    elif isinstance(shape, list):
        _is(value, list, where)
        for place, each in enumerate(value):
            _check(each, shape[0], f"{where}[{place}]")
    elif not shape(value):
        raise ValueError(f"{where} must be {shape.__doc__}, got {value!r:.60}")


def _is(value: Any, kind: type, where: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{where} must be a {kind.__name__}, got {value!r:.60}")
