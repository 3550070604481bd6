"""How the losses of several tasks become one.

fixed        Σ_t w_t L_t, with the weights of the tasks
uncertainty  Kendall, Gal and Cipolla 2018, (10): a learned s_t = log σ_t² for each task,
             w_t (exp(−s_t) L_t + s_t / 2) for classes and labels and
             w_t (exp(−s_t) L_t / 2 + s_t / 2) for numbers

A task without a label in the batch adds nothing: neither its loss nor s_t / 2, which alone would
push s_t down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from .task import Task, check_target, entry_weights, labelled, task_loss

Weighting = Literal["fixed", "uncertainty"]
WEIGHTINGS = ("fixed", "uncertainty")
SampleWeights = Tensor | Mapping[str, Tensor] | None


def weighted_loss(task: Task, loss: Tensor, present: Tensor, log_variance: Tensor | None) -> Tensor:
    """One task's part of the sum; `present` is bool: the batch has a label of it."""
    if log_variance is None:
        return task.weight * loss
    share = 0.5 if task.kind == "number" else 1.0
    whole = share * (-log_variance).exp() * loss + 0.5 * log_variance
    return task.weight * torch.where(present, whole, 0.0)


def check_names(tasks: Sequence[Task], given: Mapping[str, object], word: str) -> None:
    """Raise unless there is one entry for each task and no other."""
    names = [task.name for task in tasks]
    for name in given:
        if name not in names:
            raise ValueError(f"{word} has {name!r}, but the tasks are {', '.join(names)}")
    for name in names:
        if name not in given:
            raise ValueError(f"{word} lacks task {name!r}")


def task_losses(
    tasks: Sequence[Task],
    outputs: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    sample_weights: SampleWeights = None,
) -> dict[str, Tensor]:
    """The unweighted mean loss of every task, over its labelled entries."""
    _check_given(tasks, targets, sample_weights)
    return {
        task.name: task_loss(
            task, outputs[task.name], targets[task.name], weight_of(task, sample_weights)
        )
        for task in tasks
    }


def presence(task: Task, target: Tensor, weight: Tensor | None) -> Tensor:
    """Scalar bool: the batch has a label of this task that counts."""
    target = check_target(task, target, target.shape[0])
    return (entry_weights(task, labelled(task, target), weight) > 0).any()


def weight_of(task: Task, sample_weights: SampleWeights) -> Tensor | None:
    """One `[B]` of sample weights for all tasks, or by name; a task that is not named has none."""
    if isinstance(sample_weights, Mapping):
        return sample_weights.get(task.name)
    return sample_weights


def _check_given(
    tasks: Sequence[Task], targets: Mapping[str, Tensor], sample_weights: SampleWeights
) -> None:
    if not isinstance(targets, Mapping):
        raise ValueError(f"targets must be tensors by task name, got {type(targets).__name__}")
    check_names(tasks, targets, "targets")
    if isinstance(sample_weights, Mapping):
        every = dict.fromkeys(task.name for task in tasks)
        check_names(tasks, {**every, **sample_weights}, "sample_weights")
