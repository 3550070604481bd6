"""What an adaptation would take, before it is run: steps, FLOPs, and room on the disk.

plan = costs(asked, begin(asked, None))
plan.stages, plan.cache, plan.disk
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from .. import cost
from .asked import ARMS, PRETRAINING, Asked
from .cache import look_through
from .classifier import Classifier
from .command import Opened, draw
from .course import Course, few_masked
from .encoders import FEW, Batch, Encoder
from .finetune import batch_size
from .follow import Follow
from .heads import only_made
from .objective import Objective
from .opening import open_recipe
from .pretrain import MATCHES
from .rows import Rows
from .stage import FURTHER
from .teachers import cache_key, frozen, why_online

WARM_BATCH = 64
SHORT = 0.1  # seconds


@dataclass(frozen=True)
class Line:
    """One stage: its steps, the FLOPs of a step, and how often it is run."""

    name: str
    steps: int
    batch: int
    flops: float
    rows: int  # that there are
    times: int = 1

    @property
    def passes(self) -> float:
        """How often each example is seen."""
        return self.steps * self.batch / self.rows

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
    stages, size, online = list[Line](), 0, None
    if opened.corpus is not None:
        stages, size, online = _pretraining(asked, opened.encoder, opened.corpus.train)
    if opened.labelled is not None:
        stages.append(_tuning(asked, opened))
    return Costs(stages, size, online, _disk(asked, opened))


def _pretraining(asked: Asked, encoder: Encoder, rows: Rows) -> tuple[list[Line], int, str | None]:
    """The stages before fine-tuning, the bytes of a cache, or why there is none."""
    words = asked.words(tuple(name for name in PRETRAINING if name != "warm_steps"))
    recipe = open_recipe(encoder, words, {"labelled": asked.labelled})
    course = Course(encoder=encoder, rows=rows, seed=asked.seed, follow=Follow(seed=asked.seed))
    course.cache, course.cache_limit = asked.cache, asked.cache_limit
    objective, size, online = FURTHER, 0, None
    if asked.method != "further":
        words = asked.words(("mae_weight", "distill_weight", "distill_every", "match_routing"))
        objective = Objective(match=asked.match or MATCHES[encoder.kind], **words)
    flops, batch, count = course.flops(recipe, objective), min(recipe.batch, len(rows)), len(rows)
    stages = [
        *_warm(asked, encoder, rows),
        Line("further", recipe.steps, batch, flops["further"], count),
    ]
    if asked.method == "further":
        return stages, 0, None
    kind = "further"  # where the second term has no weight
    if "cached" in flops:
        key = cache_key(frozen(encoder.copy()), objective, rows, look_through(encoder, rows))
        online = why_online(encoder, objective, key, **course.caching(recipe, objective))
        kind, size = ("online", 0) if online else ("cached", key.bytes)
    for number in range(1, asked.rounds + 1):
        if size:
            stages.append(Line(f"round-{number}, cache", 1, count, flops["build"], count))
        stages.append(Line(f"round-{number}", recipe.steps, batch, flops[kind], count))
    return stages, size, online


def _warm(asked: Asked, encoder: Encoder, rows: Rows) -> Iterator[Line]:
    if not encoder.made:
        return
    own, size = encoder.copy(), min(WARM_BATCH, len(rows))
    batch, masks, times = few_masked(own, rows, size, seed=0)
    with only_made(own):
        flops = times * cost.flops(lambda: FURTHER.backward(own, batch, masks))
    yield Line("warm-up", asked.warm_steps, size, flops, len(rows))


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
    flops = more * cost.flops(partial(_learn, classifier, batch))
    times = asked.seeds * len(ARMS) if compared else 1
    steps = asked.epochs * (len(train) // size)
    return Line("fine-tuning", steps, size, flops, len(train), times)


def rough_seconds(asked: Asked, opened: Opened, plan: Costs) -> float:
    """What all would take here, by the FLOPs of as many examples as take little time."""
    speed, half = 0.0, asked.precision == "bfloat16"
    for size in (FEW, WARM_BATCH):
        work = _work(opened, size)
        with torch.autocast(opened.encoder.device.type, torch.bfloat16, enabled=half):
            flops, took = cost.flops(work), []  # which also brings it all into memory
            for _ in range(3):
                began = time.perf_counter()
                work()
                took.append(time.perf_counter() - began)
        speed = flops / min(took)
        if min(took) > SHORT:
            break
    return plan.total / speed


def _work(opened: Opened, size: int) -> Callable[[], object]:
    """What learns from so many examples."""
    encoder, part = opened.encoder.copy(), opened.corpus or opened.labelled
    assert part is not None
    batch = encoder.batch(part.train.take(torch.arange(min(size, len(part.train)))))
    if opened.corpus is not None:
        masks = encoder.mask(batch, torch.Generator().manual_seed(0))
        return partial(FURTHER.backward, encoder, batch, masks)
    assert opened.labelled is not None
    return partial(_learn, Classifier.build(encoder, opened.labelled.classes), batch)


def _learn(classifier: Classifier, batch: Batch) -> None:
    classifier.logits(batch).sum().backward()


def _disk(asked: Asked, opened: Opened) -> int:
    """Bytes: the initial weights, what every stage leaves, and a state in flight, which is written
    beside the one before it; or, in the end, the results.
    """
    one = sum(t.numel() * t.element_size() for t in opened.encoder.model.state_dict().values())
    rounds = asked.rounds * (asked.method in ("self-distill", "compare"))
    stages = (1 + bool(opened.encoder.made) + 1 + rounds) * (opened.corpus is not None)
    flying = 3 + (asked.stop == "probe")  # with both moments, and the best so far
    tuned = int(opened.labelled is not None)
    saved = tuned + (opened.corpus is not None)
    earlier = saved - tuned  # the adapted model is saved before it is fine-tuned
    if asked.method == "compare":
        saved, tuned = 2 * len(ARMS), asked.seeds * len(ARMS)
        earlier = tuned - 1
    tuning = earlier + 2 * 3 if tuned else 0
    return one * (stages + max(2 * flying, tuning, saved + tuned))
