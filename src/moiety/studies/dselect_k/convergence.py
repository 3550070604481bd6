"""When does a DSelect-k gate become binary, and what does its training cost? (Table C.4.)

Until all gates of a model are binary every expert is computed; from then on only those that some
task has selected. A top-k gate computes the experts of its tasks from the first step on. Problems
and models are those of the other studies, with the settings that their searches chose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import TensorDataset

from ...lab.claims import Claim, greater
from ...lab.study import Metric, Metrics, Running, Scale, Settings, Study
from ...multitask import MultiGate, packed_loss
from ...multitask.union import choices
from . import census, movielens, multi_digits, multi_fashion, multi_mnist, recovery, synthetic
from .common import PAPER, Done, draw_curve, gate_facts, look, train_block

CNN_COPIES = 10  # at once, on a GPU; on a CPU one after the other


@dataclasses.dataclass(frozen=True)
class Problem:
    """One of the paper's problems: what makes its data and model, and the settings of its gate."""

    study: Study  # its sizes at each scale
    data: Callable[[Running], tuple[TensorDataset, TensorDataset]]
    build: Callable[[Running, int], Any]
    loss: Callable[[Settings], Any]
    settings: Mapping[str, Any]
    epochs: int | None = None  # at full scale; None: as its study
    optimizer: str = "adam"
    convolves: bool = False

    def sizes(self, scale: str) -> dict[str, Any]:
        """Those of its study at this scale."""
        shorter = {} if scale != "full" or self.epochs is None else {"epochs": self.epochs}
        return {**self.study.scale(scale).settings, **shorter}


def of_module(module: Any, study: Study, loss: Any, settings: Any, **words: Any) -> Problem:
    """A problem on a data set that all seeds share."""
    return Problem(
        study,
        lambda run: module.data(run.settings)[:2],
        lambda run, steps: module.build(run.settings, run.seed, steps),
        loss,
        settings,
        **words,
    )


def on_tasks(tasks: int, **chosen: float) -> Problem:
    return Problem(
        synthetic.study,
        lambda run: synthetic.sets(run)[:2],
        synthetic.build,
        lambda settings: packed_loss(synthetic.tasks_of(settings)),
        {"tasks": tasks, "k": 4, **chosen},
    )


def on_digits(study: Study, entropy: float) -> Problem:
    settings = {"k": 4, "lr": 0.01, "width": 0.1, "entropy": entropy}
    words = {"epochs": 2, "convolves": True}
    return of_module(multi_digits, study, lambda _: multi_digits.loss, settings, **words)


PROBLEMS = {
    "128 tasks": on_tasks(128, lr=0.1, width=10.0, entropy=0.3),
    "16 tasks": on_tasks(16, lr=0.1, width=5.0, entropy=0.001),
    "recovery": Problem(
        recovery.study,
        recovery.train_and_validation,
        recovery.build,
        lambda _: recovery.loss,
        {"placement": "first", "k": 4, "lr": 0.1, "width": 5.0, "entropy": 0.3},
    ),
    "multi-mnist": on_digits(multi_mnist.study, 0.01),
    "multi-fashion": on_digits(multi_fashion.study, 0.1),
    "movielens": of_module(
        movielens,
        movielens.study,
        movielens.loss_of,
        {"eta": 0.9, "k": 4, "lr": 0.1, "width": 1.0, "entropy": 10.0},
        optimizer="adagrad",
    ),
    "census": of_module(
        census,
        census.study,
        lambda settings: packed_loss(census.tasks_of(settings["first"])),
        {"first": "income", "k": 2, "lr": 0.01, "width": 1.0, "entropy": 0.1},
        epochs=5,
    ),
}
COMPARED = ("multi-mnist", "movielens")  # of which the paper says that top-k costs more
ARMS = {
    f"dselect-k-static, {name}": {"gate": "dselect-k-static", "problem": name} for name in PROBLEMS
} | {f"top-k-static, {name}": {"gate": "top-k-static", "problem": name} for name in COMPARED}


def run_block(runs: Sequence[Running]) -> list[Metrics]:
    """Train one gate on one problem with many seeds; see when it is binary and what it costs."""
    problem = PROBLEMS[runs[0].settings["problem"]]
    runs = [whole(run, problem) for run in runs]
    loss, settings = problem.loss(runs[0].settings), runs[0].settings
    few = 1 if runs[0].device.type == "cpu" else CNN_COPIES
    done = train_block(
        runs,
        problem.build,
        problem.data,
        loss=loss,
        score=loss,
        batch=settings.get("batch", synthetic.BATCH),
        optimizer=problem.optimizer,
        keep="last",
        at_once=few if problem.convolves else None,
    )
    x = problem.data(runs[0])[1].tensors[0][:256].to(runs[0].device)
    cost = Cost(x)
    return [tell(run, one, cost, first=run is runs[0]) for run, one in zip(runs, done)]


def whole(run: Running, problem: Problem) -> Running:
    """The run with all settings that the problem's own study would give it."""
    own = dict(problem.settings)
    if run.settings["gate"] == "top-k-static":
        own = {name: value for name, value in own.items() if name not in ("width", "entropy")}
    settings = {**run.settings["sizes"][run.settings["problem"]], **own, **run.settings}
    return dataclasses.replace(run, trial=dataclasses.replace(run.trial, settings=settings))


class Cost:
    """The FLOPs of a model by how many experts its tasks use, as a share of those with all.

    The experts of a model are alike, and so are the copies of a block: each number is counted once.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.shares: dict[int, float] = {}

    def share(self, model: MultiGate, experts: int) -> float:
        if experts not in self.shares:
            usual, some = model.backend, model.flops(self.x)
            model.backend = "dense"  # computes all experts, used or not
            self.shares[experts] = some / model.flops(self.x)
            model.backend = usual
        return self.shares[experts]


def tell(run: Running, done: Done, cost: Cost, *, first: bool) -> Metrics:
    """When the gates of a copy were all binary, and its training FLOPs."""
    draw_curve(run, done)
    if done.lost:
        return dict.fromkeys(METRICS)
    routings = look(done.model, cost.x)
    run.extra |= gate_facts(run.settings, done.model, cost.x, course=first, routings=routings)
    experts = int(choices(list(routings.values())).any(0).any(0).sum())
    end = cost.share(done.model, experts)
    if run.settings["gate"] == "top-k-static":
        return {"steps": None, "flops": end, "binary": None, "experts": experts}
    since = done.model.log.binary_step()
    never = None in since
    share = 1.0 if never else max(since) / done.steps
    return {
        "steps": share,
        "flops": share + (1 - share) * end,
        "binary": float(not never),
        "experts": experts,
    }


METRICS = {
    "steps": Metric(
        "Share of the steps until all gates are binary", better="lower", format=".2%", split="train"
    ),
    "flops": Metric(
        "Training FLOPs, of those with all experts", better="lower", format=".1%", split="train"
    ),
    "binary": Metric("All gates binary in the end", better="", format=".0%", split="train"),
    "experts": Metric("Experts that some task uses in the end", better="", format=".1f", split=""),
}


def cheaper(problem: str) -> Claim:
    return greater(
        f"dselect-k-static, {problem}",
        f"top-k-static, {problem}",
        margin=0.05,
        metric="flops",
        quote=f"on {problem} training takes fewer FLOPs than with Top-k",
        mark="2 §5, row 7",
        reason="a twentieth of the cost with all experts: less does not pay for a new gate",
        tier="scaled down",
    )


def scale(name: str, seeds: int) -> Scale:
    settings = {"sizes": {key: problem.sizes(name) for key, problem in PROBLEMS.items()}}
    return Scale(seeds, settings if name == "full" else {**settings, "copies": seeds})


study = Study(
    name="dselect-k/convergence",
    title="When does a DSelect-k gate become binary, and what does training cost?",
    question="How soon are the gates binary, and does training then cost less than with top-k?",
    paper=PAPER,
    run_block=run_block,
    block=50,
    arms=ARMS,
    metrics=METRICS,
    scales={"smoke": scale("smoke", 2), "small": scale("small", 10), "full": scale("full", 50)},
    claims=[
        greater(
            "dselect-k-static, movielens",
            "dselect-k-static, multi-fashion",
            margin=0.4,
            metric="steps",
            quote="gates are binary after 0.04 % of the steps (MovieLens) to 80 % (Multi-Fashion)",
            mark="2 §5, row 6",
            number="0.04 % to 80 %",
            reason="half of the distance between the paper's two ends",
            tier="scaled down",
        ),
        *map(cheaper, COMPARED),
    ],
    varies=("first weights", "order of the examples", "dropout", "problem, where it is drawn"),
    deviations=[
        "settings: those that the searches of our studies of these problems chose for DSelect-k, "
        "at full scale; the searches for top-k chose the same k and learning rates",
        "lengths and data: as in our studies of these problems, but 2 epochs of Multi-MNIST and "
        "Multi-Fashion, and 5 of census-income, which stands for the recommender",
    ],
    notes=[
        "steps: 100 % where a gate is not binary in the end",
        "FLOPs: counted; all experts until the last gate is binary, then those that some task has "
        "selected; with top-k those that some task has selected in the end, in every step. A "
        "backward pass is taken to cost twice a forward pass, which does not change the ratio",
    ],
)
