"""What a classifier gets right: accuracy, macro and micro F1, and its loss.

    scores(logits, labels)         # {"accuracy": …, "macro_f1": …, "micro_f1": …, "loss": …}

macro_f1 is the mean of the F1 of the classes that occur among labels or answers. micro_f1 counts
all classes together; with one class for each example it is the accuracy, and `skip` leaves a class
out of both, as "no relation" is in some data.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.no_grad()
def scores(logits_NC: Tensor, labels_N: Tensor, *, skip: int | None = None) -> dict[str, float]:
    """The scores of some examples; `loss` is the mean cross-entropy in nats."""
    if not len(labels_N):
        raise ValueError("there are no examples to score")
    logits_NC, labels_N = logits_NC.double().cpu(), labels_N.cpu()
    answers_N = logits_NC.argmax(1)
    classes = [c for c in torch.cat([answers_N, labels_N]).unique().tolist() if c != skip]
    counts = torch.tensor([_counts(answers_N, labels_N, c) for c in classes]).reshape(-1, 3)
    return {
        "accuracy": float((answers_N == labels_N).double().mean()),
        "macro_f1": float(_f1(counts).mean()) if classes else 0.0,
        "micro_f1": float(_f1(counts.sum(0))) if classes else 0.0,
        "loss": float(F.cross_entropy(logits_NC, labels_N)),
    }


def _counts(answers_N: Tensor, labels_N: Tensor, c: int) -> list[int]:
    """How often a class is rightly answered, answered, and there."""
    said, true = answers_N == c, labels_N == c
    return [int((said & true).sum()), int(said.sum()), int(true.sum())]


def _f1(counts: Tensor) -> Tensor:
    """2 TP / (2 TP + FP + FN); a class that occurs has a denominator."""
    right, said, true = counts.double().unbind(-1)
    return 2 * right / (said + true)
