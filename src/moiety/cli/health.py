"""`moiety health`: one page of what the experts of a model do on some data."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from ..io import write_json
from ..train import find_device, seeded
from ..watch import watch
from .demo import check_writable

if TYPE_CHECKING:  # transformers takes seconds to load: a verb that does not need it must not wait
    from ..hf.examples import Input
    from ..hf.health import Health


def command(
    model: Annotated[str, typer.Option(help="Folder of a saved model, or its id on the hub.")],
    data: Annotated[
        Path,
        typer.Option(help=".txt, .jsonl, .csv, .tsv, .parquet; .npy or .npz with uint8 images."),
    ],
    column: Annotated[str, typer.Option(help="Column or array of the examples.")] = "text",
    limit: Annotated[int, typer.Option(min=1, help="Examples, from the first on.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples of a batch.")] = 8,
    max_length: Annotated[int, typer.Option(min=1, help="Tokens of an example.")] = 256,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Of routers that draw lots.")] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder of health.html and health.json, or an .html file.")
    ] = Path("out/health"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run only.")] = False,
) -> None:
    """Show on one page what the experts of a model do: balance, dead experts, padding, tokens."""
    from ..hf.examples import prepare, read
    from ..hf.loading import load_any

    where, console = find_device(device), Console()
    page = out if out.suffix == ".html" else out / "health.html"
    kind, rows = read(data, column=column, limit=limit)
    loaded = load_any(model)
    refuse_dense(loaded, model)
    given = prepare(loaded, model, kind, rows, batch_size, max_length)
    if dry_run:
        typer.echo(f"{model} on {len(given.examples)} examples in {len(given)} batches, {device}")
        show_layers(loaded, given)
        return
    check_writable(page.parent)  # not before: a folder that is made stays
    with seeded(seed, where):
        health = run(loaded.to(where), given, console)
    settings = {
        "Model": model,
        "Data": f"{data}, {len(given.examples)} examples in batches of {batch_size}",
        "Input": given.says(),
        "Device": device,
        "Seed": str(seed),
    }
    repeat = ["--model", model, "--data", data, "--column", column, "--limit", limit]
    repeat += ["--batch-size", batch_size, "--max-length", max_length, "--device", device]
    again = f"moiety health {shlex.join(map(str, [*repeat, '--seed', seed]))}"
    title = f"Routing health of {Path(model).resolve().name}"
    tell(console, health)
    write_json(page.with_suffix(".json"), {**health.as_dict(), "settings": settings})
    typer.echo(f"The page: {health.page(page, title=title, settings=settings, command=again)}")


def refuse_dense(model: nn.Module, name: str) -> None:
    """Raise for a model without experts."""
    try:
        with watch(model):
            pass
    except ValueError as error:
        raise ValueError(f"{name} holds nothing to look at: {error}") from None


def show_layers(model: nn.Module, given: Input) -> None:
    """Name the layers and their experts, as one example finds them."""
    from ..hf.health import measure

    first = {word: value[:1] for word, value in next(iter(given)).items()}
    for layer in measure(model, [first]).layers:
        typer.echo(f"  {layer.name}: {layer.experts} experts")


def run(model: nn.Module, given: Input, console: Console) -> Health:
    """Measure, with a progress bar."""
    from ..hf.health import measure

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("batches", total=len(given))
        tick = lambda number: progress.update(task, completed=number)  # noqa: E731
        return measure(model, given, tokenizer=given.tokenizer, progress=tick)


def tell(console: Console, health: Health) -> None:
    """Print the figures of every layer and the findings."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("Layer", overflow="fold")
    for heading in ("Effective", "Largest\nload", "Gate\nentropy", "Dead", "Dropped", "Padding"):
        table.add_column(heading, justify="right")
    for layer in health.layers:
        table.add_row(
            layer.name,
            f"{layer.effective:.1f} of {layer.experts}",
            f"{layer.peak:.1f}×",
            "–" if layer.entropy is None else f"{layer.entropy:.2f}",
            str(len(layer.dead)),
            f"{layer.drop_rate:.1%}",
            f"{layer.padding.share:.1%}",
        )
    console.print(table)
    for finding in health.findings:
        typer.echo(f"- {finding.layer}: {finding.text}.")
    if not health.findings:
        typer.echo("No problem found.")
