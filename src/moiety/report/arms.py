"""The table of arms: what each reached, with its interval, and what it cost."""

from collections.abc import Callable, Iterable, Mapping
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
    columns = [{"label": "Arm", "note": "", "first": "ascending"}]
    for metric in result["metrics"].values():
        first = "descending" if metric["better"] == "higher" else "ascending"
        columns.append({"label": metric["label"], "note": metric["split"], "first": first})
    for label, note, _, _ in _costs(result):
        columns.append({"label": label, "note": note, "first": "ascending"})
    return [*columns, {"label": "Trials", "note": "finished", "first": "descending"}]


def better(metrics: Iterable[Mapping[str, str]]) -> str:
    """Which way metrics are better, in a sentence."""
    ways: dict[str, list[str]] = {"higher": [], "lower": [], "": []}
    for metric in metrics:
        ways[metric["better"]].append(metric["label"])
    found = [way for way, labels in ways.items() if labels]
    if len(found) == 1 and found != [""]:
        return f"{found[0].capitalize()} is better."
    parts = [f"{way} is better for {' and '.join(ways[way])}" for way in found if way]
    return f"{'; '.join(parts).capitalize()}." if parts else ""


def row(result: Result, arm: Mapping[str, Any]) -> list[Cell]:
    cells: list[Cell] = [{"text": arm["name"], "small": "", "value": arm["name"]}]
    for name in result["metrics"]:
        value, form = arm["metrics"].get(name) or {}, form_of(result, name)
        spread = interval(value.get("low"), value.get("high"), form)
        cells.append(
            {"text": number(value.get("mean"), form), "small": spread}
            | {"value": value.get("mean")}
        )
    for _, _, get, write in _costs(result):
        cells.append({"text": write(get(arm)), "small": "", "value": get(arm)})
    failed = f"{arm['failed']} failed" if arm["failed"] else ""
    return [*cells, {"text": str(arm["finished"]), "small": failed, "value": arm["finished"]}]
