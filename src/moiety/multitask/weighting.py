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
from torch.func import vmap

from .task import (
    Task,
    check_names,
    check_target,
    check_targets,
    entry_weights,
    labelled,
    task_loss,
)
from .together import pays_off

Weighting = Literal["fixed", "uncertainty"]
WEIGHTINGS = ("fixed", "uncertainty")
SampleWeights = Tensor | Mapping[str, Tensor] | None


def uncertain_loss(task: Task, loss: Tensor, log_variance: Tensor, present: Tensor) -> Tensor:
    """A task's loss with its uncertainty; `present` is bool: the batch has a label of it."""
    share = 0.5 if task.kind == "number" else 1.0
    whole = share * (-log_variance).exp() * loss + 0.5 * log_variance
    return torch.where(present, whole, 0.0)


def task_losses(
    tasks: Sequence[Task],
    outputs: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    sample_weights: SampleWeights = None,
) -> dict[str, Tensor]:
    """The unweighted mean loss of every task, over its labelled entries."""
    check_names(tasks, outputs, "outputs")
    check_targets(tasks, targets)
    if isinstance(sample_weights, Mapping):
        every = dict.fromkeys(task.name for task in tasks)
        check_names(tasks, {**every, **sample_weights}, "sample_weights")
    alike: dict[tuple, list[Task]] = {}
    for task in tasks:
        weighted = weight_of(task, sample_weights) is not None
        alike.setdefault((task.kind, task.outputs, weighted), []).append(task)
    losses: dict[str, Tensor] = {}
    for group in alike.values():
        found = _group_losses(group, outputs, targets, sample_weights)
        losses |= zip([task.name for task in group], found, strict=True)
    return {task.name: losses[task.name] for task in tasks}


def _group_losses(
    group: Sequence[Task],
    outputs: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    sample_weights: SampleWeights,
) -> Sequence[Tensor]:
    """The losses of tasks of one kind and size; as one batch where that pays off."""
    given = [
        (outputs[t.name], check_target(t, targets[t.name], len(outputs[t.name]))) for t in group
    ]
    weights = [weight_of(t, sample_weights) for t in group]
    if len(group) == 1 or not pays_off(given[0][0]):
        return [task_loss(t, *own, w) for t, own, w in zip(group, given, weights, strict=True)]
    stacks = [torch.stack(each) for each in zip(*given, strict=True)]
    if weights[0] is not None:
        stacks.append(torch.stack([w for w in weights if w is not None]))
    return vmap(lambda *own: task_loss(group[0], *own))(*stacks).unbind(0)


def presence(task: Task, target: Tensor, weight: Tensor | None) -> Tensor:
    """Scalar bool: the batch has a label of this task that counts."""
    target = check_target(task, target, target.shape[0])
    return (entry_weights(task, labelled(task, target), weight) > 0).any()


def weight_of(task: Task, sample_weights: SampleWeights) -> Tensor | None:
    """One `[B]` of sample weights for all tasks, or by name; a task that is not named has none."""
    if isinstance(sample_weights, Mapping):
        return sample_weights.get(task.name)
    return sample_weights
