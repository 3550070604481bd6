"""What a result file must hold (schema 1): types, ranges, and numbers that follow from each other.

result = read_result("results/lab-routers.json")     # or one sentence that says what is wrong
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from .. import io
from .judging import judge
from .looks import claims_sha256
from .shapes import RESULT, check, number
from .statistics import paired, t_interval

SCHEMA = 1


def read_result(path: str | Path) -> dict[str, Any]:
    """Read a result file and check it; the sentence names the file."""
    result = io.read_json(path)
    try:
        check_result(result)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return result


def check_result(value: Any) -> None:
    """Raise one sentence that says where a value breaks schema 1."""
    found = value.get("schema") if isinstance(value, dict) else None
    if found != SCHEMA or type(found) is not int:
        raise ValueError(f"a result has schema {SCHEMA}, got {found!r}: run the study again")
    check(value, RESULT, "result")
    for arm in value["arms"]:
        if arm["metrics"].keys() != value["metrics"].keys():
            raise ValueError(f"arm {arm['name']!r} must have the metrics of the result")
        for name, summary in arm["metrics"].items():
            _check_summary(summary, f"{name} of {arm['name']}")
    _check_claims(value)
    if value["main"] not in value["metrics"]:
        raise ValueError(f"main is {value['main']!r}, which is none of the metrics")


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
    for claim in result["claims"]:
        _same(claim["look"], _look(result), f"look of the claim on {claim['a']} and {claim['b']}")
    for claim, verdict in zip(result["claims"], judge(result["claims"])):
        for name, right in verdict.items():
            where = f"{name} of the verdict on {claim['a']} and {claim['b']}"
            _same(claim["verdict"][name], right, where)


def _look(result: Mapping[str, Any]) -> int | None:
    """The number of the look at these trials by these claims."""
    hashes = {"trials_sha256": result["trials_sha256"]}
    hashes["claims_sha256"] = claims_sha256(result["claims"], result["metrics"])
    return next((each["look"] for each in result["looks"] if hashes.items() <= each.items()), None)


def _same(value: Any, right: Any, where: str) -> None:
    """Raise where a stored value is not what its parts give, rounding aside."""
    if isinstance(right, list) and isinstance(value, list) and len(value) == len(right):
        for one, other in zip(value, right):
            _same(one, other, where)
        return
    close = number(value) and number(right) and math.isclose(value, right, abs_tol=1e-12)
    if not close and value != right:
        raise ValueError(f"{where} is {value!r:.60}, and follows as {right!r:.60}")
