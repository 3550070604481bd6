"""`moiety study`: list, run and show studies, and the ledger of their claims."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:  # the lab loads scipy: other verbs must not wait for it
    from ..lab.run import Run

command = typer.Typer(
    help="Compare methods over seeds, with verdicts on claims made beforehand.",
    no_args_is_help=True,
)

RESULTS = Path("results")
Study = Annotated[
    str, typer.Argument(help="A name of `moiety study list`, or a .py or .toml file.")
]


@command.command("list")
def list_() -> None:
    """Name the studies that come with Moiety, one a line."""
    from ..lab.loading import list_studies

    titles = list_studies()
    width = max(map(len, titles), default=0)
    for name, title in titles.items():
        typer.echo(f"{name:<{width}}  {title}")


@command.command("run")
def run(
    study: Study,
    scale: Annotated[str, typer.Option(help="smoke (seconds), small (minutes), full.")] = "small",
    seeds: Annotated[int | None, typer.Option(help="Default: stored, or the scale's.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Local processes.")] = 1,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda.")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: runs/<study>/<scale>.")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Time for all trials: 90s, 10m, 1h.")] = None,
    equal: Annotated[
        str | None,
        typer.Option(help="What a budget gives each trial the same of: flops, examples or time."),
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="Only this arm; may be repeated.", show_default=False)
    ] = None,
    pilot: Annotated[
        int | None, typer.Option(help="Seeds of a pilot that fixes the number of seeds.")
    ] = None,
    most: Annotated[
        int | None, typer.Option(min=5, help="Seeds at most, whatever the pilot asks for.")
    ] = None,
    ray: Annotated[str | None, typer.Option(help="Address of a Ray cluster, or auto.")] = None,
    wait: Annotated[
        float | None, typer.Option(min=0, help="Seconds to wait for a folder in use.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run only.")] = False,
) -> None:
    """Run a study to its verdicts and page, or continue it where it was stopped."""
    from ..lab.driver import choose_executor, open_run, run_study
    from ..lab.plan import parse_time

    console, arms = Console(), arm or None
    if dry_run:
        executor = choose_executor(workers, ray, device)
        planned = open_run(study, scale=scale, out=out, device=device, arms=arms, executor=executor)
        seconds = None if budget is None else parse_time(budget)
        planned.draft_plan(seeds, pilot, seconds, equal)
        show_plan(console, planned)
        return
    result = run_study(
        study,
        scale=scale,
        seeds=seeds,
        out=out,
        device=device,
        workers=workers,
        ray=ray,
        equal=equal,
        budget=budget,
        arms=arms,
        pilot=pilot,
        most=most,
        wait=wait,
        console=console,
    )
    show_verdicts(console, result)
    if result["failures"]:
        raise typer.Exit(1)


@command.command("show")
def show(
    study: Annotated[str, typer.Argument(help="A study, or the folder of a run.")],
) -> None:
    """Show how a run stands, also while it is going on; for a study without runs, what it asks."""
    from ..lab.driver import default_folder
    from ..lab.loading import load_study

    console = Console()
    if (Path(study) / "study.json").is_file():
        show_run(console, Path(study))
        return
    if Path(study).is_dir():
        raise ValueError(f"{study} is not the folder of a run: it holds no study.json")
    loaded = load_study(study)
    folders = [default_folder(loaded.name, scale) for scale in loaded.scales]
    folders = [folder for folder in folders if (folder / "study.json").is_file()]
    for folder in folders:
        show_run(console, folder)
    if not folders:
        show_study(loaded)


@command.command("claims")
def claims(
    studies: Annotated[
        list[str] | None,
        typer.Argument(
            help="Studies or groups of them, such as adapt/text or adapt. Default: all."
        ),
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of committed results.")] = RESULTS,
    write: Annotated[
        Path | None,
        typer.Option("--write", "--out", help="Write all with its details, as docs/claims.md is."),
    ] = None,
) -> None:
    """Tell what was claimed, and what was measured of it: the ledger of all studies."""
    from ..io import write_atomic
    from ..lab.ledger import ledger, ledger_markdown

    if not results.is_dir():  # no error: what is claimed can be read without any result
        typer.echo(
            f"moiety: there is no folder {results}, so no claim counts as run; --results names "
            "another.",
            err=True,
        )
    rows = ledger(results)
    if write is not None and studies:
        raise ValueError("--out writes the claims of all studies: leave the names out")
    if write is not None:
        typer.echo(f"The ledger: {write_atomic(write, ledger_markdown(rows))}")
        return
    for name in studies or []:
        if not any(_belongs(row.study, name) for row in rows):
            raise ValueError(f"{name} is no study, nor a group, that has claims")
    show_claims(
        Console(),
        [row for row in rows if not studies or any(_belongs(row.study, n) for n in studies)],
    )


def _belongs(study: str, name: str) -> bool:
    return study == name or study.startswith(f"{name.rstrip('/')}/")


def show_claims(console: Console, rows: list[Any]) -> None:
    """A line for each claim, corrected over its paper."""
    table = _table(["Claim", "Verdict", "Difference and 95 % interval", "p", "Tier"], left=2)
    for row in rows:
        p = f"{row.verdict['p']:.2g}" if row.verdict else "–"
        table.add_row(f"{row.name}: {row.claim.quote}", row.word, row.effect, p, row.tier)
    console.print(table)
    typer.echo(
        "Intervals are of one claim alone; verdicts and p are corrected over all claims of a paper "
        "and over every look. Everything else of a claim: --out FILE.md"
    )


# -- what is shown -------------------------------------------------------------------------------


def show_study(study: Any) -> None:
    """What a study asks, before any run, and what is known of it."""
    from ..lab.ledger import ledger, result_path

    typer.echo(f"{study.name}: {study.title}\n{study.question}")
    for name, scale in study.scales.items():
        typer.echo(f"  scale {name}: {scale.seeds} seeds {_short(scale.settings)}")
    for name, settings in study.arms.items():
        typer.echo(f"  arm {name} {_short(settings)}")
    for claim in study.claims:
        typer.echo(
            f"  claim: {claim.a} {claim.kind} {claim.b}, margin {claim.margin:g} in {claim.metric}"
        )
    kept = result_path(RESULTS, study.name)
    if kept.is_file():
        typer.echo(f"Measured: {kept} (its page: moiety report {kept} --out FILE.html); verdicts:")
        show_claims(Console(), [row for row in ledger(RESULTS) if row.study == study.name])
    typer.echo(f"Not run {'here' if kept.is_file() else 'yet'}: moiety study run {study.name}")


def show_run(console: Console, folder: Path) -> None:
    """How the run in a folder stands."""
    from ..lab.driver import open_run
    from ..lab.run import read_about
    from ..lab.schema import read_result

    about = read_about(folder)
    run = open_run(about["reference"], scale=about["scale"], out=folder, device=about["device"])
    run.draft_plan(None, None, None, None)
    run.arms = run.plan["arms"]
    left = show_plan(console, run)
    if (folder / "result.json").is_file():
        if left:
            typer.echo("Verdicts of before, without the trials to run:")
        show_verdicts(console, read_result(folder / "result.json"))
    typer.echo(f"Command: {about['command']}")


def show_plan(console: Console, run: Run) -> int:
    """The arms of a run, how many trials of each are done, and how long the rest takes.

    Returns how many trials are left.
    """
    from ..lab.progress import duration
    from ..lab.standing import searched, standings, time_left
    from ..report.words import number

    plan, rows, tried = run.plan, standings(run), searched(run)
    typer.echo(f"{run.study.title} ({run.study.name}), scale {run.scale}, on {run.device}")
    typer.echo(f"Folder: {run.folder}; {plan['seeds']} seeds ({plan['from']})")
    if budget := plan["budget"]:
        typer.echo(f"Budget: {duration(budget['seconds'])}, arms equal in {budget['equal']}")
    if tried:
        typer.echo(f"Search: {tried[0]} of {tried[1]} settings tried")
    known = [n for n in run.study.metrics if any(row.metrics.get(n) is not None for row in rows)]
    shown = {n: run.study.metrics[n] for n in known[: max((console.width - 60) // 12, 1)]}
    columns = ["Arm", "Settings", "Trials", "Failed", *(m.label for m in shown.values())]
    table = _table(columns, left=2)
    for row in rows:
        values = [number(row.metrics.get(n), m.format) for n, m in shown.items()]
        count = f"{row.done}/{row.planned}"
        table.add_row(row.arm, _short(row.settings), count, str(row.failed or "–"), *values)
    console.print(table)
    if len(shown) < len(known):
        typer.echo(f"{len(shown)} of {len(known)} metrics fit; all are on the page.")
    if any(row.failed for row in rows):
        typer.echo(f"The tracebacks of failed trials are in {run.folder / 'trials'}.")
    for arm, reason in run.without_settings(plan["arms"]).items():
        typer.echo(f"{arm} is not measured: {reason}")
    left = sum(row.planned - row.done for row in rows)
    seconds = time_left(run)
    time = "time not known before a first run" if seconds is None else f"about {duration(seconds)}"
    typer.echo(f"{left} trials to run: {time}." if left else "All trials are done.")
    return left


def show_verdicts(console: Console, result: dict[str, Any]) -> None:
    """The verdict on each claim."""
    if not result.get("claims"):
        return
    table = _table(["Claim", "Verdict", "Difference", "95 % interval", "p"], left=2)
    for claim in result["claims"]:
        verdict, form = claim["verdict"], result["metrics"][claim["metric"]]["format"]
        table.add_row(*_claim_cells(claim, verdict, form))
    console.print(table)
    if result["paper"]:
        typer.echo(
            "Corrected over the claims of this study; what counts for the paper is the ledger, "
            "corrected over all of its claims: moiety study claims"
        )


def _claim_cells(claim: dict[str, Any], verdict: dict[str, Any], form: str) -> list[str]:
    from ..report.words import difference, difference_interval

    sign = ">" if claim["kind"] == "greater" else "="
    margin = difference(claim["margin"], form, signed=False)
    name = f"{claim['a']} {sign} {claim['b']} ({claim['metric']}, δ {margin})"
    if verdict["interval"] is None:
        return [name, verdict["word"], "–", "–", "–"]
    low, high = verdict["interval"]
    effect, span = difference(verdict["effect"], form), difference_interval(low, high, form)
    return [name, verdict["word"], effect, span, f"{verdict['p']:.2g}"]


def _table(columns: list[str], left: int) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", overflow="fold")
    return table


def _short(settings: Any) -> str:
    plain = {name: value for name, value in settings.items() if not isinstance(value, dict)}
    return ", ".join(f"{name}={value}" for name, value in plain.items())
