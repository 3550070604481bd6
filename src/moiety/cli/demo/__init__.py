"""`moiety demo`: routers side by side on handwritten digits, at equal active FLOPs; gates of tasks;
then the life of one model: it gets experts, learns from a stream, moves to a new domain, is
attacked.

The models of the first part are those of the study `lab/routers`, which compares them over many
seeds. The gates of tasks are in `tasks.py`, the life is in `life.py`, its stream in `stream.py`,
its audit in `attacked.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.utils.data import TensorDataset

from ... import cost
from ...data import digits
from ...io import write_atomic
from ...report import AuditPart, Column, routing_page
from ...studies.lab.on_digits import (
    ARMS,
    BATCH,
    DEPTH,
    DIM,
    EXPERTS,
    HIDDEN,
    Arm,
    active_flops,
    build,
    measure_routing,
)
from ...train import find_device, fit
from . import attacked, life, stream, tasks

CAVEAT = (
    "One seed and 450 test images: use for orientation. Differences between routers at one seed "
    "are not evidence."
)

Row = dict[str, Any]
Loads = dict[str, dict[str, list[float]]]  # arm -> layer -> share of the work of every expert


COST = [
    Column("arm", "Router"),
    Column("mflops", "Active MFLOPs", ".2f"),
    Column("relative", "× dense", ".2f"),
    Column("parameters", "Parameters", ",d"),
]
RESULT = [
    COST[0],
    Column("accuracy", "Accuracy", ".1%"),
    *COST[1:],
    Column("balance", "Balance", ".2f"),
    Column("dead", "Dead experts"),
]
NOTES = {
    "Accuracy": "on the test images; learning rate and size of the model were chosen once, on the "
    "dense one, by these same images, so that the level is a little flattering",
    "Active MFLOPs": "forward, per image, counted on the test images, the router's part included; "
    "less where Switch drops patches or the selectors of DSelect-k agree; DSelect-k is held to two "
    "slots a patch, since its gate starts dense",
    "Balance": "effective experts (e to the entropy of the load) ÷ experts, mean over the blocks; "
    "1 by construction for softmax, where every expert works for every patch, and for expert "
    "choice, where every expert takes the same number of patches",
    "Dead experts": "those that got no patch of any test image, over all blocks",
    "Losses": "balance losses and their weights, as each router brings them",
}


def command(
    seed: Annotated[int, typer.Option(min=0, help="Of first weights, order and noise.")] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 10,
    arm: Annotated[
        list[str] | None,
        typer.Option(help="Only this router, such as top-k; may be repeated."),
    ] = None,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder of the page.")] = Path("out/demo"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the cost of every arm only.")
    ] = False,
) -> None:
    """Compare routers and gates of tasks; follow one model from its experts to an attack."""
    arms, where, console = choose(arm or []), find_device(device), Console()
    gates = [] if arm else tasks.GATES  # who asks for some routers gets these alone
    train, test = digits()
    with one_thread():
        if dry_run:
            models = ((each, build(each, seed).to(where)) for each in arms)
            rows = beside_dense([measure_cost(each, model, test) for each, model in models], test)
            show(console, rows, COST, "Before training; FLOPs per image, measured")
            return
        check_writable(out)
        rows, loads = run(arms, train, test, epochs, seed, where, console)
        found = tasks.run(gates, train, test, epochs, seed, where, console)
        lived = part = None
        if not arm:
            lived = life.run(train, test, epochs, seed, where, console)
            part = attacked.run(lived.model, lived.test, seed, console)
    show(console, rows, RESULT, f"Handwritten digits, {epochs} epochs, seed {seed}")
    if found.rows:
        show(console, found.rows, tasks.RESULT, "Three tasks on the same images, a gate for each")
    if lived and part:
        tell_life(console, lived, part)
        lived.arrived.write(out / "stream")
    typer.echo(CAVEAT)
    settings = {"Seed": str(seed), "Epochs": str(epochs), "Device": device}
    repeat = f"moiety demo --seed {seed} --epochs {epochs} --device {device}"
    repeat += "".join(f" --arm {each.name}" for each in arms if arm)
    path = write_atomic(out / "index.html", page(rows, loads, settings, repeat, found, lived, part))
    more = ", the gates of the tasks" * bool(found.rows)
    if lived:
        typer.echo(f"The ledger of each learner on the stream: {out / 'stream'}")
        more += ", the life of the model"
    typer.echo(f"The load of every expert{more}: {path}")


def tell_life(console: Console, lived: life.Lived, part: AuditPart) -> None:
    """The steps of the one model, in their order."""
    show(console, lived.upcycled.rows, lived.upcycled.columns, lived.upcycled.title)
    show(console, lived.arrived.rows, stream.RESULT, stream.TITLE)
    show(console, lived.adapted.rows, lived.adapted.columns, lived.adapted.title)
    typer.echo(f"{part.title}: {attacked.sentence(part)}")


def choose(names: Sequence[str]) -> list[Arm]:
    """The arms of these names; all if there are none."""
    known = [arm.name for arm in ARMS]
    for name in names:
        if name not in known:
            raise ValueError(f"the demo has no arm {name!r}; it has {', '.join(known)}")
    return [arm for arm in ARMS if arm.name in (names or known)]


def check_writable(out: Path) -> None:
    """Raise now, not after the training, if nothing can be written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written to: {error.strerror}") from None


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: on products this small threads mostly wait for each other, and
    the numbers do not depend on how many cores there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# -- train and measure --------------------------------------------------------------------------


def run(
    arms: Sequence[Arm],
    train: TensorDataset,
    test: TensorDataset,
    epochs: int,
    seed: int,
    device: torch.device,
    console: Console | None = None,
) -> tuple[list[Row], Loads]:
    """Train every arm, with a progress bar: results, and loads of the experts."""
    steps, rows, loads = epochs * -(-len(train) // BATCH), [], {}
    columns = TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        overall = progress.add_task("all arms", total=len(arms))
        for arm in arms:
            task = progress.add_task(arm.name, total=steps)
            model = build(arm, seed).to(device)
            tick = lambda _, task=task: progress.advance(task)  # noqa: E731
            fit(model, train, epochs=epochs, batch=BATCH, seed=seed, on_step=tick)
            loads[arm.name], result = measure_routing(model, test)
            rows.append({**measure_cost(arm, model, test), **result})
            progress.remove_task(task)
            progress.advance(overall)
    return beside_dense(rows, test), loads


def measure_cost(arm: Arm, model: nn.Module, test: TensorDataset) -> Row:
    """Parameters, and FLOPs per test image as counted."""
    mflops, parameters = active_flops(model, test) / 1e6, cost.parameters(model)
    return {"arm": arm.name, "mflops": mflops, "parameters": parameters}


def beside_dense(rows: list[Row], test: TensorDataset) -> list[Row]:
    """Add the FLOPs relative to those of the dense model."""
    reference = active_flops(build(ARMS[0], seed=0), test) / 1e6
    return [{**row, "relative": row["mflops"] / reference} for row in rows]


# -- show ---------------------------------------------------------------------------------------


def show(
    console: Console, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], title: str
) -> None:
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        first = column.key == "arm"
        side: Literal["left", "right"] = "left" if first else "right"
        texts = [column.label, *(column.text(row) for row in rows)]
        word = max(len(word) for text in texts for word in text.split())  # none is broken
        table.add_column(column.label, justify=side, min_width=word, no_wrap=first, overflow="fold")
    for row in rows:
        table.add_row(*(column.text(row) for column in columns))
    console.print(table)


def page(
    rows: list[Row],
    loads: Loads,
    settings: dict[str, str],
    command: str,
    found: tasks.Found,
    lived: life.Lived | None = None,
    audit: AuditPart | None = None,
) -> str:
    """The results and the load of every expert in every layer, as one HTML file."""
    summary = (
        f"A small transformer ({DEPTH} blocks of width {DIM}) reads handwritten digits, dense and "
        f"with {EXPERTS} experts in every block. Routers differ; the work for a patch does not: "
        f"experts at work × their width = {HIDDEN}, the width of the dense part. {CAVEAT}"
    )
    if lived:
        summary += " Below them, one model from its first experts to an attack."
    return routing_page(
        title="Routers on handwritten digits, at equal active FLOPs",
        summary=summary,
        rows=rows,
        columns=[*RESULT, Column("losses", "Losses")],
        notes=NOTES,
        loads=loads,
        settings=settings,
        command=command,
        tasks=found.part(),
        upcycled=lived.upcycled if lived else None,
        stream=lived.arrived.part() if lived else None,
        adapted=lived.adapted if lived else None,
        audit=audit,
    )
