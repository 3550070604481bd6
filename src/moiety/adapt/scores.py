"""What a classifier gets right: accuracy, macro and micro F1, and its loss.

    scores(logits, labels)         # {"accuracy": …, "macro_f1": …, "micro_f1": …, "loss": …, …}

macro_f1 is the mean of the F1 of the classes that occur among labels or answers. micro_f1 counts
all classes together; with one class for each example it is the accuracy. largest_class is the
accuracy of whoever answers nothing but the commonest class. answered is how many classes were.

    score(classifier, rows, 32)    # the same of labelled rows: with a length, `take` and `labels`

Many are answered at once: where a batch (of 32) has room for its gradients, eight have it without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..modes import at_rest
from .cache import batches

if TYPE_CHECKING:
    from .classifier import Classifier

AT_ONCE = 8  # batches that are answered at once


@torch.no_grad()
def scores(logits_NC: Tensor, labels_N: Tensor) -> dict[str, float]:
    """The scores of some examples; `loss` is the mean cross-entropy in nats."""
    if not len(labels_N):
        raise ValueError("there are no examples to score")
    logits_NC, labels_N = logits_NC.double().cpu(), labels_N.cpu()
    answers_N = logits_NC.argmax(1)
    classes = torch.cat([answers_N, labels_N]).unique().tolist()
    counts = torch.tensor([_counts(answers_N, labels_N, c) for c in classes])
    return {
        "accuracy": float((answers_N == labels_N).double().mean()),
        "macro_f1": float(_f1(counts).mean()),
        "micro_f1": float(_f1(counts.sum(0))),
        "loss": float(F.cross_entropy(logits_NC, labels_N)),
        "largest_class": float(labels_N.bincount().max()) / len(labels_N),
        "answered": len(answers_N.unique()),
    }


def _counts(answers_N: Tensor, labels_N: Tensor, c: int) -> list[int]:
    """How often a class is rightly answered, answered, and there."""
    said, true = answers_N == c, labels_N == c
    return [int((said & true).sum()), int(said.sum()), int(true.sum())]


def _f1(counts: Tensor) -> Tensor:
    """2 TP / (2 TP + FP + FN); a class that occurs has a denominator."""
    right, said, true = counts.double().unbind(-1)
    return 2 * right / (said + true)


# -- of a classifier -------------------------------------------------------------------------------


@torch.no_grad()
def answers(
    classifier: Classifier, rows: Any, batch: int, tick: Callable[[float], None] | None = None
) -> Tensor:
    """`[N, C]`: logits of rows in eval mode, on the CPU.

    batch    examples that were trained on at once
    tick     hears which share of the rows is answered
    """
    found, done = [], 0
    with at_rest(classifier.model):
        for each in batches(classifier.encoder, rows, AT_ONCE * batch):
            found.append(classifier.logits(each).float().cpu())
            done += len(found[-1])
            if tick:
                tick(done / len(rows))
    return torch.cat(found)


def score(
    classifier: Classifier,
    rows: Any,
    batch: int,
    name: str = "training",
    tick: Callable[[float], None] | None = None,
) -> dict[str, float]:
    """The scores of labelled rows."""
    labels = check_labels(rows, name, classifier.classes)
    return scores(answers(classifier, rows, batch, tick), labels)


def check_labels(rows: Any, name: str, classes: int | Sequence[str] | None = None) -> Tensor:
    """The labels as whole numbers from 0 on; what does not fit raises."""
    if rows.labels is None:
        raise ValueError(f"the {name} examples have no labels; give labelled ones")
    labels = torch.as_tensor(rows.labels)
    if labels.is_floating_point() or labels.dim() != 1 or len(labels) != len(rows):
        raise ValueError(
            f"the {name} labels must be one whole number for each of {len(rows)} examples, got "
            f"{labels.dtype} of shape {list(labels.shape)}"
        )
    if not len(labels):
        raise ValueError(f"there are no {name} examples")
    count = len(classes) if isinstance(classes, Sequence) else classes
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or (count is not None and high >= count):
        most = "" if count is None else f" to {count - 1}"
        raise ValueError(f"the {name} labels must be from 0{most}, got {low if low < 0 else high}")
    return labels.long()
