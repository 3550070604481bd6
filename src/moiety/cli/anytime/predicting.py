"""`moiety anytime predict`: answer the rows of a file with the newest model of a run."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ...anytime.serving import Predictions


def predict(
    file: Annotated[Path, typer.Argument(help="Table or .npz; it needs no target.")],
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("out/anytime"),
    to: Annotated[
        Path | None, typer.Option(help="Write the answers here, not to the screen.")
    ] = None,
    every_class: Annotated[
        bool, typer.Option("--all", help="A column with the probability of each class, too.")
    ] = False,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda.")] = "cpu",
) -> None:
    """Answer each row of a file with OUT/current: its class and the probability of that, as CSV."""
    from ...anytime.serving import load_current
    from ...io import write_atomic
    from ...train import find_device

    if not file.is_file():
        raise ValueError(f"{file} is no file; give a table or a .npz")
    if to is not None and to.is_dir():
        raise ValueError(f"--to {to} is a folder: give a file, such as {to / 'predictions.csv'}")
    current = load_current(out, device=find_device(device))
    found = current.predict(file)
    text = as_csv(found, every_class)
    if to is None:
        typer.echo(text, nl=False)
    else:
        write_atomic(to, text)
    rows, where = "1 row" if len(found) == 1 else f"{len(found)} rows", f": {to}" if to else ""
    version = f"version {current.card['phase']} (t = {current.card['t']})"
    typer.echo(f"{rows} answered by {version}{where}", err=True)


def as_csv(found: Predictions, every_class: bool) -> str:
    """A line for each row, numbered from 1 as they stand in the file."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    more = [f"p({name})" for name in found.classes] if every_class else []
    table.writerow(["row", "predicted", "probability", *more])
    for number, row in enumerate(found.probabilities.tolist()):
        values = [max(row), *(row if every_class else [])]
        shown = (f"{value:.6g}" for value in values)
        table.writerow([number + 1, found.names[number], *shown])
    return text.getvalue()
