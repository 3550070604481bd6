"""`moiety data`: the built-in sets, and what is worked out about any data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

command = typer.Typer(help="List, get and look at data sets.", no_args_is_help=True)
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder with data sets; else that of MOIETY_DATA, else the user's cache."),
]


@command.command("list")
def show_list(data_dir: DataDir = None) -> None:
    """List the built-in sets: what they are, and where they are or how to get them."""
    from ..data.named import NAMED, find, how_to_get

    for name, named in NAMED.items():
        found = find(name, data_dir)
        if named.read is not None:
            where = "comes with scikit-learn"
        elif found is None:
            where = how_to_get(name, data_dir)
        else:
            where = f"in {found.folder}" + (f" ({found.layout.note})" if found.layout.note else "")
        typer.echo(f"{name}: {named.kind}, {named.size} examples, {named.title}\n    {where}")


@command.command("get")
def get_set(
    name: Annotated[str, typer.Argument(help="Name of a built-in set.")], data_dir: DataDir = None
) -> None:
    """Fetch a built-in set and check it against its published checksums."""
    from ..data.named import get

    with _progress() as tick:
        folder = get(name, data_dir, progress=tick)
    typer.echo(f"{name} is in {folder}")


@command.command("show")
def show(
    source: Annotated[
        str,
        typer.Argument(help="Built-in name, .csv, .tsv, .jsonl, .parquet, or folder of images."),
    ],
    target: Annotated[
        list[str] | None, typer.Option(help="Column to predict; may be given again, or a,b.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="Column of text to learn from.")] = None,
    keep_leaks: Annotated[
        bool, typer.Option("--keep-leaks", help="Keep columns that give a target away exactly.")
    ] = False,
    max_examples: Annotated[
        int | None, typer.Option(min=1, help="At most about so many, of each class alike.")
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Side that the images of a folder are brought to.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides the split where none is given.")] = 0,
    data_dir: DataDir = None,
) -> None:
    """Show what would be learned from some data: splits, columns, classes, suspected leaks."""
    from ..data import load_problem

    problem = load_problem(
        source,
        targets=",".join(target or []) or None,
        text=text,
        data_dir=data_dir,
        seed=seed,
        max_examples=max_examples,
        image_size=image_size,
        leaks="keep" if keep_leaks else "drop",
    )
    typer.echo(problem.name)
    for note in problem.notes:
        typer.echo(f"  {note}")
    for leak in problem.leaks:
        typer.secho(f"  LEAK: {leak}", fg="red", bold=True)
    if problem.kind == "table" and not problem.leaks:
        typer.echo("  leaks: none found")


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for each file that is being fetched."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}

    def tick(file: str, done: int, whole: int | None) -> None:
        progress.start()  # not before: without a task it would print an empty line
        if file not in tasks:
            tasks[file] = progress.add_task(file, total=whole)
        progress.update(tasks[file], completed=done)

    try:
        yield tick
    finally:
        if tasks:
            progress.stop()
