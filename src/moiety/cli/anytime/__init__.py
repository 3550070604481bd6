"""`moiety anytime`: learn from data that arrive in mega-batches, with a ledger of what it costs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import advising, predicting
from .asked import (
    JOURNAL,
    Model,
    build,
    check_learner,
    data_set,
    folder,
    given,
    own_journal,
    read_options,
    refuse_of_folders,
)
from .telling import Teller, tell_line, tell_plan, tell_result, tell_unused

if TYPE_CHECKING:
    from ...anytime.base import Learner
    from ...anytime.data import Batch, Examples

command = typer.Typer(invoke_without_command=True)
command.command("predict")(predicting.predict)


@command.callback()
def run(
    context: typer.Context,
    stream: Annotated[
        str | None,
        typer.Option(
            help="Folder that fills with files, which a run needs; with --batches, a data set.",
            show_default=False,
        ),
    ] = None,
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
    """Train whenever enough has arrived; OUT/current is always the newest model.

    `moiety anytime predict FILE` answers rows with it.
    """
    asked = given(context)
    if context.invoked_subcommand is not None:
        if asked:
            verb = context.invoked_subcommand
            raise ValueError(f"--{asked[0]} stands before {verb}; give {verb} its options after it")
        return
    if stream is None:
        raise ValueError("give --stream, a folder that fills; or --batches with a data set")
    from ...anytime.apart import check_share
    from ...anytime.fitting import Training
    from ...anytime.policies import read_replay, read_wait
    from ...anytime.run import run_stream
    from ...train import find_device

    if advise:
        advising.tell_aside(asked)
    else:
        advising.refuse(first=first, seeds=seeds, budget=budget, margin=margin)
    where, waiting, replayed = find_device(device), read_wait(wait), read_replay(replay)
    training = Training(epochs=epochs, method=method, lr=lr)
    options = {**read_options(option or []), "seed": seed, "device": where, "training": training}
    check_learner(learner, options)
    check_share(overlap)
    if "overlap" in asked and test is None and batches is None:
        raise ValueError("--overlap goes with --test")

    def make(first: Batch) -> Learner:
        tell_unused(source)
        return build(model, width, learner, options, first, source.classes)

    words: dict[str, object] = {"model": model, "width": width, "target": target}
    words |= {"classes": classes, "learner_options": read_options(option or [])}

    with tempfile.TemporaryDirectory() as scratch:
        tests: Examples | Callable[[Batch], Examples] | None
        if batches is None:
            named = None if classes is None else [word.strip() for word in classes.split(",")]
            scored = None if advise else test  # advice never looks at the test set
            place = Path(scratch) if dry_run else out / "advice" if advise else out
            journal = own_journal(out / JOURNAL, place / JOURNAL)
            source, tests = folder(
                stream, journal, model, target, named, scored, settle, overlap, seed
            )
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
                Teller(source),
                first=first,
                seeds=seeds,
                budget=budget,
                margin=margin,
            )
            return
        if watch:
            typer.echo(f"Watching {stream}; Ctrl-C stops, and the same command goes on.")
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
            on_seen=Teller(source),
            words=words,
        )
    tell_result(result, out)
