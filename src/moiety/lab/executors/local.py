"""Run the trials here: in this process, or in several local ones."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from ..store import Store, Trial
from ..study import Settings, Speed
from .base import Job, Outcome, Tick, failed, measure_speeds, run_job

DEATHS = 3  # of its worker, after which a job is given up
LOCK = ".workers.lock"
PAUSE = 0.1  # seconds between two messages about the progress of a job


class InProcess:
    """One trial after the other, in this process."""

    def run(self, jobs: Sequence[Job], store: Store, tick: Tick) -> Iterator[Outcome]:
        for job in jobs:
            yield from run_job(job, store.curve, store.checkpoint, tick)

    def lanes(self, job: Job) -> int:
        return 1

    def speeds(self, job: Job, arms: Sequence[Settings]) -> list[Speed]:
        return measure_speeds(job, arms)


class Processes(InProcess):
    """Several processes; one that dies is replaced, and its job runs again from its checkpoint."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"there must be at least one worker, not {workers}")
        self.workers = workers

    def run(self, jobs: Sequence[Job], store: Store, tick: Tick) -> Iterator[Outcome]:
        waiting = deque(_Task(job) for job in jobs)
        workers = [_Worker(store.folder) for _ in range(min(self.workers, len(jobs)))]
        try:
            while waiting or any(worker.task for worker in workers):
                for worker in workers:
                    if worker.task is None and waiting:
                        worker.give(waiting.popleft())
                for worker in _speaking(workers):
                    yield from self._hear(worker, waiting, tick)
        finally:
            for worker in workers:
                worker.end()

    def lanes(self, job: Job) -> int:
        if torch.device(job.device).type != "cpu":
            return 1  # the workers of one GPU share it
        return max(1, min(self.workers, (os.cpu_count() or 1) // job.threads))

    def _hear(self, worker: _Worker, waiting: deque[_Task], tick: Tick) -> list[Outcome]:
        """Take one message of a worker; its silence for ever is a message too."""
        task = worker.task
        assert task is not None
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            code = worker.restart()
            task.deaths += 1
            if task.deaths < DEATHS:
                waiting.appendleft(task)
                return []
            reason = f"its process died {DEATHS} times (exit code {code}); is memory too small?"
            return [failed(trial, f"RuntimeError: {reason}") for trial in task.job.trials]
        if isinstance(message, tuple):
            number, fraction = message
            tick(task.job.trials[number], fraction)
            return []
        worker.task = None
        return message


@dataclass
class _Task:
    """A job, and how often its worker died."""

    job: Job
    deaths: int = 0


class _Worker:
    """A process that runs jobs, and the pipe to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.task: _Task | None = None
        self.pipe, self.process = self._start()

    def _start(self) -> tuple[Connection, BaseProcess]:
        # Spawned, not forked: a fork copies the locks of torch's threads in any state.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self.folder), daemon=True)
        with _no_interrupts():
            process.start()
        theirs.close()  # so that the worker's death is the end of the pipe
        return ours, process

    def give(self, task: _Task) -> None:
        self.task = task
        with contextlib.suppress(OSError):  # it has died: the next `recv` finds out
            self.pipe.send(task.job)

    def restart(self) -> int | None:
        """Put a new process in the place of a dead one; return the exit code."""
        self.end()
        code, self.task = self.process.exitcode, None
        self.pipe, self.process = self._start()
        return code

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()  # it may be in the middle of anything: the store is made for that
        self.process.join()


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """Block Ctrl-C, which a process that is started meanwhile inherits: it is for the driver."""
    resource_tracker.ensure_running()  # the start of this one, by the first worker, unblocks it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _speaking(workers: Sequence[_Worker]) -> list[_Worker]:
    """Wait until a busy worker has something to say."""
    busy = {worker.pipe: worker for worker in workers if worker.task}
    return [busy[pipe] for pipe in wait(list(busy)) if isinstance(pipe, Connection)]


def _work(pipe: Connection, folder: Path) -> None:
    """The life of a worker: run job after job, until the driver is gone."""
    parent, store = multiprocessing.parent_process(), Store(folder)
    assert parent is not None
    with _lock(folder, shared=True):
        if wait([parent.sentinel], timeout=0):  # killed while we were starting
            return
        die_with_parent()
        while True:
            try:
                job = pipe.recv()
            except EOFError:
                return
            pipe.send(run_job(job, store.curve, store.checkpoint, _messenger(pipe, job)))


def die_with_parent() -> None:
    """End this process as soon as the one that started it is gone, whatever it is doing."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_follow, args=(parent.sentinel,), daemon=True).start()


def _follow(parent: int) -> None:
    wait([parent])
    os._exit(1)


def wait_for_workers(folder: Path) -> None:
    """Wait until the workers of a driver that was killed are gone.

    They follow it within moments. But a trial of theirs may be our first, and two processes must
    not write one curve.
    """
    with _lock(folder, shared=False):
        pass


@contextlib.contextmanager
def _lock(folder: Path, *, shared: bool) -> Iterator[None]:
    """Hold the lock that says that there are workers; the kernel drops it with the process."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


def _messenger(pipe: Connection, job: Job) -> Tick:
    """Tell the driver how far a trial is, but not too often."""
    last = 0.0

    def tick(trial: Trial, fraction: float) -> None:
        nonlocal last
        if time.monotonic() - last > PAUSE:
            last = time.monotonic()
            pipe.send((job.trials.index(trial), fraction))

    return tick
