"""Every encoder that the studies of a batch fine-tune, made by several workers before they begin.

    python -m moiety.studies.adapt.preparing full cuda 12 image            # then the studies
    python -m moiety.studies.adapt.preparing full cuda 12 gap ablation     # of these alone

Studies make what they lack themselves. But the points of a search all want one encoder, and would
wait for the one of them that trains it, most workers idle; so encoders come first, different ones
side by side. It may be killed; the same command goes on.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from typing import Any

from rich.console import Console

from ...lab.executors.local import die_with_parent
from ...train import find_device
from . import pool
from .projection import BATCHES
from .sources import source

Asked = tuple[dict[str, Any], list[int]]  # the settings of an arm, and its seeds


def encoders(scale: str, studies: Sequence[str]) -> list[Asked]:
    """Arms with all seeds, one for each plan that is trained; teachers before their students."""
    found: dict[str, tuple[int, Asked]] = {}
    for name in studies:
        study = import_module(f"{__package__}.{name.replace('-', '_')}").study
        whole = study.scale(scale)
        sets = [one for arm in study.arms.values() for one in pool.each_of(arm)]
        for one in sets:
            settings = {**whole.settings, **one}
            plan = pool.plan_of(settings)
            if plan is None:
                continue
            words = [pool.target_of(settings), pool.labels_of(settings), one.get("experts"), plan]
            asked, key = (settings, list(range(whole.seeds))), json.dumps(words, sort_keys=True)
            if key not in found or len(found[key][1][1]) < whole.seeds:
                found[key] = depth(plan), asked
    return [asked for _, asked in sorted(found.values(), key=lambda one: one[0])]


def depth(plan: pool.Plan | None) -> int:
    """How many stages a plan has."""
    return 0 if plan is None else 1 + depth(plan.get("teacher"))


def _source(asked: tuple[Any, int, str, str]) -> None:
    kind, seed, scale, device = asked
    source(kind, seed, scale, device=find_device(device))


def _encoders(asked: tuple[dict[str, Any], list[int], str]) -> None:
    settings, seeds, device = asked
    cases = [pool.case_of(settings, seed, find_device(device)) for seed in seeds]
    pool.make(cases, pool.plan_of(settings))


def main(scale: str, device: str, workers: str, *asked: str) -> None:
    """Make the sources of a batch or of some studies, then encoders; say how long each took."""
    began, say = time.monotonic(), Console(highlight=False).print
    wanted = {name for word in asked or BATCHES for name in BATCHES.get(word, [word])}
    if unknown := wanted - {name for batch in BATCHES.values() for name in batch}:
        raise SystemExit(f"there is no study adapt/{min(unknown)} that needs encoders")
    spawn = multiprocessing.get_context("spawn")
    # It ends where a worker is killed, and they with it.
    with ProcessPoolExecutor(int(workers), spawn, die_with_parent) as crew:
        for kind, batch in BATCHES.items():
            plans = encoders(scale, [name for name in batch if name in wanted])
            if not plans:
                continue
            seeds = sorted({seed for _, seeds in plans for seed in seeds})
            list(crew.map(_source, [(kind, seed, scale, device) for seed in seeds]))
            say(f"{kind}: {len(seeds)} sources, {time.monotonic() - began:.0f} s")
            list(crew.map(_encoders, [(*one, device) for one in plans]))
            made = sum(len(seeds) for _, seeds in plans)
            say(f"{kind}: {made} encoders, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
