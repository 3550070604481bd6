"""What `moiety adapt` says while it runs and at its end."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ...report import Column, words

if TYPE_CHECKING:
    from ...adapt.asked import Asked
    from ...adapt.command import Opened
    from ...adapt.costing import Costs

NAMES = {"further": "further pre-training"}
SAID = 30.0  # seconds between two lines of a stage where there is no bar
STAGES = [
    Column("arm", "Stage"),
    Column("steps", "Steps", ",d"),
    Column("times", "Times", ",d"),
    Column("batch", "Batch", ",d"),
    Column("passes", "Passes", ".3g"),
    Column("step", "FLOPs a step"),
    Column("total", "FLOPs"),
]
SEEN = [
    Column("arm", "Stage"),
    Column("steps", "Steps", ",d"),
    Column("target", "Masked loss", ".4g"),
    Column("source", "Source", ".4g"),
    Column("distance", "Distance", ".3g"),
    Column("score", "Probe", ".1%"),
]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Say warnings and the log of adaptation as plain lines."""
    log, handler = logging.getLogger("moiety.adapt"), _Said()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    show = warnings.showwarning
    warnings.showwarning = lambda message, *_, **__: typer.echo(f"  {message}", err=True)
    try:
        yield
    finally:
        warnings.showwarning = show
        log.removeHandler(handler)
        log.setLevel(level)


class _Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(f"  {record.getMessage()}", err=True)


class Bar:
    """A bar for every stage in a terminal; elsewhere a line now and then, and one at its end.

    Ctrl-C is heard between two steps, so that the state can be kept; a second one at once.
    """

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        self.progress = Progress(
            *columns,
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task: Any = None
        self.name, self.share, self.begun = "", 0.0, time.monotonic()
        self.first, self.said = (self.begun, 0.0), self.begun
        self.listens = self.interrupted = False

    def __enter__(self) -> Self:
        self.progress.start()
        # Other threads cannot listen, and who was told not to hear it goes on so.
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self.listens = usual and threading.current_thread() is threading.main_thread()
        if self.listens:
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def _interrupt(self, *_: Any) -> None:
        self.interrupted = True  # and no word: what prints may be in the middle of it
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _heed(self) -> None:
        if self.interrupted:
            self.console.print("  interrupted: what was trained is kept", markup=False)
            raise KeyboardInterrupt

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.listens:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.end()  # a last stage may have stopped early
        self.progress.stop()
        if kind is None:
            self._heed()

    def __call__(self, name: str, share: float) -> None:
        if name != self.name:
            self.end()
            self.task, self.name = self.progress.add_task(named(name), total=1.0), name
            self.first, self.said = (time.monotonic(), share), time.monotonic()
        self.share = share
        self._say()
        self.progress.update(self.task, completed=share)
        self._heed()
        if share >= 1:
            self.end()

    def _say(self) -> None:
        """A line for who has no bar, such as a log file."""
        now, (began, share) = time.monotonic(), self.first
        if self.console.is_terminal or now - self.said < SAID or not share < self.share < 1:
            return
        left = words.duration((now - began) * (1 - self.share) / (self.share - share))
        self._print(f"  {named(self.name)}: {self.share:.0%}, about {left} left")
        self.said = now

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        """Say that a stage is over."""
        if self.task is None:
            return
        took, self.begun = words.duration(time.monotonic() - self.begun), time.monotonic()
        how = "done" if self.share >= 1 else f"stopped at {self.share:.0%}"
        if not self.name.startswith("scoring"):
            self._print(f"  {named(self.name)}: {how} in {took}")
        self.progress.remove_task(self.task)
        self.task, self.name = None, ""


def named(stage: str) -> str:
    """A stage as people call it: "round 1, cache"."""
    return NAMES.get(stage, stage.replace("round-", "round "))


# -- what is there ---------------------------------------------------------------------------------


def tell_opened(asked: Asked, opened: Opened) -> None:
    """Model and data in a line each."""
    from ...adapt.command import about_model

    model = about_model(opened.encoder)
    size = words.quantity(model["parameters"], words.THOUSANDS)
    typer.echo(f"{asked.model}: {model['class']} of {size} parameters")
    if model["made"] and opened.corpus is not None:
        typer.echo(
            f"  it lacks {len(model['made'])} parameters of its head, such as {model['made'][0]}, "
            "which are made and warmed up first"
        )
    if opened.corpus is not None:
        typer.echo(f"{asked.unlabelled}: {'; '.join(opened.corpus.notes)}")
    if opened.source is not None:
        typer.echo(f"{asked.source}: {len(opened.source.held)} rows to follow what is forgotten")
    if opened.labelled is not None:
        found = opened.labelled
        kept = "stays closed to the end" if found.closed else "is scored once, at the end"
        test = f"a test split that {kept}" if found.read_test else "no test split"
        typer.echo(
            f"{asked.labelled}: {len(found.train)} examples of {len(found.classes)} classes to "
            f"train on, {len(found.validation)} to validate on; {test}"
        )
        for note in found.notes:
            typer.echo(f"  {note}")


def tell_costs(costs: Costs, seconds: float | None, console: Console) -> None:
    """The table of a dry run."""
    from ...adapt.cache import told_bytes
    from ..demo import show

    rows = [
        {
            "arm": named(line.name),
            "steps": line.steps,
            "times": line.times,
            "batch": line.batch,
            "passes": line.passes,
            "step": f"{line.flops:.2e}",
            "total": f"{line.total:.2e}",
        }
        for line in costs.stages
    ]
    show(console, rows, STAGES, "What would run; a pass sees every example once")
    here = "" if seconds is None else f"; on this CPU roughly {words.duration(seconds)}"
    typer.echo(f"FLOPs in all: {costs.total:.2e}{here}")
    if costs.online:
        typer.echo(f"Cache: none; the teacher runs at every step: {costs.online}")
    elif costs.cache:
        typer.echo(f"Cache: {told_bytes(costs.cache)} on the disk while a round runs")
    typer.echo(f"States and models: at most {told_bytes(costs.disk)} on the disk")
    typer.echo("Nothing was trained, and nothing written.")


# -- what came out ---------------------------------------------------------------------------------


def tell_stages(result: dict[str, Any], console: Console) -> None:
    """Every stage: what was followed at the checkpoint that it kept, beside the start."""
    from ..demo import show

    if not result["stages"]:  # a classifier alone
        return
    rows, first = [], None
    for name, stage in result["stages"].items():
        line = next(each for each in stage["history"] if each["step"] == stage["kept"])
        first = first or {**stage["history"][0], "arm": "at the start", "steps": 0}
        rows.append({**line, "arm": named(name), "steps": stage["kept"]})
    assert first is not None
    rows = [first, *rows]
    shown = [column for column in SEEN if any(column.key in row for row in rows)]
    probed = any("score" in row for row in rows)
    show(console, rows, shown, "On held-out data, with the same masks")
    typer.echo(
        "Distance: l2, of the encoder's weights from the start."
        + (" Probe: accuracy of a linear and a kNN one, on labelled training data." * probed)
    )
    for name, stage in result["stages"].items():
        if stage["online"]:
            typer.echo(f"{named(name)}: the teacher ran at every step: {stage['online']}")
        if stage["kept"] < stage["steps"]:
            typer.echo(
                f"{named(name)}: the probe was best at step {stage['kept']} of {stage['steps']} "
                "taken; these weights were kept"
            )


def tell_tuned(tuned: dict[str, Any] | None) -> None:
    """The scores of the classifier."""
    if tuned is None:
        return
    for split, found in tuned["scores"].items():
        if split == "test_new":
            split = f"test without {tuned['scores']['test']['repeated']} that are also trained on"
        typer.echo(
            f"Classifier, {split}: accuracy {found['accuracy']:.1%}, macro F1 "
            f"{found['macro_f1']:.1%}, loss {found['loss']:.3f} (the largest class has "
            f"{found['largest_class']:.1%})"
        )
    if tuned["scores"]["train"]["answered"] == 1:
        typer.echo("It gives all examples the same class: give more --epochs or another --tune-lr.")
    test = tuned["scores"].get("test", {})
    if test.get("repeated") and "test_new" not in tuned["scores"]:
        typer.echo("All test examples are also trained on: their scores tell nothing of new ones.")


def tell_files(out: Path, result: dict[str, Any]) -> None:
    """Where all is."""
    saved = {"adapted": result["stages"], "classifier": result["tuned"]}
    models = " and ".join(str(out / name) for name, there in saved.items() if there)
    typer.echo(f"Saved for transformers: {models}; all numbers: {out / 'result.json'}")
    tell_states(out, {"pretraining": result["stages"], "fine-tuning": result["tuned"]})


def tell_states(out: Path, states: dict[str, Any]) -> None:
    """What is needed no more."""
    kept = " and ".join(str(out / name) for name, there in states.items() if there)
    typer.echo(f"The states of the way, in {kept}, may be deleted.")
