"""Numbers, intervals and verdicts as people read them."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

MISSING = "–"
VERDICTS = {"holds": "✓", "reversed": "↓", "negligible": "≈", "undecided": "?"}
THOUSANDS = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")]
BYTES = [(2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")]


def missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def number(value: float | None, form: str = ".3g") -> str:
    """Write a number in a format such as ".1%"; what is missing or not finite becomes a dash."""
    if value is None or missing(value):
        return MISSING
    if form.endswith("d"):
        form = f"{form[:-1]}.{0 if value == int(value) else 1}f"  # means of counts are no counts
    return _minus(format(value, form))


def interval(low: float | None, high: float | None, form: str) -> str:
    """Write an interval; nothing where there is none, as with one seed."""
    return "" if missing(low) or missing(high) else f"{number(low, form)} to {number(high, form)}"


def difference(value: float | None, form: str, *, signed: bool = True) -> str:
    """Write a difference of two metrics: percentages differ by points, with one more digit.

    One without sign is a size that was chosen, such as a margin: 0.01 is "1 point".
    """
    percent = re.fullmatch(r",?\.(\d+)%", form)
    if percent is None or missing(value) or value is None:
        return number(value, f"{'+' if signed else ''}{form}")
    digits = int(percent[1]) + 1
    if signed:
        return _minus(f"{100 * value:+.{digits}f}") + " points"
    size = f"{round(100 * value, digits):g}"
    return f"{size} point" + "s" * (size != "1")


def difference_interval(low: float | None, high: float | None, form: str) -> str:
    """Write the interval of a difference, with its unit once."""
    if missing(low) or missing(high):
        return MISSING
    return f"{difference(low, form).removesuffix(' points')} to {difference(high, form)}"


def unit(largest: float, units: list[tuple[float, str]]) -> tuple[float, str]:
    """The size and the name of the largest unit that is not larger than a number."""
    return next((each for each in units if largest >= each[0]), (1.0, ""))


def quantity(value: float | None, units: list[tuple[float, str]], none: str = "") -> str:
    """Write a count or a number of bytes in three digits: 2.26 M, 11.5 MiB."""
    if value is None or missing(value):
        return MISSING
    size, name = unit(abs(value), units)
    shown = value / size
    digits = 0 if shown >= 100 or size == 1 else 1 if shown >= 10 else 2
    return f"{shown:,.{digits}f} {name or none}".strip()


def duration(seconds: float | None) -> str:
    """Write a time in the two largest units that matter."""
    if seconds is None or missing(seconds):
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60:,} h {minutes % 60:02} min"


def where(machine: Mapping[str, Any]) -> str:
    """Write what a result was measured on."""
    device, cores = machine.get("device", "cpu"), machine.get("cores")
    device = "CPU" if device == "cpu" else str(device)
    return f"{device}, {cores} core{'s' * (cores != 1)}" if cores else device


def when(text: str) -> str:
    """Write a time of ISO 8601."""
    return text.replace("T", " ").replace("+00:00", " UTC")


def plain(value: Any) -> str:
    """Write a setting."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def short(name: str, longest: int = 26) -> str:
    """A name for a legend; tables have all of it."""
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def apart(a: str, b: str) -> tuple[str, str]:
    """Two names "set / method" without the set, where it is the same."""
    (one, slash, first), (other, _, second) = a.partition(" / "), b.partition(" / ")
    return (first, second) if slash and one == other else (a, b)


def sentence(claim: Mapping[str, Any], form: str) -> str:
    """Say in words what was found of a claim."""
    a, b, verdict = claim["a"], claim["b"], claim.get("verdict")
    margin = difference(claim["margin"], form, signed=False)
    better = f"{a} is better than {b} by more than {margin}"
    same = f"{a} and {b} differ by less than {margin} either way"
    if verdict is None or verdict["interval"] is None:
        return f"{a} and {b} share fewer than two seeds: nothing can be said."
    worse = f"{a} is worse than {b} by more than {margin}."
    if verdict["word"] == "undecided":
        if claim["kind"] == "greater" and verdict["interval"][1] < 0:
            return f"{a} is not better than {b}; how much worse it is, these seeds do not tell."
        return f"These seeds do not tell whether {better if claim['kind'] == 'greater' else same}."
    if claim["kind"] == "equivalent" and verdict["word"] == "reversed":
        return f"{better}." if verdict["effect"] > 0 else worse
    if claim["kind"] == "equivalent" or verdict["word"] == "negligible":
        return f"{same}."
    return f"{better}." if verdict["word"] == "holds" else worse


def _minus(text: str) -> str:
    return text.replace("-", "−", 1) if text.startswith("-") else text
