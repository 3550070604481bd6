"""The multi-task step of the demo: one image, three questions, and who answers which.

Eight experts read an image; a gate for each task mixes them: softmax for every image anew, top-k
and DSelect-k once for all images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.utils.data import TensorDataset

from ...experts import FeedForward
from ...multitask import MultiGate, Task, Trajectory, describe_gates, similarity
from ...report import Column, TaskPart
from ...train import seeded
from ...train.loop import Recipe, train

TASKS = [Task("digit", size=10), Task("odd", size=2), Task("5 or more", size=2)]
EXPERTS, HIDDEN, WIDTH, K = 8, 32, 32, 2
LONGER = 2  # passes for one of the routers' demo: these models are small
BATCH, LR = 64, 5e-3
GATES: list[tuple[str, dict[str, Any]]] = [
    ("softmax", {}),
    ("top-k-static", {"k": K}),
    ("dselect-k-static", {"k": K}),
]
RESULT = [
    Column("arm", "Gate"),
    *(Column(task.name, task.name.capitalize(), ".1%") for task in TASKS),
    Column("selected", "Experts a task", ".1f"),
    Column("work", "Experts at work", ".1f"),
    Column("kflops", "Active kFLOPs", ".1f"),
]
SUMMARY = (
    f"Three questions on each image (which digit, is it odd, is it 5 or more), {EXPERTS} experts, "
    "and a gate for each task that mixes them. Softmax uses all experts for every task; the "
    "sparse gates choose, and experts that no task has chosen are not computed."
)
NOTES = {
    "Experts a task": "the mean over the tasks of how many work for an image",
    "Experts at work": "those that some task uses for an image; a sparse model skips the others",
    "Active kFLOPs": "forward, per image, counted on the test images",
}


@dataclass
class Found:
    """What came out: a row for each gate, the gates, and how alike the tasks are."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    gates: dict[str, dict[str, Any]] = field(default_factory=dict)
    similarity: dict[str, dict[str, Any]] = field(default_factory=dict)

    def part(self) -> TaskPart | None:
        """Its part of the page."""
        if not self.rows:
            return None
        return TaskPart(
            title="Several tasks, a gate for each",
            summary=SUMMARY,
            rows=self.rows,
            columns=RESULT,
            notes=NOTES,
            gates=self.gates,
            similarity=self.similarity,
        )


def questions(digit: Tensor) -> dict[str, Tensor]:
    """The label of every task."""
    return {"digit": digit, "odd": digit % 2, "5 or more": (digit >= 5).long()}


def build(gate: str, options: Mapping[str, Any], steps: int, seed: int) -> MultiGate:
    """The model of a gate, from a seed; DSelect-k becomes binary in the first half."""
    words = dict(options)
    if gate.startswith("dselect"):
        words["width_steps"] = steps // 2
    with seeded(seed):
        experts = FeedForward(EXPERTS, 64, HIDDEN, out_dim=WIDTH, activation=torch.relu)
        # One point is enough: the log notes when a gate became binary in any case.
        return MultiGate(TASKS, experts, router=gate, log=(1, 1), **words)


def run(
    gates: Sequence[tuple[str, Mapping[str, Any]]],
    data: TensorDataset,
    test: TensorDataset,
    epochs: int,
    seed: int,
    device: torch.device,
    console: Console | None = None,
) -> Found:
    """Train a model with each gate, and describe what its gates do."""
    found = Found()
    console = console or Console()
    for gate, options in gates:
        with console.status(f"{gate}, three tasks"):
            _run_one(found, gate, options, data, test, LONGER * epochs, seed, device)
    return found


def _run_one(
    found: Found,
    gate: str,
    options: Mapping[str, Any],
    data: TensorDataset,
    test: TensorDataset,
    epochs: int,
    seed: int,
    device: torch.device,
) -> None:
    x, labels = _on(data, device)
    steps = epochs * (len(x) // BATCH)
    model = build(gate, options, steps, seed).to(device)

    def loss(rows: Tensor) -> Tensor:
        return model.loss(model(x[rows]), {name: y[rows] for name, y in labels.items()})

    recipe = Recipe(steps=steps, batch=BATCH, lr=LR, checks=1)
    train(model, recipe, examples=len(x), seed=seed, loss=loss, score=lambda: 0.0)
    found.rows.append({"arm": gate, **measure(model, test, device)})
    x_test, _ = _on(test, device)
    since = Trajectory.of(model).binary_step
    found.gates[gate] = {
        each.task: {
            "selected": each.mean_selected,
            "binary": None if each.is_binary is None else float(each.is_binary),
            "binary_step": since[each.task] if each.is_binary else None,
            "weights": each.weights,
        }
        for each in describe_gates(model, x_test)
    }
    found.similarity[gate] = similarity(model, x_test)


@torch.no_grad()
def measure(model: MultiGate, test: TensorDataset, device: torch.device) -> dict[str, Any]:
    """Accuracy of every task on the test images, experts, and FLOPs of an image."""
    x, labels = _on(test, device)
    outputs = model.eval()(x)
    metrics = model.metrics(outputs, labels)
    chosen = torch.stack([r.choice().expand(len(x), -1) for r in outputs.routings.values()])
    return {
        **{name: each["accuracy"] for name, each in metrics.items()},
        "selected": float(chosen.float().sum(2).mean()),
        "work": float(chosen.any(0).float().sum(1).mean()),
        "kflops": model.flops(x) / len(x) / 1e3,
    }


def _on(data: TensorDataset, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """Images as rows of pixels, and the labels of every task."""
    x, digit = (t.to(device) for t in data.tensors)
    return x.flatten(1), questions(digit)
