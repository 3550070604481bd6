"""The learners of a cell (a stream, a waiting time, a model) over all seeds in one program.

    cell = Cell(train=…, test=…, batches=500, wait="5", make=lambda seed: MLP(64), training=…)
    course = run_cell(cell, seeds=range(5), learners=("single", "ensemble", "growing-ensemble"))
    summary(course.lines["ensemble"][0]).cer           # of the first seed

The lines are those that `run_stream` writes for `learner(name, …, seed=seed)` over
`cut(train, batches, seed=seed)` with the same seed, to round-off: errors, steps and FLOPs; bytes
and the gaps of growing ensembles are left out. What makes it fast is `train.Phased`, and three
facts: a single model is the first member of its ensemble; in a growing ensemble one member trains
at a time, from where the last one stands; what a frozen member answers to the test set never
changes, so that a sum is all that is kept of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch

from ...anytime.base import Report
from ...anytime.data import Batch, Examples
from ...anytime.environment import IDLE, _spent
from ...anytime.ledger import Line, chance
from ...anytime.phases import Memory
from ...anytime.policies import BySize, Fixed, View, read_replay, read_wait
from ...anytime.stream import cut
from ...lab.checkpoint import Checkpoint
from .teams import Cell, Course, Grown, Key, Rows, Stack

__all__ = ["STACKED", "Cell", "Course", "run_cell"]

SAVE = 20.0  # seconds between checkpoints, at least
STACKED = ("single", "ensemble", "growing-ensemble")  # copies of one structure in one program


class Team(Protocol):
    """Learners that walk through a stream together."""

    keys: list[Key]

    def train(self, rows: Rows, tick: Callable[[float], None] | None) -> list[Report]: ...

    def measure(self) -> list[dict[str, float]]: ...

    def costs(self) -> list[dict[str, Any]]: ...

    def state(self) -> dict[str, Any]: ...

    def load(self, state: Mapping[str, Any]) -> None: ...


def run_cell(
    cell: Cell,
    seeds: Sequence[int],
    learners: Sequence[str] = STACKED,
    *,
    like: Course | None = None,
    tick: Callable[[float], None] | None = None,
    checkpoint: Checkpoint | None = None,
) -> Course:
    """Let learners with each of the seeds walk through the stream of the seed.

    like         a course of the same learners without replay: each copy takes as many steps as
                 there
    checkpoint   where the state after a phase is kept, of learners that are one program; a kill
                 then loses a phase
    """
    stacked = [name for name in learners if name in STACKED]
    course = Course({})
    for names in [stacked, *([name] for name in learners if name not in STACKED)]:
        if names:
            team: Team = (
                Stack(cell, names, seeds, like)
                if names is stacked
                else Grown(cell, names[0], seeds)
            )
            alone = len(names) == len(learners)
            lines = _walk(cell, seeds, team, tick, checkpoint if alone else None)
            course.lines |= {name: [lines[name, seed] for seed in seeds] for name in names}
            course.checks += getattr(team, "taken", [])
    return course


# -- the walk --------------------------------------------------------------------------------------


def _walk(
    cell: Cell,
    seeds: Sequence[int],
    team: Team,
    tick: Callable[[float], None] | None,
    checkpoint: Checkpoint | None,
) -> dict[Key, list[Line]]:
    """Go through the mega-batches, whose rows are numbers of rows here; returns the ledgers."""
    numbers = torch.arange(len(cell.train))
    ids, words = Examples(numbers, numbers), {"validation": cell.validation}
    streams = [cut(ids, cell.batches, seed=seed, **words) for seed in seeds]
    memories = [Memory(read_replay(cell.replay), seed) for seed in seeds]
    lines: dict[Key, list[Line]] = {key: [] for key in team.keys}
    saved, saved_at = checkpoint.load() if checkpoint else None, time.monotonic()
    if saved:
        lines = dict(zip(team.keys, saved["lines"], strict=True))
        team.load(saved["team"])
    first = next(iter(lines.values()))
    known = len(first)
    waiting: list[list[Batch]] = []
    phase = 0
    for t in range(1, (cell.until or cell.batches) + 1):
        waiting.append([stream[t] for stream in streams])
        sizes = tuple(each[0].rows for each in waiting)
        if t <= known:  # of an earlier life
            if first[t - 1]["trained"]:
                phase += 1
                _rows(phase, waiting, memories)
                waiting = []
            continue
        if not _ready(cell, t, sizes, lines):
            _stand(cell, t, sizes[-1], team, lines)
            continue
        phase += 1
        began = time.monotonic()
        rows = _rows(phase, waiting, memories)
        reports = team.train(rows, _part(tick, t - len(waiting), t, cell.batches))
        trained = time.monotonic() - began
        measured, costs = team.measure(), team.costs()
        seconds = {"train": trained, "score": time.monotonic() - began - trained}
        head = {"t": t, "rows": sizes[-1], "phase": phase, "trained": True}
        each = zip(reports, measured, costs, strict=True)
        made = [{**head, **asdict(report), **found, **price} for report, found, price in each]
        whole = math.fsum(map(_spent, made))
        for key, line in zip(team.keys, made, strict=True):  # time goes by FLOPs
            part = _spent(line) / whole
            line["seconds"] = {word: part * spent for word, spent in seconds.items()}
            lines[key].append(line)
        waiting = []
        if checkpoint and time.monotonic() - saved_at > SAVE:
            checkpoint.save({"lines": list(lines.values()), "team": team.state()})
            saved_at = time.monotonic()
    return lines


def _part(
    tick: Callable[[float], None] | None, before: int, after: int, whole: int
) -> Callable[[float], None] | None:
    return tick and (lambda share: tick((before + share * (after - before)) / whole))


def _ready(cell: Cell, t: int, sizes: tuple[int, ...], lines: dict[Key, list[Line]]) -> bool:
    """Whether a phase begins; all learners must agree, since their phases are one program."""
    policy, said = read_wait(cell.wait), set()
    if isinstance(policy, Fixed | BySize):  # it does not look at results
        return t == cell.batches or policy.ready(View(t, sizes))
    for own in lines.values():
        past = [line for line in own if line["trained"]]
        scores = tuple(line["validation"] for line in past)
        view = View(t, sizes, tuple(_spent(line) for line in past), scores)
        said.add(t == cell.batches or policy.ready(view))
    if len(said) > 1:
        raise ValueError(f"the policy {cell.wait!r} decides by learner and seed: run each alone")
    return said.pop()


def _stand(cell: Cell, t: int, rows: int, team: Team, lines: dict[Key, list[Line]]) -> None:
    """Write the lines of a time without a phase: the model in force stays, or chance."""
    before = team.costs() if t == 1 else []
    level = {"error": chance(cell.classes, "error"), "loss": math.log(cell.classes)}
    for i, own in enumerate(lines.values()):
        last = own[-1] if own else {"phase": 0, **level, **before[i]}
        stays = {word: last[word] for word in ("phase", *level, "parameters", "inference_flops")}
        seconds = {"train": 0.0, "score": 0.0}
        own.append({"t": t, "rows": rows, **IDLE, **stays, "seconds": seconds})


def _rows(number: int, waiting: list[list[Batch]], memories: list[Memory]) -> Rows:
    """All rows of a phase, by seed."""
    used = [memory.use(number, batches) for memory, batches in zip(memories, zip(*waiting))]
    fresh = sum(len(each[0].train) for each in waiting)
    return Rows([train.x for train, _ in used], [held.x for _, held in used], fresh, number)
