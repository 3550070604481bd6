"""`moiety anytime`: learn from data that arrive in mega-batches, with a ledger of what it costs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import advising
from .asked import (
    JOURNAL,
    Model,
    build,
    data_set,
    folder,
    own_journal,
    read_options,
    refuse_of_folders,
)

if TYPE_CHECKING:
    from ...anytime.base import Learner
    from ...anytime.data import Batch, Examples
    from ...anytime.run import Result
    from ...anytime.stream import Seen, Stream


def command(
    stream: Annotated[
        str, typer.Option(help="Folder that fills with files; with --batches, a data set.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of versions and ledger.")] = Path("out/anytime"),
    model: Annotated[Model, typer.Option(help="vgg19 takes images of 32 pixels.")] = "mlp",
    width: Annotated[int, typer.Option(min=1, help="Of its hidden layers.")] = 64,
    learner: Annotated[
        str, typer.Option(help="single, ensemble, mixture, growing-ensemble or growing-moe.")
    ] = "single",
    option: Annotated[
        list[str] | None,
        typer.Option(help="Of the learner, as name=value, such as members=3; may be repeated."),
    ] = None,
    wait: Annotated[
        str,
        typer.Option(
            help="Mega-batches before each training; or size:ROWS, budget:FLOPS, plateau:GAIN."
        ),
    ] = "1",
    replay: Annotated[
        str, typer.Option(help="Share of what was used before, such as 0.2; or reservoir:ROWS.")
    ] = "none",
    test: Annotated[
        Path | None,
        typer.Option(help="File to score on, which decides nothing. Default: score arrivals."),
    ] = None,
    batches: Annotated[
        int | None, typer.Option(min=1, help="Cut a data set (name or path) into so many.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Column to predict.")] = None,
    classes: Annotated[
        str | None, typer.Option(help="All classes, with commas; default: those of the first file.")
    ] = None,
    settle: Annotated[
        float | None, typer.Option(help="Take plain files without a .done after so many seconds.")
    ] = None,
    overlap: Annotated[
        float, typer.Option(help="Share of the rows of a file that may be in the test set, too.")
    ] = 0.01,
    watch: Annotated[bool, typer.Option("--watch", help="Keep looking for arrivals.")] = False,
    epochs: Annotated[int, typer.Option(min=1, help="Of a phase, at most.")] = 100,
    method: Annotated[str, typer.Option(help="adadelta, sgd, adam or adamw.")] = "adadelta",
    lr: Annotated[
        float | None, typer.Option(help="Learning rate. Default: that of the method.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, orders and splits.")] = 0,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda.")] = "cpu",
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets by name lie.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what has arrived; train and keep nothing.")
    ] = False,
    advise: Annotated[
        bool, typer.Option("--advise", help="Try waits, and growing, on the first mega-batches.")
    ] = False,
    first: Annotated[
        int | None, typer.Option(help="With --advise: mega-batches to try on. Default: up to 8.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="With --advise: seeds, at least 5. Default: 5.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="With --advise: time, such as 90s or 1h. Default: 10m.")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(help="With --advise: smallest error that matters. Default: 0.01."),
    ] = None,
) -> None:
    """Train whenever enough has arrived; OUT/current is always the newest model."""
    from ...anytime.fitting import Training
    from ...anytime.policies import read_replay, read_wait
    from ...anytime.run import run_stream
    from ...train import find_device

    if not advise:
        advising.refuse(first=first, seeds=seeds, budget=budget, margin=margin)
    where, waiting, replayed = find_device(device), read_wait(wait), read_replay(replay)
    training = Training(epochs=epochs, method=method, lr=lr)
    options = {**read_options(option or []), "seed": seed, "device": where, "training": training}

    def make(first: Batch) -> Learner:
        tell_unused(source)
        return build(model, width, learner, options, first, source.classes)

    with tempfile.TemporaryDirectory() as scratch:
        tests: Examples | Callable[[Batch], Examples] | None
        if batches is None:
            named = None if classes is None else [word.strip() for word in classes.split(",")]
            scored = None if advise else test  # advice never looks at the test set
            place = Path(scratch) if dry_run else out / "advice" if advise else out
            journal = own_journal(out / JOURNAL, place / JOURNAL)
            source, tests = folder(stream, journal, target, named, scored, settle, overlap, seed)
        else:
            refuse_of_folders(classes=classes, settle=settle, test=test, watch=watch or None)
            source, tests = data_set(stream, batches, target, data_dir, seed)
        if dry_run:
            tell_plan(source, make)
            return
        if advise:
            arms = advising.makers(model, width, learner, options, source)
            advising.run(
                source,
                arms,
                out / "advice",
                replayed,
                Teller(),
                first=first,
                seeds=seeds,
                budget=budget,
                margin=margin,
            )
            return
        result = run_stream(
            source,
            make,
            out=out,
            wait=waiting,
            replay=replayed,
            test=tests,
            overlap=overlap,
            seed=seed,
            follow=watch,
            on_line=tell_line,
            on_seen=Teller(),
            words={"model": model, "width": width, "target": target, "classes": classes},
        )
    tell_result(result, out)


# -- what is said ----------------------------------------------------------------------------------


class Teller:
    """Says what each look at the folder met, and nothing twice."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def __call__(self, seen: list[Seen]) -> None:
        for one in seen:
            if one.reason and str(one) not in self.said:
                typer.echo(f"  {one}", err=True)
                self.said.add(str(one))


def tell_unused(source: Stream) -> None:
    """Columns of the first file that are no inputs, and why."""
    form = getattr(getattr(source, "read", None), "form", None)
    unused = getattr(form, "unused", {})
    if unused:
        named = "; ".join(f"{name} ({why})" for name, why in unused.items())
        typer.echo(f"Columns that are not used: {named}")


def tell_line(line: dict[str, Any]) -> None:
    """A line of the ledger in words."""
    metric = "perplexity" if "perplexity" in line else "error"
    text = f"t = {line['t']}  {line['name']}  {line['rows']} rows  {metric} {line[metric]:.4g}"
    if line["trained"]:
        text += (
            f"  phase {line['phase']}: {line['steps']} steps, {line['flops']['train']:.2e} FLOPs"
        )
        if line["validation"] is not None:
            text += f", validation {line['validation']:.4g}"
        if line["growth"]:
            text += f", grown (gap {line['growth']['gap']:.1e})"
    typer.echo(text)


def tell_plan(source: Stream, make: Callable[[Batch], Learner]) -> None:
    for one in source.poll():
        typer.echo(f"  {one}")
    typer.echo(f"{source.known()} mega-batches have arrived.")
    if source.known():
        made = make(source[1])
        typer.echo(f"Learner {made.name}: {made.parameters():,} parameters.")
    typer.echo("Nothing was trained, and nothing written.")


def tell_result(result: Result, out: Path) -> None:
    """The sums of the ledger, what still waits, and where to go on."""
    sums = result.summary
    name = "CER" if sums.metric == "error" else "Sum of perplexities"
    typer.echo(
        f"{name} {sums.cer:.4g} over {sums.batches} mega-batches ({sums.average:.4g} each, "
        f"{sums.final:.4g} at the end); Mem {sums.mem:,} parameters; Comp {sums.comp:.3e} FLOPs "
        f"(forward only {sums.comp_forward:.3e}; validation {sums.comp_validation:.3e}, growth "
        f"{sums.comp_growth:.3e} apart)"
    )
    if result.waiting:
        typer.echo(f"{len(result.waiting)} mega-batches wait for more: {result.waiting}")
    if (out / "current").exists():
        typer.echo(f"The newest model is {out / 'current'}; the ledger is {out / 'ledger.jsonl'}")
