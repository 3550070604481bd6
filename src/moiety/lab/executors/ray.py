"""Run the trials on a Ray cluster: workers compute, and the driver alone writes the store.

    for outcome in RayExecutor("auto").run(jobs, store, tick): ...      # or "host:6379"

A worker is an actor, that is one process on some node. It keeps what its trials say (lines of
curves, checkpoints, at last the outcomes) until the driver takes it and writes it, in order. When
the process or its node dies, the driver drops the actor and gives the job to a new one, from the
last checkpoint that it has. Messages are taken, never sent, so nothing of a dropped actor, or of
the actors of a killed driver, can reach the store late.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..store import Store
from ..study import Settings, Speed
from .base import Job, Outcome, Tick, failed, versions
from .local import DEATHS
from .ray_worker import Message, Worker

LOOK = 1.0  # seconds between two looks at the nodes of the cluster
KNOCK = 10.0  # seconds for a cluster to answer; Ray itself would try for two minutes


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

    def lanes(self, job: Job) -> int:
        with _connected(self.address) as ray:
            return _room(ray, _needs([job]))

    def speeds(self, job: Job, arms: Sequence[Settings]) -> list[Speed]:
        with _connected(self.address) as ray:
            needs = _needs([job])
            _room(ray, needs)
            worker = _actor(ray, needs).remote(versions()["moiety"])
            try:
                return ray.get(worker.speeds.remote(*_portable(job), list(arms)))
            except ray.exceptions.RayActorError as error:
                raise _unable(error) from error


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Give the module `ray`, connected; a connection that was there before is used and kept."""
    # Ray would print pages on the death of a worker, which is ours to mend, over our progress.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # read when Ray is imported
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
            if not self.busy or time.monotonic() - looked >= LOOK:
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
        room, actor = _room(self.ray, self.needs), _actor(self.ray, self.needs)
        while self.waiting and len(self.busy) < room:
            self._start(self.waiting.popleft(), actor.remote(versions()["moiety"]))

    def _start(self, task: _Task, worker: Any) -> None:
        """Give a job to a worker, with the checkpoints that its trials have."""
        task.begin(worker, self.store)
        self.busy[worker.say.remote(*_packed(task.job, self.store))] = task

    def _hear(self, reference: Any) -> list[Outcome]:
        """Write what a worker says; return the outcomes when its job has ended."""
        task = self.busy.pop(reference)
        try:
            messages, ticks = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            return self._bury(task, error)
        for trial in task.job.trials:
            if trial.key in ticks:
                self.tick(trial, ticks[trial.key])
        try:
            outcomes = task.write(messages)
        except OSError:
            raise  # of our own disk
        except Exception:  # the store refuses it, as it would have in the trial itself
            self.ray.kill(task.worker)
            return [failed(trial, traceback.format_exc()) for trial in task.job.trials]
        if outcomes:
            self._next(task.worker)
        else:
            self.busy[task.worker.say.remote()] = task
        return outcomes

    def _next(self, worker: Any) -> None:
        """Give a worker that is free the next job; one that nobody holds, Ray ends in order."""
        if self.waiting:
            self._start(self.waiting.popleft(), worker)

    def _bury(self, task: _Task, error: Exception) -> list[Outcome]:
        """Let the job of a dead worker run again, or give it up."""
        if getattr(error, "actor_init_failed", False):
            raise _unable(error) from error
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

    def write(self, messages: Sequence[Message]) -> list[Outcome]:
        """Do in the store what the trials did on their node; return the outcomes, if they ended."""
        for what, key, content in messages:
            if what == "append":
                self.curves[key].append(**content)
            elif what == "rewind":
                self.curves[key].rewind(content)
            elif what == "save":
                self.checkpoints[key].save(content)
            else:
                return content
        return []


def _last_line(error: BaseException) -> str:
    return str(error).strip().rpartition("\n")[2]


def _needs(jobs: Sequence[Job]) -> dict[str, int]:
    """What a worker that can run any of these jobs takes of a node, in Ray's words."""
    needs = {"CPU": max(job.threads for job in jobs)}
    if any(torch.device(job.device).type == "cuda" for job in jobs):
        needs["GPU"] = 1
    return needs


def _room(ray: Any, needs: Mapping[str, int]) -> int:
    """How many workers the nodes of the cluster have room for; none is an error."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(_fits(node, needs) for node in nodes)
    if not room:
        wanted = " and ".join(f"{count} {name}" for name, count in needs.items())
        raise ValueError(f"no node of the Ray cluster has {wanted}; add a node that has them")
    return room


def _actor(ray: Any, needs: Mapping[str, int]) -> Any:
    """The class of the workers."""
    return ray.remote(num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0))(Worker)


def _unable(error: Exception) -> ImportError:
    return ImportError(
        f"a node of the Ray cluster cannot run Moiety ({_last_line(error)}); install "
        "the version of Moiety that runs here on every node"
    )


def _fits(node: Mapping[str, float], needs: Mapping[str, int]) -> int:
    """How many workers a node has room for."""
    return min(int(node.get(name, 0) // count) for name, count in needs.items())


def _packed(job: Job, store: Store) -> tuple[Job, str | None]:
    """Make a job ready to travel: with its checkpoints, beside the text of the study's file."""
    states: dict[str, Any] = {}
    for trial in job.trials:
        try:
            states[trial.key] = store.checkpoint(trial).load()
        except ValueError as error:
            states[trial.key] = error  # it is damaged; the trial raises it, as it would here
    return _portable(dataclasses.replace(job, states=states))


def _portable(job: Job) -> tuple[Job, str | None]:
    """A job as any node can read it, and the text of the study's file."""
    # Ray shows a worker only the GPU that it may use, whatever its number on the node.
    job = dataclasses.replace(job, device=torch.device(job.device).type)
    if not job.reference.endswith((".py", ".toml")):
        return job, None
    path = Path(job.reference).resolve()
    return dataclasses.replace(job, reference=str(path)), path.read_text(encoding="utf-8")
