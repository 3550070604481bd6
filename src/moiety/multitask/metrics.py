"""Metrics of a task over its labelled examples; None where the labels define none.

| kind | metrics |
|---|---|
| classes | accuracy, macro_f1, and auc where there are two classes |
| labels | accuracy, macro_f1 and auc, each the mean over the labels that define it |
| number | rmse, r2, each over all entries of all numbers |

macro_f1 is the mean F1 over the classes that occur among labels or predictions; of a label, that of
its two sides. auc counts a tie as one half.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .task import Task, check_output, check_target, labelled

Metrics = dict[str, float | None]


@torch.no_grad()
def task_metrics(task: Task, output: Tensor, target: Tensor) -> Metrics:
    """The metrics of one task on outputs (logits or numbers) and targets."""
    check_output(task, output)
    target = check_target(task, target, output.shape[0])
    there = labelled(task, target)
    if task.kind == "number":
        return _of_numbers(output[there].double(), target[there].double())
    if task.kind == "classes":
        return _of_classes(output[there].double(), target[there])
    columns = range(task.outputs)
    each = [_of_label(output[:, i][there[:, i]], target[:, i][there[:, i]]) for i in columns]
    return {name: _mean([found[name] for found in each]) for name in each[0]}


def _of_classes(logits_NC: Tensor, target_N: Tensor) -> Metrics:
    guess_N = logits_NC.argmax(1)
    found: Metrics = {"accuracy": _mean((guess_N == target_N).double().tolist())}
    found["macro_f1"] = macro_f1(guess_N, target_N)
    if logits_NC.shape[1] == 2:
        found["auc"] = auc(logits_NC[:, 1] - logits_NC[:, 0], target_N == 1)
    return found


def _of_label(logit_N: Tensor, target_N: Tensor) -> Metrics:
    guess_N, truth_N = (logit_N > 0).long(), (target_N > 0.5).long()
    return {
        "accuracy": _mean((guess_N == truth_N).double().tolist()),
        "macro_f1": macro_f1(guess_N, truth_N),
        "auc": auc(logit_N.double(), truth_N == 1),
    }


def _of_numbers(output_N: Tensor, target_N: Tensor) -> Metrics:
    if target_N.numel() == 0:
        return {"rmse": None, "r2": None}
    squared = (output_N - target_N).square()
    spread = (target_N - target_N.mean()).square().sum()
    r2 = 1 - float(squared.sum() / spread) if spread > 0 else None
    return {"rmse": float(squared.mean().sqrt()), "r2": r2}


def macro_f1(guess_N: Tensor, target_N: Tensor) -> float | None:
    """The mean over classes of 2 TP / (2 TP + FP + FN)."""
    scores = []
    for c in torch.cat([guess_N, target_N]).unique().tolist():
        guessed, true = guess_N == c, target_N == c
        scores.append(float(2 * (guessed & true).sum() / (guessed.sum() + true.sum())))
    return _mean(scores)


def auc(score_N: Tensor, positive_N: Tensor) -> float | None:
    """The chance that a positive scores above a negative; a tie counts one half."""
    up, down = score_N[positive_N], score_N[~positive_N]
    if up.numel() == 0 or down.numel() == 0:
        return None
    down = down.sort().values
    below = torch.searchsorted(down, up) + torch.searchsorted(down, up, right=True)
    return float(below.double().sum() / (2 * up.numel() * down.numel()))


def _mean(values: list) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
