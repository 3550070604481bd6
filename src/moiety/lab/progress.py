"""How far a run has come: bars in a terminal, one line a trial elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
)

from ..report.words import number
from .executors.base import Outcome
from .store import Trial
from .study import Study


class Course:
    """Shows the trials of one stage: done of total, those in flight, and the time left."""

    def __init__(self, console: Console, study: Study, title: str, trials: Sequence[Trial]) -> None:
        self.console, self.study, self.title = console, study, title
        self.total, self.done, self.start = len(trials), 0, time.monotonic()
        self.wanted = {trial.key for trial in trials}
        self.flying: dict[str, float] = {}
        self.bars: dict[str, TaskID] = {}
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self.progress.start()
        self.whole = self.progress.add_task(self.title, total=self.total, note=self._note())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.progress.stop()

    def tick(self, trial: Trial, fraction: float) -> None:
        """Note how much of a trial is done."""
        if trial.key not in self.wanted:  # a block holds trials that nobody asked for
            return
        self.flying[trial.key] = min(max(fraction, 0.0), 1.0)
        if trial.key not in self.bars:
            name = f"  {trial.arm}, seed {trial.seed}"
            self.bars[trial.key] = self.progress.add_task(name, total=1.0, note="")
        self.progress.update(self.bars[trial.key], completed=fraction)
        self._whole()

    def end(self, outcome: Outcome) -> None:
        """Note that a trial has ended."""
        key = outcome.trial.key
        self.done += 1
        self.flying.pop(key, None)
        if key in self.bars:
            self.progress.remove_task(self.bars.pop(key))
        self._whole()
        if outcome.traceback or not self.console.is_terminal:
            self.console.print(self._line(outcome), markup=False, highlight=False, soft_wrap=True)

    def _whole(self) -> None:
        came = self.done + sum(self.flying.values())
        self.progress.update(self.whole, completed=came, note=self._note())

    def _note(self) -> str:
        return f"{self.done}/{self.total} trials, {self._left()}"

    def _left(self) -> str:
        """The time left, if the trials to come are like those that were."""
        came = self.done + sum(self.flying.values())
        if came < 0.02 * self.total or not came:
            return "time left not known yet"
        return f"{duration((self.total - came) * (time.monotonic() - self.start) / came)} left"

    def _line(self, outcome: Outcome) -> str:
        trial = outcome.trial
        name = f"{self.done}/{self.total} {trial.arm}, seed {trial.seed}"
        if outcome.traceback:
            return f"{name}: failed: {outcome.traceback.strip().splitlines()[-1]}"
        metrics = outcome.metrics or {}
        shown = [
            f"{metric.label} {number(metrics[key], metric.format)}"
            for key, metric in self.study.metrics.items()
            if key in metrics
        ]
        left = "" if self.done == self.total else f"; {self._left()}"
        return f"{name}: {', '.join(shown[:3])} ({duration(outcome.duration)}{left})"


def duration(seconds: float) -> str:
    """A time to read: "0.42 s", "12 s", "3 min", "1 h 20 min"."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
