"""A table with several targets as a multi-task model meets it; a label may be missing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ... import multitask
from ...data.problem import Problem, Target
from ...multitask import MultiTask, task_metrics
from ...multitask.task import labelled
from ..study import Metric
from .task import Reader, Task


class GateTask(Task):
    """Inputs and targets of every split; losses and measures are over the labels that are there."""

    @classmethod
    def of(cls, problem: Problem, reader: Reader | None = None) -> GateTask:
        """The task of a problem; a target without any label in a split raises.

        So does a split in which nothing can be scored: numbers that are all the same have no R².
        """
        made = cls(problem.targets, problem.splits)
        for task in made.tasks:
            for name, split in problem.splits.items():
                if not bool(labelled(task, split.targets[task.name]).any()):
                    raise ValueError(
                        f"{problem.name}: no row of {name} has the target {task.name!r}; add rows "
                        "that do, or predict another column"
                    )
        for name, split in problem.splits.items():
            if made.main not in made.measure(torch.zeros(len(split), sum(made.widths)), name):
                raise ValueError(
                    f"{problem.name}: every target has one value only in the rows of {name}, so "
                    "that R² is not defined; add rows, or predict other columns"
                )
        return made

    @property
    def tasks(self) -> list[multitask.Task]:
        """The targets as tasks."""
        return tasks_of(self.targets)

    def inputs(self, split: str, rows: Tensor | slice) -> Tensor:
        """Some rows as one tensor: the numbers, then the ids of the categories."""
        given = self.splits[split].inputs
        return torch.cat([given["numbers"][rows], given["categories"][rows].float()], 1)

    def answer(self, model: nn.Module, split: str, rows: Tensor | slice) -> Tensor:
        """The outputs of all tasks side by side, `[B, sum of widths]`."""
        return torch.cat(list(model(self.inputs(split, rows)).values()), 1)

    def batch_loss(self, model: nn.Module, split: str, rows: Tensor | slice) -> Tensor:
        """The losses of the tasks over the labels that are there, and the gates' own terms."""
        assert isinstance(model, MultiTask)
        targets = {name: values[rows] for name, values in self.splits[split].targets.items()}
        return model.loss(model(self.inputs(split, rows)), targets)

    # -- measures --------------------------------------------------------------------------------

    def metrics(self) -> dict[str, Metric]:
        """Those of any problem, and the area under the curve of every target of two classes."""
        found = super().metrics()
        last = found.popitem()  # the one of the validation data
        for target in self.targets:
            if len(target.classes) == 2:
                found[f"auc of {target.name}"] = Metric(f"AUC of {target.name}", format=".3f")
        return {**found, last[0]: last[1]}

    def measure(self, logits: Tensor, split: str) -> dict[str, float]:
        """The metrics of these answers to a split; what the labels do not define is left out."""
        found: dict[str, float | None] = {}
        scores: list[float | None] = []
        f1: list[float | None] = []
        parts = logits.float().split(self.widths, 1)
        for target, task, own in zip(self.targets, self.tasks, parts):
            values = task_metrics(task, own, self.splits[split].targets[target.name])
            kind = "accuracy" if target.kind == "classes" else "r2"
            scores.append(values[kind])
            found[f"{kind} of {target.name}"] = values[kind]
            if target.kind == "number":
                rmse = values["rmse"]
                found[f"rmse of {target.name}"] = None if rmse is None else rmse * target.std
                continue
            f1.append(values["macro_f1"])
            if "auc" in values:
                found[f"auc of {target.name}"] = values["auc"]
        found[self.main] = _mean(scores)
        if f1:
            found["macro_f1"] = _mean(f1)
        return {name: value for name, value in found.items() if value is not None}


def tasks_of(targets: Sequence[Target]) -> list[multitask.Task]:
    """Targets as tasks: classes, or a number."""
    return [
        multitask.Task(t.name, "classes", len(t.classes))
        if t.kind == "classes"
        else multitask.Task(t.name, "number")
        for t in targets
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
