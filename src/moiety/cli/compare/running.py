"""What both comparisons do with what was asked: tell, run, show."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from ...report import Column

if TYPE_CHECKING:
    import torch

    from ...lab.compare.asked import Asking
    from ...lab.compare.study import Comparison

MOST_WORKERS = 16  # unless asked for: every one reads the data


def carry_out(
    asked: Asking, *, device: str, workers: int | None, out: Path | None, dry_run: bool
) -> None:
    """Read the data, say what was worked out, and run the comparison or show its plan."""
    from ...lab.compare.study import make_comparison
    from ...train import find_device

    where, console = find_device(device), Console()
    say(console, f"Reading {asked.data} …")
    comparison = make_comparison(asked)
    for note in comparison.notes:
        say(console, f"  {note}")
    lanes = workers or default_workers(asked, where)
    if dry_run:
        tell_plan(console, comparison, where, lanes)
        return
    folder = out or Path("runs") / comparison.study().name.replace("/", "-")
    run(console, asked, folder, device, lanes)


def shared_words(
    *, data: str, target: list[str] | None, data_dir: Path | None, budget: str, **words: Any
) -> dict[str, Any]:
    """What both comparisons are asked, as `Asking` takes it."""
    from ...data.named import NAMED
    from ...lab.plan import parse_time

    return {
        "data": as_path(data, NAMED),
        "targets": listed(target) or None,
        "data_dir": str(data_dir.resolve()) if data_dir else None,
        "budget": parse_time(budget),
        **words,
    }


def listed(given: Sequence[str] | None) -> list[str]:
    """Names that were given with commas, or one after the other."""
    return [name.strip() for each in given or [] for name in each.split(",") if name.strip()]


def as_path(name: str, names: Container[str]) -> str:
    """The full path of what is no known name, so that its comparison runs from anywhere."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name not in names and path.exists() else name


def default_workers(asked: Asking, device: torch.device) -> int:
    """One for every core, one on a GPU."""
    if device.type != "cpu":
        return 1
    return min(os.cpu_count() or 1, asked.seeds * len(asked.arms), MOST_WORKERS)


def say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


# -- run -------------------------------------------------------------------------------------------


def run(console: Console, asked: Asking, folder: Path, device: str, workers: int) -> None:
    """Write the study into its folder, run it, and say what came out."""
    from ...lab.compare.folder import command_line, write_study
    from ...lab.driver import run_study
    from ...lab.headline import answers
    from ..demo import check_writable

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
    show_result(console, result, asked.reference)
    for about, text in answers(result).items():
        say(console, f"{about}: {text}")
    if result["failures"]:
        raise typer.Exit(1)


def show_result(console: Console, result: Mapping[str, Any], reference: str) -> None:
    """A short table: the main metric with its interval, against one arm, and what an arm costs."""
    from ...report import words
    from ..demo import show

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
                "beside": unbroken(span),
                "verdict": verdict.get("word"),
                "flops": words.quantity(flops, words.THOUSANDS).replace(" ", ""),
            }
        )
    unit = " (points)" if form.endswith("%") else ""
    columns = [
        Column("arm", "Arm"),
        Column("mean", main["label"].split(",")[0].split(" (")[0]),
        Column("interval", "95 % interval"),
        Column("beside", f"minus {reference}{unit}"),
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
    from ...lab.compare.asked import write_asked
    from ...lab.driver import choose_executor
    from ...lab.executors import Job
    from ...lab.plan import Plan, estimate, fix_budget
    from ...lab.progress import duration
    from ...report import words
    from ..demo import show

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
