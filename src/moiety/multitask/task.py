"""`Task`: what a tower predicts, its loss, and labels that are missing.

    income = Task("income", size=2)                     # one of two classes
    tags = Task("tags", "labels", size=5)               # five yes/no labels
    age = Task("age", "number", weight=0.1)             # a number

| kind | output | target | missing | loss |
|---|---|---|---|---|
| classes | `[B, size]` | `[B]` integer ids | −100 | cross-entropy |
| labels | `[B, size]` | `[B, size]` floats 0 … 1 (or `[B]`) | NaN | binary cross-entropy |
| number | `[B, size]` | `[B, size]` floats (or `[B]`) | NaN | squared error |

A loss is the mean over what is there: Σ w·l / Σ w over the labelled entries, with sample weights w
(one for each example). Where nothing is there, it is exactly 0 with gradient 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..routing.value import readable

Kind = Literal["classes", "labels", "number"]
MISSING = -100  # a class id; torch's own `ignore_index`


@dataclass(frozen=True)
class Task:
    """One thing to predict; `size` is the number of classes, labels or numbers."""

    name: str
    kind: Kind = "classes"
    size: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a task's name must be a word, got {self.name!r}")
        if self.kind not in ("classes", "labels", "number"):
            raise ValueError(
                f'task {self.name!r}: kind must be "classes", "labels" or "number", '
                f"got {self.kind!r}"
            )
        if self.size is None and self.kind == "classes":
            raise ValueError(f"task {self.name!r}: size must say how many classes there are")
        least = 2 if self.kind == "classes" else 1
        if self.size is not None and (type(self.size) is not int or self.size < least):
            raise ValueError(
                f"task {self.name!r}: size must be a whole number, at least {least}, "
                f"got {self.size!r}"
            )
        if not isinstance(self.weight, (int, float)) or not 0 <= self.weight < float("inf"):
            raise ValueError(
                f"task {self.name!r}: weight must be a number, at least 0, got {self.weight!r}"
            )

    @property
    def outputs(self) -> int:
        """How many values the tower gives."""
        return 1 if self.size is None else self.size

    @property
    def columns(self) -> int:
        """How many columns the target takes in `pack`."""
        return 1 if self.kind == "classes" else self.outputs


def check_tasks(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Raise unless there are tasks, all of different names."""
    for task in tasks:
        if not isinstance(task, Task):
            raise ValueError(f"tasks must be Task values, got {type(task).__name__}")
    names = [task.name for task in tasks]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise ValueError(f"two tasks are named {twice[0]!r}: give each its own name")
    if not names:
        raise ValueError("there is no task: give at least one")
    return tuple(tasks)


def check_names(tasks: Sequence[Task], given: Mapping[str, object], word: str) -> None:
    """Raise unless there is one entry for each task and no other."""
    names = [task.name for task in tasks]
    for name in given:
        if name not in names:
            raise ValueError(f"{word} has {name!r}, but the tasks are {', '.join(names)}")
    for name in names:
        if name not in given:
            raise ValueError(f"{word} lacks task {name!r}")


def check_targets(tasks: Sequence[Task], targets: Mapping[str, Tensor]) -> None:
    """Raise unless there is a target for each task and no other."""
    if not isinstance(targets, Mapping):
        raise ValueError(f"targets must be tensors by task name, got {type(targets).__name__}")
    check_names(tasks, targets, "targets")


def check_output(task: Task, output: Tensor) -> None:
    """Raise unless there is a row for each example: others would broadcast to a wrong loss."""
    if output.dim() != 2 or output.shape[1] != task.outputs:
        raise ValueError(
            f"task {task.name!r}: the output must have shape [B, {task.outputs}], "
            f"got {list(output.shape)}"
        )


def check_target(task: Task, target: Tensor, examples: int) -> Tensor:
    """The target in the shape of the module's head; a wrong type, shape or value raises."""
    if not isinstance(target, Tensor):
        what = "class ids" if task.kind == "classes" else "floats"
        raise ValueError(
            f"task {task.name!r}: the target must be a tensor of {what}, "
            f"got {type(target).__name__}"
        )
    if task.kind == "classes":
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            raise ValueError(
                f"task {task.name!r}: class ids must be integers ({MISSING} where missing), "
                f"got {target.dtype}"
            )
        _check_shape(task, target, (examples,))
        target = target.long()
        if readable(target):
            wrong = (target != MISSING) & ((target < 0) | (target >= task.outputs))
            _refuse(
                task, target[wrong], f"class ids are 0 … {task.outputs - 1}, {MISSING} if missing"
            )
        return target
    if not target.is_floating_point():
        raise ValueError(
            f"task {task.name!r}: the target must be floats (NaN where missing), got {target.dtype}"
        )
    if target.dim() == 1 and task.outputs == 1:
        target = target[:, None]
    _check_shape(task, target, (examples, task.outputs))
    if readable(target):
        _refuse(task, target[target.isinf()], "values are finite, NaN if missing")
        if task.kind == "labels":
            _refuse(
                task, target[(target < 0) | (target > 1)], "labels lie in 0 … 1, NaN if missing"
            )
    return target


def _check_shape(task: Task, target: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(target.shape) != shape:
        raise ValueError(
            f"task {task.name!r}: the target must have shape {list(shape)}, "
            f"got {list(target.shape)}"
        )


def _refuse(task: Task, wrong: Tensor, rule: str) -> None:
    if wrong.numel():
        raise ValueError(f"task {task.name!r}: {rule}; got {wrong[0].item()}")


def labelled(task: Task, target: Tensor) -> Tensor:
    """Bool, as the target: which entries are there."""
    return target != MISSING if task.kind == "classes" else ~target.isnan()


def task_loss(task: Task, output: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """The mean loss over the labelled entries; exactly 0, with gradient 0, where there are none."""
    check_output(task, output)
    target = check_target(task, target, output.shape[0])
    there = labelled(task, target)
    # `where` before the loss, not a product after it: NaN times zero is NaN.
    safe = torch.where(there, target, 0)
    if task.kind == "classes":
        each = F.cross_entropy(output, safe, reduction="none")
    elif task.kind == "labels":
        safe = safe.to(output.dtype)
        each = F.binary_cross_entropy_with_logits(output, safe, reduction="none")
    else:
        each = (output - safe.to(output.dtype)).square()
    mass = entry_weights(task, there, weight).to(each.dtype)
    total = mass.sum()
    return (torch.where(there, each, 0.0) * mass).sum() / torch.where(total > 0, total, 1.0)


def entry_weights(task: Task, there: Tensor, weight: Tensor | None) -> Tensor:
    """The weight of every entry of a target: its example's, and 0 where it is missing."""
    if weight is None:
        return there.float()
    if not isinstance(weight, Tensor):
        found = type(weight).__name__
        raise ValueError(f"task {task.name!r}: sample weights must be a tensor, got {found}")
    if weight.dim() != 1 or weight.shape[0] != there.shape[0]:
        raise ValueError(
            f"task {task.name!r}: sample weights must have shape [{there.shape[0]}], "
            f"got {list(weight.shape)}"
        )
    if readable(weight) and not bool((weight.isfinite() & (weight >= 0)).all()):
        raise ValueError(f"task {task.name!r}: sample weights must be finite and at least 0")
    return torch.where(there, weight if there.dim() == 1 else weight[:, None], 0.0)


# -- all targets in one tensor --------------------------------------------------------------------


def pack(tasks: Sequence[Task], targets: Mapping[str, Tensor]) -> Tensor:
    """`[N, columns]` floats, NaN where missing: the one target tensor that `fit_many` takes."""
    check_targets(check_tasks(tasks), targets)
    first = targets[tasks[0].name]
    examples = first.shape[0] if isinstance(first, Tensor) and first.dim() else 0
    columns = []
    for task in tasks:
        target = check_target(task, targets[task.name], examples)
        values = torch.where(labelled(task, target), target, torch.nan).float()
        columns.append(values[:, None] if values.dim() == 1 else values)
    return torch.cat(columns, 1)


def unpack(tasks: Sequence[Task], packed: Tensor) -> dict[str, Tensor]:
    """The targets by task."""
    sizes = [task.columns for task in tasks]
    if packed.dim() != 2 or packed.shape[1] != sum(sizes):
        raise ValueError(
            f"packed targets of these tasks have shape [B, {sum(sizes)}], got {list(packed.shape)}"
        )
    out = {}
    for task, values in zip(tasks, packed.split(sizes, 1), strict=True):
        if task.kind == "classes":
            ids = torch.where(values.isnan(), float(MISSING), values)[:, 0]
            out[task.name] = ids.long()
        else:
            out[task.name] = values
    return out
