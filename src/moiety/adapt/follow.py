"""What a training does to a model, seen at every checkpoint without opening the test split.

    follow = Follow(target=held, source=source, labelled=labelled, seed=0)
    values = follow.look(encoder, initial)      # losses, distance from the initial weights, probes

The masks are drawn once and for all by the seed, so that two checkpoints, or two arms, are asked
the same. Both probes stay inside the labelled *training* split: each example is answered from the
others.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..modes import at_rest
from ..train.draws import step_seed
from .cache import batches, look_through

if TYPE_CHECKING:
    from .encoders import Encoder, Represented

PROBED = 2000  # labelled examples at most, chosen by the seed
NEIGHBOURS = 5
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of the number of examples; features have variance one


class Follow:
    """What is looked at: held-out rows of the target and of the source, labelled training rows.

    Rows have a length and `take`; labelled ones also `labels`. Each may be None.
    """

    def __init__(
        self, target: Any = None, source: Any = None, labelled: Any = None, *, seed: int = 0
    ) -> None:
        self.held = {name: rows for name, rows in (("target", target), ("source", source)) if rows}
        self.labelled, self.seed = labelled, seed
        if labelled is not None:
            self.labels, self.chosen = chosen_labels(labelled, seed)

    def key(self, encoder: Encoder) -> str:
        """A hash of all that is looked at."""
        rows = [*self.held.values(), *([] if self.labelled is None else [self.labelled])]
        said = [*self.held, *(look_through(encoder, each).digest for each in rows)]
        labels = None if self.labelled is None else self.labels.tolist()
        return hashlib.sha256(json.dumps([said, labels]).encode()).hexdigest()

    def look(self, encoder: Encoder, initial: dict[str, Tensor]) -> dict[str, Any]:
        """The values of a checkpoint; `score`, larger is better, is there with labels only.

        target, source   masked loss on held-out rows, mean over examples
        distance         of the encoder from its initial weights, and `layers`
        linear, knn      accuracy of the probes; `score` is their mean
        """
        seen: dict[str, Any] = {}
        with at_rest(encoder.model), torch.no_grad():
            for name, rows in self.held.items():
                seen[name] = held_loss(encoder, rows, self.seed)
            away = encoder.distance(initial)
            seen |= {"distance": away.total, "layers": away.layers}
            if self.labelled is not None:
                seen |= self.probe(encoder)
        return seen

    def probe(self, encoder: Encoder) -> dict[str, float]:
        """Both probes on what the encoder says now."""
        rows = Chosen(self.labelled, self.chosen)
        parts = [pooled(encoder.represent(b), encoder.kind) for b in batches(encoder, rows)]
        features = torch.cat(parts).double()
        labels = self.labels.to(features.device)
        linear, knn = linear_probe(features, labels), knn_probe(features, labels)
        return {"linear": linear, "knn": knn, "score": (linear + knn) / 2}


class Chosen:
    """Some rows of others."""

    def __init__(self, rows: Any, chosen: Tensor) -> None:
        self.rows, self.chosen = rows, chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def take(self, rows: Tensor) -> Any:
        return self.rows.take(self.chosen[rows])


def held_loss(encoder: Encoder, rows: Any, seed: int) -> float:
    """The masked loss, mean over examples, with the masks of the seed."""
    total = torch.zeros((), dtype=torch.float64, device=encoder.device)
    for number, batch in enumerate(batches(encoder, rows)):
        generator = torch.Generator().manual_seed(step_seed(seed, number))
        size = len(next(iter(batch.values())))
        total += encoder.masked_loss(batch, encoder.mask(batch, generator)).double() * size
    return float(total) / len(rows)


# -- probes ----------------------------------------------------------------------------------------


def chosen_labels(labelled: Any, seed: int) -> tuple[Tensor, Tensor]:
    """Labels from 0 on of at most `PROBED` examples, and which examples these are."""
    if getattr(labelled, "labels", None) is None:
        raise ValueError("the rows to probe on have no labels")
    labels = torch.as_tensor(labelled.labels).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    chosen = order[:PROBED].sort().values
    found, labels = labels[chosen].unique(return_inverse=True)
    if len(found) < 2 or len(labels) < 4:
        raise ValueError(
            f"probes need at least 4 labelled examples of 2 classes, got {len(labels)} of "
            f"{len(found)}"
        )
    return labels, chosen


def pooled(seen: Represented, kind: str) -> Tensor:
    """`[B, D]`: the class token of an image, the mean of the real tokens of a text."""
    if kind == "image":
        return seen.cls
    real = seen.real[..., None]
    return torch.where(real, seen.features, 0.0).sum(1) / real.sum(1).clamp(min=1)


def linear_probe(features: Tensor, labels: Tensor) -> float:
    """Leave-one-out accuracy of ridge regression on the classes, by its closed form.

    The ridge is the one with the smallest leave-one-out squared error.
    """
    wanted = F.one_hot(labels).to(features)
    centred = features - features.mean(0)
    u, s, _ = torch.linalg.svd(centred / centred.std(0).clamp(min=1e-12), full_matrices=False)
    guesses = []
    for ridge in RIDGES:
        shrunk = s.square() / (s.square() + ridge * len(labels))
        made = u @ (shrunk[:, None] * (u.T @ wanted)) + wanted.mean(0)
        own = (u.square() * shrunk).sum(1, keepdim=True) + 1 / len(labels)  # diagonal of the hat
        guesses.append(wanted - (wanted - made) / (1 - own).clamp(min=1e-9))
    best = min(guesses, key=lambda guess: float((guess - wanted).square().sum()))
    return float((best.argmax(1) == labels).double().mean())


def knn_probe(features: Tensor, labels: Tensor, k: int = NEIGHBOURS) -> float:
    """Leave-one-out accuracy of the nearest neighbours by cosine around the mean of all features.

    Each votes with one more than its similarity.
    """
    unit = F.normalize(features - features.mean(0), dim=1)
    like = unit @ unit.T
    like.fill_diagonal_(-torch.inf)
    near = like.topk(min(k, len(labels) - 1), dim=1)
    votes = F.one_hot(labels)[near.indices] * (1 + near.values)[..., None]
    return float((votes.sum(1).argmax(1) == labels).double().mean())
