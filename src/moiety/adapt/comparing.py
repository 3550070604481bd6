"""Three ways to a classifier, with the same labels: fine-tune, further pre-train, self-distil.

    compared = compare(asked, opened, pretrain(asked, opened, out), out)
    compared.answers["self-distill"]              # [S, N] classes, by seed and scored example

One pre-training serves all seeds; its first stage is the arm "further". A seed draws the labelled
examples (with `labels`), the new head, the order and dropout: the same for every arm. The scored
split is read when all fine-tunings are over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .asked import ARMS, Asked
from .command import Opened, check, draw, tuned_from
from .course import Tick
from .encoders import Encoder
from .finetune import Tuned
from .folder import count_look
from .pretrain import Adapted
from .rows import repeated
from .scores import scores


@dataclass(frozen=True)
class Compared:
    """What the classifiers of every arm answered, one row for each seed."""

    split: str  # which was scored: "test", or "validation" where there is none
    labels: Tensor  # [N]
    answers: dict[str, Tensor]  # [S, N]
    scores: dict[str, list[dict[str, float]]]  # by seed
    distance: dict[str, list[float]]  # of the trunk while it was fine-tuned
    examples: int  # labelled ones of a seed
    repeated: int  # examples of the split that are also training examples, and were not scored
    leaked: bool  # all of them are: there was nothing else to score
    look: int  # how often these examples were scored, with other seeds, metric or margin


def compare(
    asked: Asked,
    opened: Opened,
    adapted: Adapted,
    out: Path,
    tick: Tick | None = None,
    **more: Any,
) -> Compared:
    """Fine-tune every arm with every seed, score them, and save each arm's model and classifier."""
    labelled = opened.labelled
    assert labelled is not None
    starts = arms_of(adapted)
    parts = [draw(labelled, asked.labels, asked.seed + i) for i in range(asked.seeds)]

    def tuned(arm: str, i: int, say: Tick | None = None) -> Tuned:
        """One fine-tuning; what has ended is read."""
        name = f"{arm}, seed {asked.seed + i}"
        return tuned_from(
            asked,
            starts[arm],
            parts[i],
            asked.seed + i,
            out / "fine-tuning" / arm / f"seed-{asked.seed + i}",
            classes=labelled.classes,
            checks=4,
            tick=None if say is None else partial(say, name),
            scored=None if say is None else lambda _, share: say(f"scoring {name}", share),
            **more,
        )

    for i in range(asked.seeds):
        for arm in ARMS:
            tuned(arm, i, tick)
    split = "validation" if labelled.read_test is None else "test"
    look = count_look(out, asked)
    rows = labelled.validation if labelled.read_test is None else labelled.test()
    known = repeated(rows, labelled.train)
    if not known.all():  # else there is nothing to judge by
        rows = rows.part(np.flatnonzero(~known))
    assert rows.labels is not None
    answers, found = {}, {}
    distance: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for arm in ARMS:
        logits = []
        for i in range(asked.seeds):
            one = tuned(arm, i)
            name = f"scoring {arm}, seed {asked.seed + i}"
            logits.append(one.logits(rows, None if tick is None else partial(tick, name)))
            distance[arm].append(one.distance)
            if not i:
                adapts = starts[arm] if arm != "fine-tune" else None  # that one is as it was
                if adapts:
                    adapts.save(out / arm / "adapted")
                one.save(out / arm / "classifier")
                check(adapts, one, opened, out / arm)
        answers[arm] = torch.stack([each.argmax(1) for each in logits])
        found[arm] = [scores(each, rows.labels) for each in logits]
    leaked = bool(known.all())
    apart = 0 if leaked else int(known.sum())
    return Compared(
        split, rows.labels, answers, found, distance, len(parts[0]), apart, leaked, look
    )


def arms_of(adapted: Adapted) -> dict[str, Encoder]:
    """The encoder that every arm fine-tunes."""
    states: dict[str, Mapping[str, Tensor]] = {
        "fine-tune": adapted.initial,
        "further": adapted.stages[0].state,
        "self-distill": adapted.stages[-1].state,
    }
    made = {}
    for arm, state in states.items():
        made[arm] = adapted.encoder.copy()
        made[arm].model.load_state_dict(dict(state))
    return made
