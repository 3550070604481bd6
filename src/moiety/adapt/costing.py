"""What an adaptation would take, before it is run: steps, FLOPs, and room on the disk.

plan = costs(asked, begin(asked, None))
plan.stages, plan.cache, plan.disk
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import cost
from .asked import PRETRAINING, Asked
from .cache import look_through
from .classifier import Classifier
from .command import Opened, draw
from .comparing import ARMS
from .course import Course
from .encoders import MASK, Encoder
from .finetune import batch_size
from .follow import Follow
from .heads import only_made
from .objective import Objective
from .opening import open_recipe
from .pretrain import MATCHES
from .recipe import Recipe
from .stage import FURTHER
from .teachers import cache_key, frozen, why_online

WARM_BATCH = 64


@dataclass(frozen=True)
class Line:
    """One stage: its steps, the FLOPs of a step, and how often it is run."""

    name: str
    steps: int
    batch: int
    flops: float
    times: int = 1

    @property
    def total(self) -> float:
        return self.times * self.steps * self.flops


@dataclass(frozen=True)
class Costs:
    stages: list[Line]
    cache: int  # bytes; 0: none is built
    online: str | None  # why the teacher would run at every step
    disk: int  # bytes of all states at most, without the cache

    @property
    def total(self) -> float:
        return sum(line.total for line in self.stages)


def costs(asked: Asked, opened: Opened) -> Costs:
    """Count one step of every stage; nothing is trained."""
    encoder, rows = opened.encoder, opened.corpus.train
    words = asked.words(tuple(name for name in PRETRAINING if name != "warm_steps"))
    recipe = open_recipe(encoder, words, {})
    course = Course(encoder=encoder, rows=rows, seed=asked.seed, follow=Follow(seed=asked.seed))
    stages = list(_warm(asked, encoder, rows))
    objective, size, online = FURTHER, 0, None
    if asked.method != "further":
        objective = Objective(
            match=asked.match or MATCHES[encoder.kind],
            mae_weight=asked.mae_weight,
            distill_weight=asked.distill_weight,
            distill_every=asked.distill_every,
            match_routing=asked.match_routing,
        )
    flops, batch = course.flops(recipe, objective), min(recipe.batch, len(rows))
    stages.append(Line("further", recipe.steps, batch, flops["further"]))
    if asked.method != "further" and "cached" in flops:
        inputs = look_through(encoder, rows)
        size = cache_key(frozen(encoder.copy()), objective, rows, inputs).bytes
        online = "no cache is wanted"
        if asked.cache:
            online = why_online(encoder, objective, inputs, size, asked.cache_limit)
        size = 0 if online else size
        stages += _rounds(asked, recipe, batch, flops, online)
    elif asked.method != "further":
        stages += [
            Line(f"round-{n}", recipe.steps, batch, flops["further"])
            for n in range(1, asked.rounds + 1)
        ]
    if opened.labelled is not None:
        stages.append(_tuning(asked, opened))
    return Costs(stages, size, online, _disk(asked, opened))


def _warm(asked: Asked, encoder: Encoder, rows: Any) -> Iterator[Line]:
    if not encoder.made:
        return
    own, size = encoder.copy(), min(WARM_BATCH, len(rows))
    every = own.batch(rows.take(torch.arange(size)))
    masks = own.mask(every, torch.Generator().manual_seed(0))
    batch, times = own.few({**every, MASK: masks})
    masks = batch.pop(MASK)
    with only_made(own):
        flops = times * cost.flops(lambda: FURTHER.backward(own, batch, masks))
    yield Line("warm-up", asked.warm_steps, size, flops)


def _rounds(
    asked: Asked, recipe: Recipe, batch: int, flops: dict[str, float], online: str | None
) -> Iterator[Line]:
    kind = "online" if online else "cached"
    for number in range(1, asked.rounds + 1):
        if not online:
            yield Line(f"round-{number}, cache", 1, batch, flops["build"])
        yield Line(f"round-{number}", recipe.steps, batch, flops[kind])


def _tuning(asked: Asked, opened: Opened) -> Line:
    """Plain fine-tuning; other methods take a little more, R3F twice as much."""
    assert opened.labelled is not None
    encoder, compared = opened.encoder, asked.method == "compare"
    train = opened.labelled.train
    if compared:
        train = draw(opened.labelled, asked.labels, asked.seed)
    size = batch_size(encoder.kind, asked.tune_batch, len(train))
    classifier = Classifier.build(encoder, opened.labelled.classes, seed=asked.seed)
    batch, more = encoder.few(encoder.batch(train.take(torch.arange(size))))
    flops = more * cost.flops(lambda: classifier.logits(batch).sum().backward())
    times = asked.seeds * len(ARMS) if compared else 1
    return Line("fine-tuning", asked.epochs * (len(train) // size), size, flops, times)


def _disk(asked: Asked, opened: Opened) -> int:
    """Bytes: the initial weights, what every stage leaves, and a state in flight, which is written
    beside the one before it; or, in the end, the results.
    """
    one = sum(t.numel() * t.element_size() for t in opened.encoder.model.state_dict().values())
    stages = 1 + bool(opened.encoder.made) + 1 + (asked.method != "further") * asked.rounds
    flying = 3 + (asked.stop == "probe")  # with both moments, and the best so far
    saved = 1 + (opened.labelled is not None)
    tuned = saved - 1
    if asked.method == "compare":
        saved, tuned = 2 * len(ARMS), asked.seeds * len(ARMS)
    return one * (stages + max(2 * flying, saved + tuned))
