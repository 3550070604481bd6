"""`moiety compare`: which router, or which gates of tasks, on your own data, in your own time."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from . import options as o

command = typer.Typer(
    help="Compare methods on your own data, and write a page.", no_args_is_help=True
)


@command.callback()
def of_what() -> None:
    """Compare methods on your own data, and write a page."""


@command.command()
def routers(
    data: Annotated[
        str,
        typer.Option(
            help="A folder of images by class, a CSV, TSV, Parquet or JSONL file, or a name "
            "such as digits."
        ),
    ],
    target: o.Target = None,
    text: Annotated[str | None, typer.Option(help="Column that holds the text.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="vit-tiny, text-tiny or mlp (the one for the data, if not given), or the folder "
            "or hub id of a Hugging Face model."
        ),
    ] = None,
    router: Annotated[
        list[str] | None,
        typer.Option(
            help="Compare these with dense; with commas, or repeated. Five, if not given."
        ),
    ] = None,
    experts: o.Experts = 8,
    k: o.K = 2,
    init: Annotated[
        Literal["copy", "noise", "reinit", "split", "low-rank"],
        typer.Option(help="How experts start from a Hugging Face model."),
    ] = "copy",
    seeds: o.Seeds = 5,
    budget: o.Budget = "5m",
    equal: o.Equal = "flops",
    margin: o.Margin = 0.01,
    lr: o.Rate = None,
    batch: o.Batch = None,
    tune: o.Tune = 0,
    max_examples: o.MaxExamples = None,
    seed: o.SplitSeed = 0,
    keep_leaks: o.KeepLeaks = False,
    image_size: Annotated[
        int | None, typer.Option(min=4, help="Side of the images, in pixels.")
    ] = None,
    data_dir: o.DataDir = None,
    workers: o.Workers = None,
    device: o.Device = "cpu",
    out: o.Out = None,
    dry_run: o.DryRun = False,
) -> None:
    """Compare a dense model with routers on your data, and say which is best."""
    from ...lab.compare.asked import ROUTERS, Asked, default_arms
    from ...lab.compare.models import PRESETS
    from .running import as_path, carry_out, listed, shared_words

    asked = Asked(
        **shared_words(
            data=data,
            target=target,
            data_dir=data_dir,
            budget=budget,
            max_examples=max_examples,
            split_seed=seed,
            keep_leaks=keep_leaks,
            experts=experts,
            k=k,
            lr=lr,
            batch=batch,
            tune=tune,
            seeds=seeds,
            equal=equal,
            margin=margin,
        ),
        text=text,
        image_size=image_size,
        model=as_path(model, PRESETS) if model else None,
        init=init,
        arms=default_arms(listed(router) or ROUTERS),
    )
    carry_out(asked, device=device, workers=workers, out=out, dry_run=dry_run)


@command.command()
def gates(
    data: Annotated[
        str,
        typer.Option(
            help="A table (CSV, TSV, Parquet, JSONL), or a name such as adult or census-income."
        ),
    ],
    target: o.Target = None,
    arms: Annotated[
        list[str] | None,
        typer.Option(
            help="Compare these with shared-bottom, with commas or repeated: any router, ple, "
            "single-task. Six, if not given."
        ),
    ] = None,
    experts: Annotated[int, typer.Option(min=1, help="Experts that the tasks share.")] = 8,
    k: Annotated[int, typer.Option(min=1, help="Experts a task selects.")] = 2,
    seeds: o.Seeds = 5,
    budget: o.Budget = "5m",
    equal: o.Equal = "flops",
    margin: o.Margin = 0.01,
    lr: o.Rate = None,
    batch: o.Batch = None,
    tune: o.Tune = 0,
    max_examples: o.MaxExamples = None,
    seed: o.SplitSeed = 0,
    keep_leaks: o.KeepLeaks = False,
    data_dir: o.DataDir = None,
    workers: o.Workers = None,
    device: o.Device = "cpu",
    out: o.Out = None,
    dry_run: o.DryRun = False,
) -> None:
    """Compare ways to learn several targets of a table together, and say which is best."""
    from ...lab.compare.asked import GATES, AskedGates, gate_arms
    from .running import carry_out, listed, shared_words

    asked = AskedGates(
        **shared_words(
            data=data,
            target=target,
            data_dir=data_dir,
            budget=budget,
            max_examples=max_examples,
            split_seed=seed,
            keep_leaks=keep_leaks,
            experts=experts,
            k=k,
            lr=lr,
            batch=batch,
            tune=tune,
            seeds=seeds,
            equal=equal,
            margin=margin,
        ),
        arms=gate_arms(listed(arms) or GATES),
    )
    carry_out(asked, device=device, workers=workers, out=out, dry_run=dry_run)
