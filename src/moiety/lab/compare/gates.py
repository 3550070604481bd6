"""Gates of several tasks on a table: the models, and what their gates did.

Every arm embeds the columns into a row of 64 values; then come

shared-bottom     one network for all tasks, as wide as all experts together
single-task       the same network, with columns of its own, for each task
ple               progressive layered extraction: shared experts and experts of each task
a router's name   8 experts, and a gate of that kind for each task (softmax is MMoE)

and a tower for each task. Experts that no gate selects are not computed, which equal FLOPs turn
into more examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ...data.named import NAMED
from ...data.problem import Problem
from ...experts import FeedForward
from ...models import TableNet
from ...multitask import (
    PLE,
    MultiGate,
    SharedBottom,
    SingleTask,
    Task,
    Trajectory,
    describe_gates,
    similarity,
)
from ...multitask.base import MultiTask, mlp
from ...routing import describe
from ...tables import table_kind
from ...train import seeded
from ..headline import listed
from ..study import Settings
from . import measure
from .asked import SHARED, Asking
from .gate_task import GateTask, tasks_of
from .models import Maker
from .study import Comparison, read_problem

NEW = 4  # models that are built to see what one costs
DIM, HIDDEN, TOWER = 64, 256, 32  # of a row; of all experts together; of a task's tower
LR, BATCH = 2e-3, 256
POINTS, DRAWN = 60, 3  # of a trajectory; tasks that are drawn
LOOKED = 2048  # validation rows that gates by example are described on
SHARPEN = 0.5  # share of the steps in which DSelect-k's width falls to a hundredth
NEVER = 10**9  # steps


class GateComparison(Comparison):
    """A comparison of gates, with its data."""

    @classmethod
    def of(cls, asked: Asking) -> GateComparison:
        """Read the table and make the tasks."""
        _refuse_other_data(asked.data)
        problem = read_problem(asked, missing="mask")
        if problem.kind != "table":
            raise ValueError(_other_data(problem.name, problem.kind))
        if len(problem.targets) < 2:
            raise ValueError(
                f"{problem.name}: gates of tasks need at least two targets, and there is only "
                f"{problem.targets[0].name}: name more with --targets, or use moiety compare "
                "routers"
            )
        return cls(asked, problem, gate_maker(problem), GateTask.of(problem))

    @property
    def slug(self) -> str:
        return f"{super().slug}-gates"

    @property
    def title(self) -> str:
        return f"Gates of {len(self.problem.targets)} tasks on {self.problem.name}"

    @property
    def question(self) -> str:
        names = listed([target.name for target in self.problem.targets])
        return f"Which gates predict {names} of {self.problem.name} best together?"

    def charged(self, model: nn.Module, settings: Settings, task: Any) -> float:
        """Those of new models: a gate that starts dense and thins out is charged as dense.

        Several, since how many experts the tasks of a sparse static gate share is a matter of luck.
        """
        device = next(model.parameters()).device
        return fmean(measure.flops(self.build(settings, seed, device), task) for seed in range(NEW))

    def tell(self, model: nn.Module, task: Any) -> tuple[Tensor, dict[str, Any]]:
        """The answers to the validation data, and the gates where there are any."""
        answers = task.answers(model, "validation")
        if not isinstance(model, MultiGate):
            return answers, {}
        return answers, gate_facts(model, task.inputs("validation", slice(0, LOOKED)))


def _refuse_other_data(data: str) -> None:
    """Raise for images and texts before they are read: their own errors speak of other things."""
    path = Path(data)
    if data in NAMED:
        if NAMED[data].kind != "table":
            raise ValueError(_other_data(data, NAMED[data].kind))
    elif path.is_dir() and not any(table_kind(file) for file in path.iterdir() if file.is_file()):
        raise ValueError(_other_data(path.name, "image"))


def _other_data(name: str, kind: str) -> str:
    return (
        f"{name} is {kind} data, and gates are compared on tables: use moiety compare routers, or "
        "moiety.multitask.MultiGate with a trunk of your own"
    )


# -- models ----------------------------------------------------------------------------------------


def gate_maker(problem: Problem) -> Maker:
    """The maker of every arm's model."""
    tasks = tasks_of(problem.targets)

    def build(settings: Mapping[str, Any], seed: int) -> nn.Module:
        with seeded(seed):
            return _build(problem, tasks, settings)

    about = (
        f"categories embedded and joined with the numbers into rows of {DIM}; all experts "
        f"together {HIDDEN} wide, as is the shared bottom; a tower of width {TOWER} for each task. "
        f"The width of DSelect-k's smooth step falls to a hundredth in the first {SHARPEN:.0%} of "
        "the steps, so that most of its gates are binary by the end; shown are those of the best "
        "check"
    )
    return Maker("tasks", build, LR, BATCH, reader=None, upcycled=False, about=about)


def _build(problem: Problem, tasks: list[Task], settings: Mapping[str, Any]) -> MultiTask:
    gate, experts = settings["gate"], settings["experts"]
    options = dict(settings.get("options", {}))
    width = max(HIDDEN // experts, 1)
    if gate == "single-task":
        return SingleTask(tasks, lambda _: _alone(problem), width=DIM, tower=TOWER)
    shared: dict[str, Any] = {"trunk": Columns(problem), "tower": TOWER}
    if gate == SHARED:
        return SharedBottom(tasks, mlp([DIM, HIDDEN, DIM]), width=DIM, **shared)
    if gate == "ple":
        own = max(experts // (2 * len(tasks)), 1)
        usual = {"own": own, "shared": max(experts - own * len(tasks), 1)}
        return PLE(tasks, dim=DIM, hidden=width, **{**usual, **options}, **shared)
    batch = min(settings["batch"], len(problem.splits["train"]))
    steps = round(settings.get("examples", 0) / batch)
    words = {**_router_words(gate, settings["k"], steps), **options}
    log = (POINTS + 1, max(-(-steps // POINTS), 1))
    each = FeedForward(experts, DIM, width, activation=torch.relu)
    return MultiGate(tasks, each, router=gate, log=log, **words, **shared)


def _alone(problem: Problem) -> nn.Module:
    """Columns and network of one task that shares nothing."""
    return nn.Sequential(Columns(problem), mlp([DIM, HIDDEN, DIM]))


def _router_words(gate: str, k: int, steps: int) -> dict[str, Any]:
    """The options that a gate gets unless its arm says otherwise.

    Without steps, as when its speed is measured, a gate stays as dense as it starts: an arm is
    charged for the dense part of its training, and never gets more than the others.
    """
    owned = describe(gate).options
    words: dict[str, Any] = {"k": k} if "k" in owned else {}
    if "width_steps" in owned:
        words["width_steps"] = round(SHARPEN * steps) or NEVER
    return words


class Columns(nn.Module):
    """A row of numbers and ids of categories, as `GateTask.inputs` gives it, as DIM values."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.numbers, sizes = len(problem.numbers), problem.cardinalities
        self.table = TableNet(
            numbers=self.numbers, cardinalities=sizes, outputs=DIM, dim=DIM, depth=0
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x[:, : self.numbers], x[:, self.numbers :].long())


# -- what the gates did ----------------------------------------------------------------------------


def gate_facts(model: MultiGate, x: Tensor) -> dict[str, Any]:
    """Gates, similarity and trajectories as a result keeps them; the numbers rounded."""
    course, alike = Trajectory.of(model), similarity(model, x)
    gates = {
        gate.task: {
            "selected": round(gate.mean_selected, 4),
            "binary": gate.is_binary,
            "binary_step": course.binary_step[gate.task] if gate.is_binary else None,
            "weights": _rounded(gate.weights),
        }
        for gate in describe_gates(model, x)
    }
    drawn = {
        f"gate of {task}": {
            "step": line["step"],
            "values": [_rounded(row) for row in line["values"]],
        }
        for task, line in list(course.values().items())[:DRAWN]
    }
    values = [_rounded(row) for row in alike["values"]]
    return {
        "gates": gates,
        "similarity": {"tasks": alike["tasks"], "values": values},
        "trajectories": drawn,
    }


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]
