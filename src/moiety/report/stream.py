"""Streams on a page: part of a routing page, or the page of one ledger.

html = stream_page(read_ledger("out/ledger.jsonl"), settings={"learner": "single"}, command="…")
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from .chart import Series, lines
from .page import render
from .table import Column, cells
from .words import THOUSANDS

SPENT = {"train": "training", "validation": "validation", "growth": "growth"}  # words of a ledger


@dataclass(frozen=True)
class StreamPart:
    """A row of sums for each learner, and its errors at t = 1, 2, …"""

    title: str
    summary: str
    rows: Sequence[Mapping[str, Any]]
    columns: Sequence[Column]
    errors: Mapping[str, Sequence[float]]
    notes: Mapping[str, str] = field(default_factory=dict)

    def view(self) -> dict[str, Any]:
        """As the template shows it."""
        body, numeric = cells(self.rows, self.columns)
        series = [Series(arm, range(1, len(y) + 1), y) for arm, y in self.errors.items()]
        return {
            "title": self.title,
            "summary": self.summary,
            "columns": self.columns,
            "body": body,
            "numeric": numeric,
            "notes": self.notes,
            "chart": lines("Error at every arrival", series, across="mega-batches arrived", top=1),
        }


def stream_page(
    ledger: Sequence[Mapping[str, Any]], *, settings: Mapping[str, str], command: str
) -> str:
    """Return a self-contained page of a ledger: error and cost at every time, and their sums.

    A line has `t`, `name`, `rows`, `error` or `perplexity`, `phase`, `trained`, `parameters`,
    `inference_flops`, `flops` and `seconds`, as `moiety anytime` writes them.
    """
    metric = "perplexity" if "perplexity" in ledger[0] else "error"
    form = ".1%" if metric == "error" else ".4g"
    rows = [_row(line, metric) for line in ledger]
    sums, numeric = cells([_sums(ledger, metric)], _sum_columns(metric, form))
    body, numeric_lines = cells(rows, _line_columns(metric, form))
    phases = ledger[-1]["phase"]
    return render(
        "stream.html",
        title=f"A stream, up to t = {ledger[-1]['t']}",
        summary=f"{sum(line['rows'] for line in ledger):,} rows have arrived, and the model has "
        f"been trained {'once' if phases == 1 else f'{phases} times'}. Before the first training "
        "it answers by chance, and that counts.",
        sums={"columns": _sum_columns(metric, form), "body": sums, "numeric": numeric},
        lines={"columns": _line_columns(metric, form), "body": body, "numeric": numeric_lines},
        notes={
            f"{metric.capitalize()}, sum": "over all times, the area under the curve: CER",
            "FLOPs": "counted; training is forward and backward",
            "Mem": "the parameters of the model in force, summed over all times",
        },
        charts=[_scores(ledger, metric), _spending(ledger)],
        settings=settings,
        command=command,
    )


def _sum_columns(metric: str, form: str) -> list[Column]:
    word = metric.capitalize()
    return [
        Column("t", "Mega-batches"),
        Column("sum", f"{word}, sum", ".4g"),
        Column("mean", f"{word}, mean", form),
        Column("end", f"{word}, end", form),
        Column("mem", "Mem", ",d"),
        *(Column(key, f"FLOPs of {name}", ".3g") for key, name in SPENT.items()),
        Column("seconds", "Seconds", ",.1f"),
    ]


def _line_columns(metric: str, form: str) -> list[Column]:
    return [
        Column("t", "t"),
        Column("name", "Mega-batch"),
        Column("rows", "Rows", ",d"),
        Column(metric, metric.capitalize(), form),
        Column("phase", "Training", "d"),
        Column("parameters", "Parameters", ",d"),
        Column("inference_flops", "FLOPs of an answer", ".3g"),
        *(Column(key, f"FLOPs of {name}", ".3g") for key, name in SPENT.items()),
        Column("seconds", "Seconds", ",.1f"),
    ]


def _row(line: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """A line of the ledger as the table shows it; what was not trained has dashes."""
    row = {key: line[key] for key in ("name", "rows", metric, "parameters", "inference_flops")}
    spent = {key: line["flops"][key] if line["trained"] else None for key in SPENT}
    phase = line["phase"] if line["trained"] else None
    row |= {"t": str(line["t"]), "phase": phase, "seconds": sum(line["seconds"].values())}
    return row | spent


def _sums(ledger: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    total = sum(line[metric] for line in ledger)
    return {
        "t": f"{len(ledger):,}",
        "sum": total,
        "mean": total / len(ledger),
        "end": ledger[-1][metric],
        "mem": sum(line["parameters"] for line in ledger),
        **{key: sum(line["flops"][key] for line in ledger) for key in SPENT},
        "seconds": sum(sum(line["seconds"].values()) for line in ledger),
    }


def _scores(ledger: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    times, name = [line["t"] for line in ledger], f"{metric.capitalize()} at every time"
    series = [Series(metric, times, [line[metric] for line in ledger], bold=True)]
    form = ".3g" if metric == "perplexity" else ".0%"
    return {"name": name, "chart": lines(name, series, across="t", form=form)}


def _spending(ledger: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was spent up to every time, in a unit that keeps the numbers short."""
    sums = {key: list(accumulate(line["flops"][key] for line in ledger)) for key in SPENT}
    highest = max(values[-1] for values in sums.values())
    size, unit = next((pair for pair in THOUSANDS if highest >= pair[0]), (1.0, ""))
    times, name = [line["t"] for line in ledger], f"Spent so far, in {unit}FLOPs"
    series = [
        Series(SPENT[key], times, [value / size for value in values], bold=key == "train")
        for key, values in sums.items()
        if values[-1] or key == "train"
    ]
    return {"name": name, "chart": lines(name, series, across="t", form=".3g")}
