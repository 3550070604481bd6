"""Jobs, their outcomes, and the one function that runs a job, whoever the executor is.

A job is what one worker runs at once: a trial, or a fixed block of them. Every executor hands it to
`run_job`, in the process that computes, with the same threads and the same seeds of the global
generators, so that all of them give the same bits.
"""

from __future__ import annotations

import functools
import os
import platform
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from ...train.loop import Curve
from ..loading import load_study
from ..shapes import EXTRA, check
from ..store import Store, Trial, _is_finite, _plain
from ..study import Checkpoint, Running, Settings, Speed, Study

Tick = Callable[[Trial, float], None]  # how much of a trial is done, 0 to 1


@dataclass
class Job:
    """What one worker runs at once."""

    reference: str  # of the study
    trials: list[Trial]
    device: str
    threads: int
    states: dict[str, Any] = field(default_factory=dict)  # checkpoints that travel, by key (Ray)


@dataclass
class Outcome:
    """How a trial ended: with metrics, or with the traceback of what it raised."""

    trial: Trial
    metrics: Mapping[str, float | None] | None
    traceback: str | None
    duration: float
    versions: dict[str, str]
    extra: dict[str, Any] = field(default_factory=dict)


class Executor(Protocol):
    """Runs jobs; a plan asks it how many at once, and for the speed of the machine that it uses."""

    def run(self, jobs: Sequence[Job], store: Store, tick: Tick) -> Iterator[Outcome]:
        """Yield one outcome a trial, in whatever order they end."""
        ...

    def lanes(self, job: Job) -> int:
        """How many jobs like this one, of which only device and threads count, run at once."""
        ...

    def speeds(self, job: Job, arms: Sequence[Settings]) -> list[Speed]:
        """Measure what an example costs with the settings of each arm, where trials would run."""
        ...


def run_job(
    job: Job,
    open_curve: Callable[[Trial], Curve],
    open_checkpoint: Callable[[Trial], Checkpoint],
    tick: Tick,
) -> list[Outcome]:
    """Run a job in this process; what its code raises becomes the outcome of its trials."""
    device, start = torch.device(job.device), time.perf_counter()
    runs = [
        Running(t, device, open_curve(t), open_checkpoint(t), functools.partial(tick, t))
        for t in job.trials
    ]
    try:
        study = _loaded(job.reference, _stamp(job.reference))
        _begin_anew(runs)
        with fixed_threads(job.threads), seeded_all(job.trials[0].seed, device):
            found = study.run_block(runs) if study.run_block else [study.run(runs[0])]  # type: ignore[misc]
        if len(found) != len(runs):
            raise ValueError(f"run_block gave {len(found)} results for {len(runs)} trials")
        failures = [_complaint(study, run, metrics) for run, metrics in zip(runs, found)]
    except (Exception, SystemExit):  # an interrupt is the driver's
        found = [{}] * len(runs)
        failures = [traceback.format_exc()] * len(runs)
    # A block's time is shared out evenly: its trials ran as one program.
    duration, said = (time.perf_counter() - start) / len(runs), versions(device)
    return [
        Outcome(run.trial, None if bad else dict(metrics), bad, duration, said, _extra(run))
        for run, metrics, bad in zip(runs, found, failures)
    ]


def measure_speeds(job: Job, arms: Sequence[Settings]) -> list[Speed]:
    """Measure in this process what an example costs with the settings of each arm."""
    study, device = _loaded(job.reference, _stamp(job.reference)), torch.device(job.device)
    if study.speed is None:
        raise ValueError(f"study {study.name!r} has no `speed`, which a time budget needs")
    with fixed_threads(job.threads), seeded_all(0, device):
        return [study.speed(settings, device) for settings in arms]


def _begin_anew(runs: Sequence[Running]) -> None:
    """Empty the curves that a kill or an error left, unless there is a checkpoint to go on from.

    One checkpoint is enough: the trials of a block may keep theirs in one of them.
    """
    if not any(run.checkpoint.exists() for run in runs):
        for run in runs:
            run.curve.rewind(-1)


def failed(trial: Trial, reason: str) -> Outcome:
    """The outcome of a trial that no process could bring to an end."""
    return Outcome(trial, None, reason, 0.0, versions())


def versions(device: torch.device | None = None) -> dict[str, str]:
    """What a result may depend on, with the name of the GPU where it was computed on one."""
    gpu = device is not None and device.type == "cuda" and torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "moiety": sys.modules["moiety"].__version__,
        **({"gpu": torch.cuda.get_device_name(device)} if gpu else {}),
    }


@contextmanager
def fixed_threads(threads: int) -> Iterator[None]:
    """Compute with so many threads inside: their number changes the last bits of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def seeded_all(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators, for code that forgets its own; they are restored at the end."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def _complaint(study: Study, run: Running, metrics: Mapping[str, Any]) -> str | None:
    """Say in one sentence why what a trial gave cannot be kept, if it cannot."""
    lost = [name for name in study.metrics if name not in metrics]
    extra = [name for name in metrics if name not in study.metrics]
    if extra:
        return f"ValueError: the study has no metric {extra[0]!r}; it has {list(study.metrics)}"
    if lost:
        return f"ValueError: the trial gave no metric {lost[0]!r}; it gave {list(metrics)}"
    for name, value in metrics.items():
        if value is not None and not _is_finite(value):
            return f"ValueError: metric {name!r} is {value!r}; give a finite int or float, or None"
    try:
        _plain(run.extra, "extra")
        for name, value in run.extra.items():
            if name in EXTRA:  # the page shows it, and must not fail when all trials have ended
                check(value, EXTRA[name], f"extra.{name}")
    except ValueError as error:
        return f"ValueError: {error}"
    return None


def _extra(run: Running) -> dict[str, Any]:
    try:
        return _plain(run.extra, "extra")
    except ValueError:
        return {}  # the trial is recorded as failed, and says so


def _stamp(reference: str) -> int:
    """When a study's file was last written: a changed file is loaded anew."""
    return os.stat(reference).st_mtime_ns if reference.endswith((".py", ".toml")) else 0


@functools.lru_cache(maxsize=4)
def _loaded(reference: str, _stamp: int) -> Study:
    return load_study(reference)
