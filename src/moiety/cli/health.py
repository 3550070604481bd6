"""`moiety health`: one page of what the experts of a model do on some data."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from ..hf.examples import id_batches, image_batches, read, tokenise
from ..hf.health import Health, measure
from ..hf.loading import load_any, load_image_processor, load_tokenizer
from ..io import write_json
from ..report import Column
from ..train import find_device, seeded
from ..watch import watch
from .demo import check_writable, show

TABLE = [
    Column("arm", "Layer"),
    Column("experts", "Experts"),
    Column("effective", "Effective", ".2f"),
    Column("peak", "Largest load", ".2f"),
    Column("entropy", "Gate entropy", ".2f"),
    Column("dead", "Dead"),
    Column("dropped", "Dropped", ".1%"),
    Column("padding", "Padding", ".1%"),
]


@dataclass(frozen=True)
class Input:
    """Everything the model is to be given."""

    examples: Any
    batch_size: int
    tokenizer: Any = None
    processor: Any = None
    pixels: int | None = None  # side of an image, where no processor knows it
    pad: int = 0
    side: str = "right"

    @property
    def images(self) -> bool:
        return not isinstance(self.examples, list)

    def __len__(self) -> int:
        return -(-len(self.examples) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if self.images:
            words = {"processor": self.processor, "pixels": self.pixels}
            return image_batches(self.examples, self.batch_size, **words)
        return id_batches(self.examples, self.batch_size, pad=self.pad, side=self.side)


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
    where, console = find_device(device), Console()
    page = out if out.suffix == ".html" else out / "health.html"
    if not dry_run:
        check_writable(page.parent)
    kind, rows = read(data, column=column, limit=limit)
    loaded = load_any(model)
    refuse_dense(loaded, model)
    given = prepare(loaded, model, kind, rows, batch_size, max_length)
    if dry_run:
        typer.echo(f"{model} on {len(given.examples)} examples in {len(given)} batches, {device}")
        first = measure(loaded, [{k: v[:1] for k, v in next(iter(given)).items()}])
        for layer in first.layers:
            typer.echo(f"  {layer.name}: {layer.experts} experts")
        return
    with seeded(seed, where):
        health = run(loaded.to(where), given, console)
    settings = {
        "Model": model,
        "Data": f"{data}, {len(given.examples)} examples in batches of {batch_size}",
        "Padding": "none: images" if given.images else f"token {given.pad}, on the {given.side}",
        "Device": device,
        "Seed": str(seed),
    }
    if given.images and given.processor is None:
        settings["Images"] = "scaled to −1…1: the model brings no image processor"
    repeat = ["--model", model, "--data", data, "--column", column, "--limit", limit]
    repeat += ["--batch-size", batch_size, "--max-length", max_length, "--device", device]
    command = f"moiety health {shlex.join(map(str, [*repeat, '--seed', seed]))}"
    title = f"Routing health of {Path(model).name}"
    tell(console, health)
    write_json(page.with_suffix(".json"), {**health.as_dict(), "settings": settings})
    typer.echo(f"The page: {health.page(page, title=title, settings=settings, command=command)}")


def refuse_dense(model: nn.Module, name: str) -> None:
    """Raise for a model without experts."""
    try:
        with watch(model):
            pass
    except ValueError:
        raise ValueError(
            f"{name} ({type(model).__name__}) is dense: no layer of it has experts to look at"
        ) from None


def prepare(
    model: nn.Module, name: str, kind: str, rows: Any, batch_size: int, max_length: int
) -> Input:
    """Tokenise texts, or find out how the model takes images."""
    config: Any = getattr(model, "config", None)
    if kind == "images":
        size = getattr(config, "image_size", None)
        pixels = size if isinstance(size, int) else None
        return Input(rows, batch_size, processor=load_image_processor(name), pixels=pixels)
    tokenizer = load_tokenizer(name)
    longest = min(max_length, getattr(config, "max_position_embeddings", None) or max_length)
    if kind == "text":
        if tokenizer is None:
            raise ValueError(
                f"{name} brings no tokenizer: save one with it, or give a .jsonl with input_ids"
            )
        rows = tokenise(rows, tokenizer, longest)
    rows = [row[:longest] for row in rows]
    check_ids(rows, config)
    known = (getattr(owner, "pad_token_id", None) for owner in (tokenizer, config))
    pad = next((id for id in known if id is not None), 0)
    side = getattr(tokenizer, "padding_side", "right")
    return Input(rows, batch_size, tokenizer=tokenizer, pad=pad, side=side)


def check_ids(rows: list[list[int]], config: Any) -> None:
    """Raise if there is nothing to read, or a token that the model does not know."""
    if not rows:
        raise ValueError("the data holds no token")
    largest, size = max(map(max, rows)), getattr(config, "vocab_size", None)
    if size is not None and largest >= size:
        raise ValueError(f"token id {largest} is outside the model's vocabulary of {size}")


def run(model: nn.Module, given: Input, console: Console) -> Health:
    """Measure, with a progress bar."""
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("batches", total=len(given))
        tick = lambda number: progress.update(task, completed=number)  # noqa: E731
        return measure(model, given, tokenizer=given.tokenizer, progress=tick)


def tell(console: Console, health: Health) -> None:
    """Print the figures of every layer and the findings."""
    rows = [
        {
            "arm": layer.name,
            "experts": layer.experts,
            "effective": layer.effective,
            "peak": layer.peak,
            "entropy": layer.entropy,
            "dead": len(layer.dead),
            "dropped": layer.drop_rate,
            "padding": layer.padding.share,
        }
        for layer in health.layers
    ]
    show(console, rows, TABLE, f"{health.examples} examples")
    for finding in health.findings:
        typer.echo(f"- {finding.layer}: {finding.text}.")
    if not health.findings:
        typer.echo("No problem found.")
