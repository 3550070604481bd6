"""Run the trials on a Ray cluster: workers compute, and the driver alone writes the store.

    for outcome in RayExecutor("auto").run(jobs, store, tick): ...      # or "host:6379"

A worker is an actor, that is one process on some node. It keeps what its trials say (lines of
curves, checkpoints, at last the outcomes) until the driver takes it and writes it, in order. When
the process or its node dies, the driver drops the actor and gives the job to a new one, from the
last checkpoint that it has. Messages are taken, never sent, so nothing of a dropped actor, or of
the actors of a killed driver, can reach the store late.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
import os
import socket
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import _pack, _unpack
from ..store import Store, Trial, _plain
from .base import Job, Outcome, Tick, failed, run_job, versions
from .local import DEATHS

LOOK = 1.0  # seconds between two looks at the nodes of the cluster, and between two ticks
FULL = 1000  # messages that a worker keeps before its trial waits for the driver
KNOCK = 10.0  # seconds for a cluster to answer; Ray itself would try for two minutes
Message = tuple[str, str, Any]  # what to do, the key of the trial, with what


class RayExecutor:
    """As many jobs at once as the nodes of the cluster at `address` have room for."""

    def __init__(self, address: str) -> None:
        self.address = address

    def run(self, jobs: Sequence[Job], store: Store, tick: Tick) -> Iterator[Outcome]:
        if not jobs:
            return
        with _connected(self.address) as ray:
            driver = _Driver(ray, store, tick, jobs)
            try:
                yield from driver.outcomes()
            finally:
                driver.end()


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Give the module `ray`, connected; a connection that was there before is used and kept."""
    try:
        import ray
    except ImportError:
        raise ImportError(
            'a Ray cluster needs Ray: pip install "moiety[ray]" here and on each of its nodes'
        ) from None
    before = ray.is_initialized()
    if not before:
        try:
            _knock(address)
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (Exception, SystemExit) as error:  # Ray leaves by SystemExit where none answers
            raise ConnectionError(
                f"no connection to a Ray cluster at {address!r} ({_last_line(error)}); start one "
                "by `ray start --head`, or give its address as auto, host:port or ray://host:port"
            ) from error
    try:
        yield ray
    finally:
        if not before:
            ray.shutdown()


def _knock(address: str) -> None:
    """Raise at once where nothing listens."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK).close()


class _Driver:
    """Gives jobs to workers and writes what they say."""

    def __init__(self, ray: Any, store: Store, tick: Tick, jobs: Sequence[Job]) -> None:
        self.ray, self.store, self.tick = ray, store, tick
        self.needs = _needs(jobs)
        self.waiting = deque(_Task(job) for job in jobs)
        self.busy: dict[Any, _Task] = {}  # by the reference of what the worker will say next

    def outcomes(self) -> Iterator[Outcome]:
        """Run all jobs."""
        looked = -LOOK
        while self.waiting or self.busy:
            if time.monotonic() - looked >= LOOK:
                self._fill()
                looked = time.monotonic()
            # One at a time: what speaks again goes to the end of `busy`, so all have their turn.
            for reference in self.ray.wait(list(self.busy), timeout=LOOK)[0]:
                yield from self._hear(reference)

    def end(self) -> None:
        for task in self.busy.values():
            self.ray.kill(task.worker)

    def _fill(self) -> None:
        """Start a worker for each job that the nodes have room for."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        room = sum(_fits(node, self.needs) for node in nodes)
        if not room:
            wanted = " and ".join(f"{count} {name}" for name, count in self.needs.items())
            raise ValueError(f"no node of the Ray cluster has {wanted}; add a node that has them")
        cpus, gpus = self.needs["CPU"], self.needs.get("GPU", 0)
        actor = self.ray.remote(num_cpus=cpus, num_gpus=gpus)(_Worker)
        while self.waiting and len(self.busy) < room:
            self._start(self.waiting.popleft(), actor.remote(versions()["moiety"]))

    def _start(self, task: _Task, worker: Any) -> None:
        """Give a job to a worker, with the checkpoints that its trials have."""
        task.begin(worker, self.store)
        worker.start.remote(*_packed(task.job, self.store))
        self._listen(task)

    def _listen(self, task: _Task) -> None:
        self.busy[task.worker.say.remote()] = task

    def _hear(self, reference: Any) -> list[Outcome]:
        """Write what a worker says; return the outcomes when its job has ended."""
        task = self.busy.pop(reference)
        try:
            messages, ticks = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            self.ray.kill(task.worker)
            raise RuntimeError(f"a worker of the Ray cluster is broken: {error}") from error
        except self.ray.exceptions.RayError as error:
            return self._bury(task, error)
        for trial in task.job.trials:
            if trial.key in ticks:
                self.tick(trial, ticks[trial.key])
        try:
            for what, key, content in messages:
                if what == "end":
                    self._next(task.worker)
                    return content
                task.write(what, key, content)
        except OSError:
            raise  # of our own disk
        except Exception:  # the store refuses it, as it would have in the trial itself
            self.ray.kill(task.worker)
            return [failed(trial, traceback.format_exc()) for trial in task.job.trials]
        self._listen(task)
        return []

    def _next(self, worker: Any) -> None:
        """Give a worker that is free the next job; one that nobody holds, Ray ends in order."""
        if self.waiting:
            self._start(self.waiting.popleft(), worker)

    def _bury(self, task: _Task, error: Exception) -> list[Outcome]:
        """Let the job of a dead worker run again, or give it up."""
        if getattr(error, "actor_init_failed", False):
            raise ImportError(
                f"a node of the Ray cluster cannot run Moiety ({_last_line(error)}); install "
                "the version of Moiety that runs here on every node"
            ) from error
        self.ray.kill(task.worker)  # it may be alive, behind a network that is not
        task.deaths += 1
        if task.deaths < DEATHS:
            self.waiting.appendleft(task)
            self._fill()
            return []
        reason = f"its process died {DEATHS} times; is memory too small?"
        said = f"{error}\nRuntimeError: {reason}"
        return [failed(trial, said) for trial in task.job.trials]


class _Task:
    """A job, the worker that has it now, and how often one died of it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.deaths = 0

    def begin(self, worker: Any, store: Store) -> None:
        self.worker = worker
        self.curves = {trial.key: store.curve(trial) for trial in self.job.trials}
        self.checkpoints = {trial.key: store.checkpoint(trial) for trial in self.job.trials}

    def write(self, what: str, key: str, content: Any) -> None:
        """Do in the store what a trial did on its node."""
        if what == "append":
            self.curves[key].append(**content)
        elif what == "rewind":
            self.curves[key].rewind(content)
        else:
            self.checkpoints[key].save(content)


def _last_line(error: BaseException) -> str:
    return str(error).strip().rpartition("\n")[2]


def _needs(jobs: Sequence[Job]) -> dict[str, int]:
    """What a worker that can run any of these jobs takes of a node, in Ray's words."""
    needs = {"CPU": max(job.threads for job in jobs)}
    if any(torch.device(job.device).type == "cuda" for job in jobs):
        needs["GPU"] = 1
    return needs


def _fits(node: Mapping[str, float], needs: Mapping[str, int]) -> int:
    """How many workers a node has room for."""
    return min(int(node.get(name, 0) // count) for name, count in needs.items())


def _packed(job: Job, store: Store) -> tuple[Job, str | None]:
    """Make a job ready to travel: with its checkpoints, and the text of the study's file."""
    states = {trial.key: store.checkpoint(trial).load() for trial in job.trials}
    for trial in job.trials:
        if states[trial.key] is None:  # it starts again; what was taken from a dead worker goes
            store.curve(trial).rewind(-1)
    # Ray shows a worker only the GPU that it may use, whatever its number on the node.
    job = dataclasses.replace(job, states=states, device=torch.device(job.device).type)
    if not job.reference.endswith((".py", ".toml")):
        return job, None
    path = Path(job.reference).resolve()
    return dataclasses.replace(job, reference=str(path)), path.read_text(encoding="utf-8")


class _Worker:
    """Runs jobs on a node, in a thread, and keeps what they say until the driver takes it."""

    def __init__(self, version: str) -> None:
        if version != versions()["moiety"]:
            raise ImportError(f"it has version {versions()['moiety']}, the driver {version}")
        self.changed = threading.Condition()
        self.messages: list[Message] = []
        self.ticks: dict[str, float] = {}
        self.copies: dict[str, tempfile.TemporaryDirectory[str]] = {}  # of study files, by digest

    def start(self, job: Job, text: str | None) -> None:
        """Begin a job and return at once."""
        if text is not None:
            job = dataclasses.replace(job, reference=self._file(Path(job.reference), text))
        threading.Thread(target=self._work, args=(job,), daemon=True).start()

    def say(self) -> tuple[list[Message], dict[str, float]]:
        """Give what the job has said since the last time, soon after there is something."""
        with self.changed:
            self.changed.wait_for(lambda: self.messages, timeout=LOOK)
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

    def _work(self, job: Job) -> None:
        try:
            outcomes = run_job(
                job,
                lambda trial: _Curve(self, trial.key),
                lambda trial: _Checkpoint(self, trial.key, job.states[trial.key]),
                self._tick,
            )
        except BaseException:
            os._exit(1)  # code that leaves by SystemExit ends its process, here as elsewhere
        self.keep("end", "", outcomes)

    def _tick(self, trial: Trial, fraction: float) -> None:
        self.ticks[trial.key] = fraction

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


class _Curve:
    """The curve of a trial, as its node sees it."""

    def __init__(self, worker: _Worker, key: str) -> None:
        self.worker, self.key = worker, key

    def append(self, step: int, **values: float | None) -> None:
        row = _plain({"step": step, **values}, f"curve of {self.key}")
        self.worker.keep("append", self.key, row)

    def rewind(self, step: int) -> None:
        self.worker.keep("rewind", self.key, step)


class _Checkpoint:
    """The checkpoint of a trial, as its node sees it."""

    def __init__(self, worker: _Worker, key: str, state: dict[str, Any] | None) -> None:
        self.worker, self.key, self.state = worker, key, state

    def save(self, state: Mapping[str, Any]) -> None:
        tensors: dict[str, torch.Tensor] = {}
        # A copy on the CPU, since training goes on and the driver may have no GPU.
        self.state = _unpack(_pack(dict(state), tensors), tensors)
        # The trial waits until it is taken: two of them may be too much for memory.
        self.worker.keep("save", self.key, self.state, full=1)

    def load(self) -> dict[str, Any] | None:
        return copy.deepcopy(self.state)  # optimizers train on in the tensors they are given
