"""How long `anytime/mnist` or `anytime/cifar` will take.

    python -m moiety.studies.anytime.projection mnist cuda

The first phases of every kind of cell are run as at full scale, where a phase is short. Their
seconds a step and steps a phase tell what the others will take: a longer waiting time has fewer
phases with more steps, in all about as many. Learners that grow are seen while they are small:
they will take longer than is told. Told is the time of one process; several that share a GPU
(`courses`) take less together.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table

from ...lab.loading import load_study
from ...lab.study import Settings
from ...train.fit import find_device
from . import vision
from .engine import STACKED, run_cell

PHASES, SHORT = 3, 5  # looked at; about the waiting time of the cells that are run


@dataclass(frozen=True)
class Projection:
    """What a cell will take, from one of its kind with a short waiting time."""

    cell: str
    steps: int  # of a copy, in the whole stream
    milliseconds: float  # a step
    start: float  # seconds before the second phase

    @property
    def seconds(self) -> float:
        return self.start + self.steps * self.milliseconds / 1000


def project(study: str, scale: str, device: torch.device) -> list[Projection]:
    """Measure one cell of each kind (learners, width), and say what all cells will take."""
    if study not in ("mnist", "cifar"):
        raise ValueError(f"a projection is for mnist or cifar, not {study!r}")
    loaded = load_study(f"anytime/{study}")
    seeds = tuple(range(loaded.scale(scale).seeds))
    kinds: dict[tuple[str, int], list[Settings]] = {}
    for own in loaded.arms.values():
        settings: Settings = {**loaded.scale(scale).settings, **own}
        kind = "stack" if settings["learner"] in STACKED else settings["learner"]
        cells = kinds.setdefault((kind, settings["width"]), [])
        if all(vision.wait_of(settings) != vision.wait_of(other) for other in cells):
            cells.append(settings)
    found = []
    for (kind, width), cells in kinds.items():
        shortest = min(cells, key=lambda one: abs(int(vision.wait_of(one)) - SHORT))
        start, epochs, each = measured(shortest, seeds, device)
        for settings in cells:
            steps = round(phases_of(settings) * epochs * per_epoch(settings, device))
            name = f"{kind} c={width} w={vision.wait_of(settings)}"
            found.append(Projection(name, steps, 1000 * each, start))
    return found


def measured(
    settings: Settings, seeds: tuple[int, ...], device: torch.device
) -> tuple[float, float, float]:
    """Seconds before the second phase, epochs of a phase, seconds of a step with all around it."""
    cell, wait = vision.cell_of(settings, device), int(vision.wait_of(settings))
    names = STACKED if settings["learner"] in STACKED else [settings["learner"]]
    if settings["learner"] in STACKED and settings["width"] not in settings["widths"]:
        names = ["single"]
    cell = replace(cell, until=min(PHASES * wait, cell.batches))
    start = time.monotonic()
    course = run_cell(cell, seeds, names)
    whole = time.monotonic() - start
    lines = [line for one in course.lines[names[0]] for line in one if line["trained"]]
    phases = max(line["phase"] for line in lines)
    longest = [
        max(line["steps"] for line in lines if line["phase"] == p + 1) for p in range(phases)
    ]
    later = sum(
        sum(line["seconds"].values())
        for by_seed in course.lines.values()
        for one in by_seed
        for line in one
        if line["trained"] and line["phase"] > 1
    )
    epochs = sum(longest) / phases / per_epoch(settings, device)
    if phases == 1:
        return 0.0, epochs, whole / longest[0]
    return whole - later, epochs, later / sum(longest[1:])


def phases_of(settings: Settings) -> int:
    return math.ceil(settings["batches"] / int(vision.wait_of(settings)))


def per_epoch(settings: Settings, device: torch.device) -> int:
    """Steps of an epoch."""
    train, _ = vision.images(settings["data"], settings.get("rows"), device)
    rows = 0.9 * len(train) * int(vision.wait_of(settings)) / settings["batches"]
    return math.ceil(rows / settings["batch"])


def main(study: str = "mnist", device: str = "cpu", scale: str = "full") -> None:
    console, found = Console(), project(study, scale, find_device(device))
    table = Table("cell", "steps", "ms a step", "seconds", title=f"anytime/{study}, {scale}")
    for one in found:
        table.add_row(one.cell, str(one.steps), f"{one.milliseconds:.2f}", f"{one.seconds:.0f}")
    console.print(table)
    console.print(
        f"In all {sum(one.seconds for one in found) / 60:.1f} minutes of one process on {device}."
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
