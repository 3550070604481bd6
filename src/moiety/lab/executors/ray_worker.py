"""What runs trials on a node of a Ray cluster, and keeps what they say for the driver.

Nothing of Ray is used here: `ray.py` makes an actor of `Worker`.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import os
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...train.state import pack, unpack
from ..store import Trial, _plain
from ..study import Settings, Speed
from .base import Job, failed, measure_speeds, run_job, versions

PAUSE = 1.0  # seconds after which a worker answers also when its trials have said nothing
FULL = 1000  # messages that a worker keeps before its trial waits for the driver
Message = tuple[str, str, Any]  # what to do, the key of the trial, with what
Said = tuple[list[Message], dict[str, float]]  # messages, and how much is done of each trial


class Worker:
    """Runs jobs on a node, in a thread, and keeps what they say until the driver takes it."""

    def __init__(self, version: str) -> None:
        if version != versions()["moiety"]:
            raise ImportError(f"it has version {versions()['moiety']}, the driver {version}")
        self.changed = threading.Condition()
        self.messages: list[Message] = []
        self.ticks: dict[str, float] = {}
        self.copies: dict[str, tempfile.TemporaryDirectory[str]] = {}  # of study files, by digest

    def say(self, job: Job | None = None, text: str | None = None) -> Said:
        """Begin a job where one is given; give what it has said, soon after there is something."""
        if job is not None:
            threading.Thread(target=self._work, args=(job, text), daemon=True).start()
        with self.changed:
            self.changed.wait_for(lambda: self.messages, timeout=PAUSE)
            said = self.messages, self.ticks
            self.messages, self.ticks = [], {}
            self.changed.notify_all()
        return said

    def keep(self, what: str, key: str, content: Any, *, full: int = FULL) -> None:
        """Keep a message; wait while there are `full` of them, so that memory stays bounded."""
        with self.changed:
            self.messages.append((what, key, content))
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(self.messages) < full)

    def speeds(self, job: Job, text: str | None, arms: Sequence[Settings]) -> list[Speed]:
        """Measure what an example costs on this node."""
        return measure_speeds(self._here(job, text), arms)

    def _work(self, job: Job, text: str | None) -> None:
        try:
            job = self._here(job, text)
            outcomes = run_job(
                job,
                lambda trial: Curve(self, trial.key),
                lambda trial: Checkpoint(self, trial.key, job.states[trial.key]),
                self._tick,
            )
        except Exception:  # of this node, such as a full disk: `run_job` keeps those of trials
            outcomes = [failed(trial, traceback.format_exc()) for trial in job.trials]
        except BaseException:
            os._exit(1)  # code that leaves by SystemExit ends its process, here as elsewhere
        self.keep("end", "", outcomes)

    def _tick(self, trial: Trial, fraction: float) -> None:
        self.ticks[trial.key] = fraction

    def _here(self, job: Job, text: str | None) -> Job:
        """The job with a reference that this node can load."""
        if text is None:
            return job
        return dataclasses.replace(job, reference=self._file(Path(job.reference), text))

    def _file(self, path: Path, text: str) -> str:
        """Find a study's file: at its own path where this node has it, or else in a copy.

        The file itself is better: it may read others beside it, which do not travel.
        """
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            return str(path)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest not in self.copies:  # the second job finds the study loaded
            self.copies[digest] = tempfile.TemporaryDirectory(prefix="moiety-")
        place = Path(self.copies[digest].name) / path.name
        if not place.exists():
            place.write_text(text, encoding="utf-8")
        return str(place)


class Curve:
    """The curve of a trial, as its node sees it."""

    def __init__(self, worker: Worker, key: str) -> None:
        self.worker, self.key = worker, key

    def append(self, step: int, **values: float | None) -> None:
        row = _plain({"step": step, **values}, f"curve of {self.key}")
        self.worker.keep("append", self.key, row)

    def rewind(self, step: int) -> None:
        self.worker.keep("rewind", self.key, step)


class Checkpoint:
    """The checkpoint of a trial, as its node sees it."""

    def __init__(self, worker: Worker, key: str, state: dict[str, Any] | ValueError | None) -> None:
        self.worker, self.key, self.state = worker, key, state

    def save(self, state: Mapping[str, Any]) -> None:
        tensors: dict[str, torch.Tensor] = {}
        # A copy on the CPU, since training goes on and the driver may have no GPU.
        self.state = unpack(pack(state, tensors), tensors)
        # The trial waits until it is taken: two of them may be too much for memory.
        self.worker.keep("save", self.key, self.state, full=1)

    def exists(self) -> bool:
        return self.state is not None

    def load(self) -> dict[str, Any] | None:
        if isinstance(self.state, ValueError):
            raise self.state
        return copy.deepcopy(self.state)  # optimizers train on in the tensors they are given
