"""`moiety compare`: which router on your own data, within your own time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from ..report import Column

if TYPE_CHECKING:
    import torch

    from ..lab.compare.asked import Asked
    from ..lab.compare.study import Comparison

MOST_WORKERS = 16  # unless asked for: every one reads the data

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
    target: Annotated[
        list[str] | None,
        typer.Option(help="Column to predict; several with commas, or repeated."),
    ] = None,
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
        typer.Option(help="Compare this one with dense; may be repeated. Five, if not given."),
    ] = None,
    experts: Annotated[int, typer.Option(min=1, help="Experts of a block.")] = 8,
    k: Annotated[int, typer.Option(min=1, help="Experts a token.")] = 2,
    init: Annotated[
        Literal["copy", "noise", "reinit", "split", "low-rank"],
        typer.Option(help="How experts start from a Hugging Face model."),
    ] = "copy",
    seeds: Annotated[int, typer.Option(min=2, help="Trials of every arm.")] = 5,
    budget: Annotated[
        str, typer.Option(help="Time for all training, such as 90s or 1h30m.")
    ] = "5m",
    equal: Annotated[
        Literal["flops", "examples", "time"],
        typer.Option(help="What every trial gets the same of."),
    ] = "flops",
    margin: Annotated[
        float, typer.Option(help="The smallest difference that matters, in the main metric.")
    ] = 0.01,
    lr: Annotated[float | None, typer.Option(help="Learning rate of all arms.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Examples of a step.")] = None,
    tune: Annotated[
        int, typer.Option(min=0, help="Learning rates to try for every arm; 0: none.")
    ] = 0,
    max_examples: Annotated[
        int | None, typer.Option(min=1, help="Take at most so many examples of the data.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the split into train and test.")] = 0,
    keep_leaks: Annotated[
        bool, typer.Option("--keep-leaks", help="Keep columns that give a target away.")
    ] = False,
    image_size: Annotated[
        int | None, typer.Option(min=4, help="Side of the images, in pixels.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets by name lie.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Trials at once; a CPU: as many as cores.")
    ] = None,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder; runs/compare-NAME.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show arms, cost and time; write nothing.")
    ] = False,
) -> None:
    """Compare a dense model with routers on your data, and say which is best."""
    from ..data.named import NAMED
    from ..lab.compare.asked import ROUTERS, Asked, default_arms
    from ..lab.compare.models import PRESETS
    from ..lab.compare.study import Comparison
    from ..lab.plan import parse_time
    from ..train import find_device

    where, console = find_device(device), Console()
    targets = [name.strip() for each in target or [] for name in each.split(",") if name.strip()]
    asked = Asked(
        data=as_path(data, NAMED),
        targets=targets or None,
        text=text,
        data_dir=str(data_dir.resolve()) if data_dir else None,
        max_examples=max_examples,
        split_seed=seed,
        image_size=image_size,
        keep_leaks=keep_leaks,
        model=as_path(model, PRESETS) if model else None,
        experts=experts,
        k=k,
        init=init,
        lr=lr,
        batch=batch,
        tune=tune,
        seeds=seeds,
        budget=parse_time(budget),
        equal=equal,
        margin=margin,
        arms=default_arms(router or ROUTERS),
    )
    say(console, f"Reading {data} …")
    comparison = Comparison.of(asked)
    for note in comparison.notes:
        say(console, f"  {note}")
    lanes = workers or default_workers(asked, where)
    if dry_run:
        tell_plan(console, comparison, where, lanes)
        return
    folder = out or Path("runs") / comparison.study().name.replace("/", "-")
    run(console, asked, folder, device, lanes)


def as_path(name: str, names: Container[str]) -> str:
    """The full path of what is no known name, so that its comparison runs from anywhere."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name not in names and path.exists() else name


def default_workers(asked: Asked, device: torch.device) -> int:
    """One for every core, one on a GPU."""
    if device.type != "cpu":
        return 1
    return min(os.cpu_count() or 1, asked.seeds * len(asked.arms), MOST_WORKERS)


def say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


# -- run -------------------------------------------------------------------------------------------


def run(console: Console, asked: Asked, folder: Path, device: str, workers: int) -> None:
    """Write the study into its folder, run it, and say what came out."""
    from ..lab.compare.folder import command_line, write_study
    from ..lab.driver import run_study
    from ..lab.headline import answers
    from .demo import check_writable

    file = write_study(folder, asked, workers, check_writable)
    count = f"{len(asked.arms)} arms, {asked.seeds} seeds, {workers} trials at once"
    say(console, f"{count}, into {folder}; first a look at how fast they train …")
    result = run_study(
        str(file),
        scale="small",
        seeds=asked.seeds,
        out=folder,
        device=device,
        workers=workers,
        equal=asked.equal,
        budget=asked.budget,
        console=console,
        command=command_line(asked, folder, device, workers),
    )
    show_result(console, result)
    for about, text in answers(result).items():
        say(console, f"{about}: {text}")
    if result["failures"]:
        raise typer.Exit(1)


def show_result(console: Console, result: Mapping[str, Any]) -> None:
    """A short table: the main metric with its interval, against dense, and what an arm costs."""
    from ..report import words
    from .demo import show

    main = result["metrics"][result["main"]]
    form, claims = main["format"], {claim["a"]: claim for claim in result["claims"]}
    rows = []
    for arm in result["arms"]:
        found, flops = arm["metrics"][result["main"]], arm["cost"]["flops"]
        verdict = claims.get(arm["name"], {}).get("verdict") or {}
        low, high = verdict.get("interval") or (None, None)
        span = words.difference_interval(low, high, form).removesuffix(" points")
        rows.append(
            {
                "arm": arm["name"],
                "mean": words.number(found["mean"], form),
                "interval": unbroken(words.interval(found["low"], found["high"], form)),
                "dense": unbroken(span),
                "verdict": verdict.get("word"),
                "flops": words.quantity(flops, words.THOUSANDS).replace(" ", ""),
            }
        )
    unit = " (points)" if form.endswith("%") else ""
    columns = [
        Column("arm", "Arm"),
        Column("mean", main["label"].split(",")[0]),
        Column("interval", "95 % interval"),
        Column("dense", f"minus dense{unit}"),
        Column("verdict", "Better?"),
        Column("flops", "Active FLOPs"),
    ]
    show(console, rows, columns, f"{result['title']}: test data, {result['seeds']} seeds")


def unbroken(interval: str) -> str:
    """An interval in one word, which a narrow table does not break."""
    return interval.replace("%", "").replace(" to ", "…")


# -- a dry run -------------------------------------------------------------------------------------


def tell_plan(console: Console, comparison: Comparison, device: torch.device, workers: int) -> None:
    """What every arm would cost, and how long all would take; nothing is written."""
    from ..lab.compare.asked import write_asked
    from ..lab.driver import choose_executor
    from ..lab.executors import Job
    from ..lab.plan import Plan, estimate, fix_budget
    from ..lab.progress import duration
    from ..report import words
    from .demo import show

    asked, study = comparison.asked, comparison.study()
    plan: Plan = {"seeds": asked.seeds}
    shared = study.scale("small").settings
    with tempfile.TemporaryDirectory() as folder:  # an executor reads the study from its file
        write_asked(file := Path(folder) / "study.toml", asked)
        fix_budget(
            plan,
            study,
            {name: {**shared, **own} for name, own in study.arms.items()},
            seconds=asked.budget,
            equal=asked.equal,
            executor=choose_executor(workers, None, str(device)),
            job=Job(str(file), [], str(device), study.threads),
            tune=asked.tune,
        )
    rows = []
    for name, speed in plan["budget"]["arms"].items():
        cost = comparison.cost(name, device)
        rows.append(
            {
                "arm": name,
                "mflops": cost["flops"] / 1e6,
                "parameters": cost["parameters"],
                "memory": words.quantity(cost["memory"], words.BYTES),
                "examples": speed["examples"],
                "seconds": duration(estimate(plan["budget"], name)),
            }
        )
    columns = [
        Column("arm", "Arm"),
        Column("mflops", "Active MFLOPs", ".3g"),
        Column("parameters", "Parameters", ",d"),
        Column("memory", "Memory"),
        Column("examples", "Examples a trial", ",d"),
        Column("seconds", "Time a trial"),
    ]
    show(console, rows, columns, f"{study.title}: {asked.seeds} seeds of every arm")
    one_seed = sum(estimate(plan["budget"], arm) for arm in study.arms)
    total = one_seed * (asked.seeds + asked.tune) / plan["budget"]["lanes"]
    say(console, f"About {duration(total)} with {workers} workers at once. Nothing was written.")
