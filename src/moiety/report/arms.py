"""The table of arms: what each reached, with its interval, and what it cost."""

from collections.abc import Callable, Mapping
from typing import Any

from .figures import form_of
from .words import BYTES, THOUSANDS, duration, interval, missing, number, quantity

Result = Mapping[str, Any]
Cell = dict[str, Any]  # the text, a smaller one below it, and what it is sorted by
COSTS: list[tuple[str, str, Callable[[Mapping[str, Any]], Any], Callable[[Any], str]]] = [
    (
        "Active FLOPs",
        "per example",
        lambda a: a["cost"].get("flops"),
        lambda v: quantity(v, THOUSANDS),
    ),
    ("Parameters", "", lambda a: a["cost"].get("parameters"), lambda v: quantity(v, THOUSANDS)),
    ("Memory", "", lambda a: a["cost"].get("memory"), lambda v: quantity(v, BYTES, "B")),
    ("Examples", "seen", lambda a: a.get("examples"), lambda v: number(v, ",d")),
    ("Time", "of a trial", lambda a: a["cost"].get("seconds"), duration),
]


def _costs(result: Result) -> list[Any]:
    """The columns that at least one arm has a number for."""
    return [cost for cost in COSTS if any(not missing(cost[2](arm)) for arm in result["arms"])]


def columns(result: Result) -> list[dict[str, str]]:
    """The headings: the main metric and the costs are in sight first, other metrics follow."""
    heads = [{"label": "Arm", "note": "", "first": "ascending"}]
    main, *others = [_metric(result["metrics"][name]) for name in _metrics(result)]
    costs = [
        {"label": label, "note": note, "first": "ascending"} for label, note, *_ in _costs(result)
    ]
    trials = {"label": "Trials", "note": "finished", "first": "descending"}
    return [*heads, main, *costs, *others, trials]


def _metric(metric: Mapping[str, str]) -> dict[str, str]:
    way = {"higher": "", "lower": "lower is better", "": "for information"}[metric["better"]]
    first = "descending" if metric["better"] == "higher" else "ascending"
    note = ", ".join(filter(None, (metric["split"], way)))
    return {"label": metric["label"], "note": note, "first": first}


def _metrics(result: Result) -> list[str]:
    """The names of the metrics, the main one first."""
    return sorted(result["metrics"], key=lambda name: name != result["main"])


def row(result: Result, arm: Mapping[str, Any]) -> list[Cell]:
    """The cells of an arm, as `columns` has them."""
    main, *others = [_reached(result, arm, name) for name in _metrics(result)]
    costs = [
        {"text": write(get(arm)), "small": "", "value": get(arm)}
        for _, _, get, write in _costs(result)
    ]
    name = {"text": arm["name"], "small": "", "value": arm["name"]}
    failed = f"{arm['failed']} failed" if arm["failed"] else ""
    trials = {"text": str(arm["finished"]), "small": failed, "value": arm["finished"]}
    return [name, main, *costs, *others, trials]


def _reached(result: Result, arm: Mapping[str, Any], name: str) -> Cell:
    value, form = arm["metrics"].get(name) or {}, form_of(result, name)
    spread = interval(value.get("low"), value.get("high"), form)
    mean = value.get("mean")
    return {"text": number(mean, form), "small": spread, "value": mean}
