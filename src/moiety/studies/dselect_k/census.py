"""Census-income, in place of the paper's private recommender (DSelect-k, Table 3): static gates.

Both pairs of tasks of the MMoE paper (Ma et al. 2018): is the income high and was the person never
married; has the person been to college and was never married. `data` and `build` make what one
setting needs:

    train, validation, test = data({"first": "income", "rows": None})
    model = build({"gate": "softmax-static", "first": "income", "hidden": 256, …}, seed=0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ...data.census import census
from ...data.problem import Problem, Split
from ...lab.claims import Claim, equivalent, greater
from ...lab.study import Metric, Metrics, Running, Scale, Settings, Study
from ...lab.tuning import Choice, Range, Search
from ...multitask import (
    PLE,
    MultiGate,
    MultiTask,
    SharedBottom,
    SingleTask,
    Task,
    pack,
    packed_loss,
    unpack,
)
from ...multitask.metrics import auc
from ...multitask.weighting import task_losses
from ...train import seeded
from .common import PAPER, gate, not_binary, train_block
from .facts import POINTS
from .parts import USED, Embed, Layers, bottom, finish

EXPERTS, K, EMBEDDED, TOWER, BATCH = 8, 2, 8, 64, 1024
SECOND = "never_married"
PAIRS = {"income": "income and marriage", "college": "college and marriage"}
GATES = (
    "dselect-k-static",
    "top-k-static",
    "gumbel-static",
    "softmax-static",
    "shared-bottom",
    "single-task",
    "ple",
)
VALIDATION = "validation loss"
METRICS = {
    "AUC": Metric("AUC, mean of the tasks", format=".4f"),
    "AUC, task 1": Metric("AUC of income or college", format=".4f"),
    "AUC, task 2": Metric("AUC of never married", format=".4f"),
    USED: Metric("Experts an example and task", better="lower", format=".2f", split="validation"),
    VALIDATION: Metric("Validation loss", better="lower", format=".4f", split="validation"),
}


def tasks_of(first: str) -> list[Task]:
    return [Task(first, "labels"), Task(SECOND, "labels")]


@lru_cache(maxsize=2)
def _problem(first: str, rows: int | None) -> tuple[Problem, tuple[TensorDataset, ...]]:
    problem, tasks = census((first, SECOND), max_examples=rows), tasks_of(first)

    def table(part: Split) -> TensorDataset:
        columns = part.inputs["numbers"], part.inputs["categories"].float()
        targets = {name: ids.float() for name, ids in part.targets.items()}
        return TensorDataset(torch.cat(columns, 1), pack(tasks, targets))

    return problem, tuple(table(part) for part in problem.splits.values())


def problem_of(settings: Settings) -> tuple[Problem, tuple[TensorDataset, ...]]:
    return _problem(settings["first"], settings["rows"])


def data(settings: Settings) -> tuple[TensorDataset, ...]:
    """Train, validation and test, the same for all seeds: numbers and ids; both targets."""
    return problem_of(settings)[1]


def build(settings: Settings, seed: int, steps: int | None = None) -> MultiTask:
    """The model of some settings; `steps`, those of the training, lets it log its gates."""
    tasks, wide, name = tasks_of(settings["first"]), settings["hidden"], settings["gate"]
    problem = problem_of(settings)[0]

    def embed() -> Embed:
        return Embed(problem.cardinalities, EMBEDDED, numbers=len(problem.numbers))

    with seeded(seed):
        if name == "single-task":
            return _single(tasks, embed, wide)
        trunk = embed()
        if name == "shared-bottom":
            layer, units = bottom(trunk.dim, settings["units"]), settings["units"]
            return SharedBottom(tasks, layer, width=units, trunk=trunk, tower=TOWER)
        if name == "ple":
            half = max(wide // 2, 1)
            words = {"hidden": half, "out_dim": half, "shared": 2, "own": 3, "levels": 2}
            return PLE(tasks, dim=trunk.dim, trunk=trunk, tower=TOWER, **words)
        return MultiGate(
            tasks,
            Layers(EXPERTS, trunk.dim, wide),
            trunk=trunk,
            tower=TOWER,
            log=None if steps is None else (POINTS, math.ceil(steps / POINTS)),
            **gate(settings, steps=steps or 1, seed=seed),
        )


def _single(tasks: Sequence[Task], embed: Callable[[], Embed], wide: int) -> SingleTask:
    def make(task: Task) -> nn.Module:
        trunk = embed()
        return nn.Sequential(trunk, bottom(trunk.dim, wide))

    return SingleTask(tasks, make, width=wide, tower=TOWER)


def run_block(runs: Sequence[Running]) -> list[Metrics]:
    """Train one arm with some settings or seeds at once, and measure each copy."""
    settings = runs[0].settings
    tasks = tasks_of(settings["first"])
    train, validation, test = data(settings)

    def score(outputs: Mapping[str, Tensor], packed: Tensor) -> Tensor:
        return torch.stack([*task_losses(tasks, outputs, unpack(tasks, packed)).values()]).sum()

    done = train_block(
        runs,
        lambda run, steps: build(run.settings, run.seed, steps),
        lambda run: (train, validation),
        loss=packed_loss(tasks),
        score=score,
        batch=settings["batch"],
        checks=5,
    )
    return [
        {
            **dict.fromkeys(METRICS),
            **finish(run, one, validation, test, areas, first=run is runs[0]),
            VALIDATION: one.score,
        }
        for run, one in zip(runs, done)
    ]


def areas(outputs: Mapping[str, Tensor], packed: Tensor) -> Metrics:
    """The area under the curve of each task, and their mean; None where a class is not there."""
    each = [auc(y[:, 0], packed[:, i] > 0.5) for i, y in enumerate(outputs.values())]
    known = [value for value in each if value is not None]
    mean = fmean(known) if len(known) == len(each) else None
    return {"AUC, task 1": each[0], "AUC, task 2": each[1], "AUC": mean}


def arm(name: str, first: str) -> str:
    return f"{name}, {PAIRS[first]}"


SPACES: dict[str, dict[str, Range]] = {
    "dselect-k-static": {
        "width": Choice([1.0, 10.0]),
        "entropy": Choice([1e-3, 1e-2, 0.1, 1.0, 10.0]),
    },
    "gumbel-static": {"sparsity": Choice([10.0**power for power in range(-6, 2)])},
    "shared-bottom": {"units": Choice([32, 256, 2048])},
}


def settings_of(name: str, first: str) -> Settings:
    chosen = {"k": K} if name in ("dselect-k-static", "top-k-static") else {}
    return {"gate": name, "first": first, **chosen}


def claims(first: str) -> list[Claim]:
    """The direction of the recommender, and what users of recommenders would ask besides."""
    smooth, tenth = arm("dselect-k-static", first), 0.001
    same = "a tenth of a point of AUC, which recommenders commonly count as a gain"
    own = {"metric": "AUC", "reason": same, "tier": "our own"}
    return [
        greater(
            smooth,
            arm("top-k-static", first),
            tenth,
            metric="AUC",
            quote="in a recommender DSelect-k is better than top-k, at best by over 22 %",
            number="> 22 %",
            reason=f"{same}; the paper's percentage is of private tasks",
            tier="proxy",
            mark="2 §5",
        ),
        equivalent(
            smooth,
            arm("softmax-static", first),
            tenth,
            quote="two experts a task are as good as a mixture of all eight",
            **own,
        ),
        greater(
            smooth,
            arm("shared-bottom", first),
            tenth,
            quote="experts chosen by task beat one network for both",
            **own,
        ),
        equivalent(
            smooth,
            arm("ple", first),
            tenth,
            quote="a sparse gate is as good as experts that belong to tasks from the start (PLE)",
            **own,
        ),
    ]


study = Study(
    name="dselect-k/census",
    title="Census-income: two pairs of tasks, static gates",
    question="Does a smooth static gate beat a hard choice of experts where two tasks share them?",
    run_block=run_block,
    block=24,
    arms={arm(name, first): settings_of(name, first) for first in PAIRS for name in GATES},
    metrics=METRICS,
    search=Search(
        space={"lr": Choice([1e-4, 3e-4, 1e-3, 3e-3, 1e-2])},
        spaces={arm(name, first): space for name, space in SPACES.items() for first in PAIRS},
        trials={"smoke": 2, "small": 6, "full": 24},
        metric=VALIDATION,
        rule=not_binary,
    ),
    scales={
        "smoke": Scale(2, {"rows": 240, "hidden": 8, "batch": 96, "epochs": 1, "copies": 2}),
        "small": Scale(24, {"rows": 12_000, "hidden": 32, "batch": 256, "epochs": 8}),
        "full": Scale(24, {"rows": None, "hidden": 64, "batch": BATCH, "epochs": 10}),
    },
    claims=[claim for first in PAIRS for claim in claims(first)],
    varies=("first weights", "order of the examples", "coins of the Gumbel gate"),
    paper=PAPER,
    deviations=(
        "data: the public census-income set with the tasks of the MMoE paper instead of the "
        "private recommender: 2 tasks instead of 8, 200 000 examples instead of billions",
        "inputs: 8 learned numbers for each of 29 columns of categories, 7 numbers as they are; "
        "columns that tell a task are left out",
        "experts: one Dense(64, ReLU), where the paper has Dense(256, ReLU) and tunes how many; "
        "towers Dense(64, ReLU)",
        "training: Adam, batch 1024, 10 epochs, the best of 5 checkpoints by validation loss; the "
        "paper says early stopping and tunes the learning rate, both without numbers",
        "search: 24 random settings at a quarter of the length; k is 2, as in the paper",
        "PLE: 2 shared experts and 3 of each task in both of 2 levels, of half the width",
        "examples count alike: the people that each stands for are no weights here",
    ),
)
