"""Every program that the studies of image streams ask for, run by several workers before them.

    python -m moiety.studies.anytime.courses full cuda 8 mnist adaptive-wait replay-mnist
    python -m moiety.studies.anytime.courses full cuda 4 cifar replay-cifar       # then the studies
    python -m moiety.studies.anytime.courses full cuda 4 cifar:10                 # of ten seeds

Studies run what they lack themselves, one program after the other. But a program of small models
leaves most of a GPU idle, and the arms of a cell all want the same one; so programs come first,
different ones side by side, the long ones before the short ones. It may be killed; the same
command goes on after the last phases of what was under way.
"""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from ...lab.executors.local import die_with_parent
from ...lab.study import Settings, Study
from ...train import find_device
from . import adaptive_wait, cifar, mnist, replay, vision

COPIES = {"mixture": 3, "growing-moe": 3, "firefly": 6}  # what a learner costs in single models
STACK = 4  # copies of a seed in one program: three members, and the one of a growing ensemble


@dataclass(frozen=True)
class Job:
    """One program; of a policy, which is known only after other programs, that of one seed."""

    settings: Settings
    seeds: tuple[int, ...]
    seed: int | None = None

    @property
    def key(self) -> str:
        if self.seed is not None:
            return json.dumps([self.name, self.seed])
        return json.dumps([*vision.program_of(self.settings), self.seeds])

    @property
    def name(self) -> str:
        own = self.settings
        words = [own["data"], own["learner"], f"c={own['width']}"]
        words += [f"w={own['wait']}" if "wait" in own else own["policy"]]
        words += [f"r={own['replay']}"] if own.get("replay") else []
        return " ".join([*words, *["equal steps"] * bool(own.get("capped"))])

    @property
    def order(self) -> tuple[bool, float]:
        """What others wait for is first, then the longest: single models, times their size."""
        own = self.settings
        if self.seed is not None:
            return True, -0.1
        after = bool(own.get("capped"))
        size = own["width"] ** 2 if own["model"] == "vgg" else 0.1
        passes = 1.0
        if own.get("replay") == "1" and not own.get("capped"):
            passes = (math.ceil(own["batches"] / int(vision.wait_of(own))) + 1) / 2
        usual = STACK if len(vision.program_of(own)[1]) > 1 else 1
        return after, -size * passes * COPIES.get(own["learner"], usual)

    def run(self, device: torch.device) -> None:
        if self.seed is None:
            vision.course_of(self.settings, self.seeds, device)
        else:
            asked = adaptive_wait.policy(self.settings, self.seeds, device)
            vision.course_of(asked, (self.seed,), device)


def blocks(study: Study, seeds: int, copies: int | None) -> list[tuple[int, ...]]:
    """The seeds of each block, as the lab deals them out."""
    firsts = range(0, seeds, study.block)
    return [tuple(range(first, first + study.block))[:copies] for first in firsts]


def jobs_of(name: str, scale: str) -> Iterator[Job]:
    """What the arms of a study ask for; "replay-mnist" and "replay-cifar" are its halves.

    "cifar:10": with so many seeds instead of the scale's.
    """
    name, _, many = name.partition(":")
    name, _, part = name.partition("-") if name.startswith("replay") else (name, "", "")
    modules: dict[str, Any] = {
        "mnist": mnist,
        "cifar": cifar,
        "replay": replay,
        "adaptive-wait": adaptive_wait,
    }
    if name not in modules:
        raise ValueError(f"there are no courses of {name!r}; there are {', '.join(modules)}")
    study = modules[name].study
    count = int(many) if many else study.scale(scale).seeds
    for arm in study.arms.values():
        settings = {**study.scale(scale).settings, **arm, "scale": scale}
        if name == "replay":
            if part not in ("", arm["set"].lower()):
                continue
            settings = replay.of_set(settings)
        for seeds in blocks(study, count, settings.get("copies")):
            if "wait" in settings:
                yield Job(settings, seeds)
            elif settings["policy"] != adaptive_wait.BEST:
                yield from (Job(settings, seeds, seed) for seed in seeds)


def all_jobs(scale: str, *names: str) -> list[Job]:
    """Each program once, in the order in which they should begin."""
    found: dict[str, Job] = {}
    for job in (job for name in names for job in jobs_of(name, scale)):
        found.setdefault(job.key, job)
    return sorted(found.values(), key=lambda job: job.order)


def _work(job: Job, device: str) -> tuple[str, float, str]:
    torch.set_num_threads(1)
    start, wrong = time.monotonic(), ""
    try:
        job.run(find_device(device))
    except Exception as error:  # the others go on; the study says what is missing
        wrong = f"{type(error).__name__}: {error}"
    if torch.cuda.is_available():  # others need what this program held
        gc.collect()
        torch.cuda.empty_cache()
    return job.name, time.monotonic() - start, wrong


def main(scale: str, device: str, workers: str, *names: str) -> None:
    """Run what is missing, and say how long each program took."""
    began, say = time.monotonic(), Console(highlight=False, width=120).print
    jobs = all_jobs(scale, *names)
    if not jobs[0].settings.get("kept"):
        raise ValueError(f"nothing of the scale {scale!r} is kept: run the studies themselves")
    say(f"{len(jobs)} programs")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(int(workers), spawn, die_with_parent) as crew:
        asked = [crew.submit(_work, job, device) for job in jobs]
        for number, ended in enumerate(as_completed(asked), start=1):
            name, seconds, wrong = ended.result()
            now = time.monotonic() - began
            say(f"{number}/{len(jobs)} {name}: {seconds:.0f} s, {now:.0f} s in all {wrong}".strip())


if __name__ == "__main__":
    main(*sys.argv[1:])
