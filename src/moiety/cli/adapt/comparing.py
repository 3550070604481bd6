"""`moiety adapt --method compare`: what the three arms came to, judged, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from ... import io
from ...report import Column
from ...report.adapt import adapt_page, answers, difference_rows
from .telling import tell_states

if TYPE_CHECKING:
    from ...adapt.asked import Asked
    from ...adapt.command import Opened
    from ...adapt.pretrain import Adapted
    from .telling import Bar

PAGE = "compare.html"
LEAKED = (
    "undecided: all scored examples are also training examples, which tells nothing of new ones; "
    "give others as a test split"
)
DIFFERENCES = [
    Column("arm", "Difference"),
    Column("points", "Points"),
    Column("between", "Interval"),
    Column("said", "Verdict"),
]


def compare(
    asked: Asked,
    opened: Opened,
    adapted: Adapted,
    out: Path,
    bar: Bar,
    save_every: float,
    repeat: str,
) -> dict[str, Any]:
    """Fine-tune all arms, judge them, and write result and page."""
    from ...adapt import comparing
    from ...adapt.command import told
    from ...lab.adapting import judge

    compared = comparing.compare(asked, opened, adapted, out, bar, save_every=save_every)
    said = judge(
        compared.answers,
        compared.labels,
        metric=asked.metric,
        margin=asked.margin,
        silent=LEAKED if compared.leaked else None,
    )
    flops = adapted.flops
    spent = {"fine-tune": 0.0, "further": adapted.stages[0].steps * flops["further"]}
    result = {
        **told(asked, opened, adapted),
        "split": compared.split,
        "labels": compared.examples,
        "scores": compared.scores,
        "moved": compared.distance,
        "spent": {**spent, "self-distill": flops["total"]},
        "judgement": said.plain(),
        "looks": compared.look,
        "repeated": compared.repeated,
        "command": repeat,
    }
    io.write_atomic(out / PAGE, adapt_page(result))
    io.write_json(out / "result.json", result)  # last: all is there
    return result


def tell_judgement(result: dict[str, Any], out: Path, console: Console) -> None:
    """Scores, differences and answers, and where the rest is."""
    from ..demo import show

    judged = result["judgement"]
    rows = [
        {
            **row,
            "points": row["effect"].removesuffix(" points"),
            "between": row["interval"].removesuffix(" points").replace(" to ", "…"),
        }
        for row in difference_rows(result)
    ]
    show(
        console,
        rows,
        DIFFERENCES,
        f"Differences, {judged['seeds']} seeds; intervals that hold together with 95 %",
    )
    for name, text in answers(result).items():
        typer.echo(f"{name}: {text}")
    typer.echo(f"The page: {out / PAGE}; models and classifiers: {out}/ARM/adapted, …/classifier")
    tell_states(out, dict.fromkeys(("pretraining", "fine-tuning"), True))
