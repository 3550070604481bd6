"""Who runs the trials: this process, several local ones, or a Ray cluster.

    for outcome in Processes(4).run(jobs, store, tick):
        store.finish(outcome.trial, outcome.metrics, ...)

Only the driver writes records; `ray.py` is imported where a cluster is asked for.
"""

from .base import Executor, Job, Outcome, Tick, failed, run_job, versions
from .local import InProcess, Processes

__all__ = [
    "Executor",
    "InProcess",
    "Job",
    "Outcome",
    "Processes",
    "Tick",
    "failed",
    "run_job",
    "versions",
]
