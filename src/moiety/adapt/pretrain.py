"""Carry a masked encoder to unlabelled data of a new domain.

    adapted = further_pretrain("roberta/", "papers.txt", steps=2000, out="out")
    adapted = self_distill("roberta/", "papers.txt", steps=2000, rounds=1, out="out")
    adapted.encoder.save("adapted/")

Lee et al. (ICLR 2023), algorithms 3.1 and 3.2 of the digest. A call with `out` that was killed goes
on when it is made again, to the same bits.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

from torch import Tensor

from .cache import DTYPES
from .encoders import Encoder
from .objective import Match, Norm, Objective
from .opening import Options, Source, holding, open_course, open_recipe
from .trained import State, Trained

# What is compared where nothing is said: for images as in the authors' code, for text ours.
MATCHES: dict[str, Match] = {"image": "cls", "text": "hidden"}


@dataclass(frozen=True)
class Adapted:
    """An encoder after adaptation, and how it came about.

    stages   in order: "further", then "round-1", …; each has its weights, history and seconds
    flops    counted: of one step of each kind (see `Course.flops`), and in "total"
    """

    encoder: Encoder
    initial: State
    stages: list[Trained]
    flops: dict[str, float]

    @property
    def history(self) -> list[dict[str, Any]]:
        """The checks of the last stage."""
        return self.stages[-1].history

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)


def further_pretrain(
    model: Source,
    data: Any,
    *,
    steps: int,
    batch: int | None = None,
    lr: float | None = None,
    weight_decay: float = 0.01,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    **options: Unpack[Options],
) -> Adapted:
    """Train a masked encoder on with masked auto-encoding alone (eq. 2).

    model       a folder, a model in memory (which is left as it is) or an `Encoder`
    data        unlabelled: a `Corpus` or what `read_corpus` takes; or rows (a length and `take`),
                all of which are trained on
    batch, lr   None: those of the paper for the kind of model
    out         where to keep states, so that a killed call goes on; None: nowhere
    options     see `Options`
    """
    words = {"steps": steps, "batch": batch, "lr": lr, "weight_decay": weight_decay}
    with holding(out):
        course = open_course(model, data, seed, out, options)
        recipe = open_recipe(course.encoder, words, options)
        flops = course.flops(recipe)  # first: what is refused leaves no trace in a folder
        course.prepare({"method": "further", "seed": seed, **dataclasses.asdict(recipe)})
        trained = course.further(recipe)
    flops["total"] = trained.steps * flops["further"]
    return Adapted(course.encoder, course.weights, [trained], flops)


def self_distill(
    model: Source,
    data: Any,
    *,
    steps: int,
    rounds: int = 1,
    match: Match | None = None,
    mae_weight: float = 1.0,
    distill_weight: float = 1.0,
    distill_every: int = 1,
    match_routing: float = 0.0,
    norm: Norm = "l2",
    teacher: Mapping[str, Tensor] | None = None,
    teacher_steps: int | None = None,
    cache: bool = True,
    cache_limit: int | None = None,
    cache_dtype: str = "float32",
    batch: int | None = None,
    lr: float | None = None,
    weight_decay: float = 0.01,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    **options: Unpack[Options],
) -> Adapted:
    """Further pre-training, then rounds in which a fresh student stays close to a teacher (eq. 3).

    Every student starts from the initial weights; the first teacher is the further pre-trained
    encoder, each later one the student of the round before.

    match           None: "cls" for images as in the authors' code, "hidden" for text, which is ours
    mae_weight, …   see `Objective`
    teacher         weights of the first teacher, such as `further_pretrain(…).stages[-1].state`;
                    None: trained here, with `teacher_steps` (None: `steps`)
    cache           keep the teacher's representations on disk where they follow from the example
                    alone and take at most `cache_limit` bytes; else it runs at every step
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if cache_dtype not in DTYPES:
        raise ValueError(f"cache_dtype must be one of {', '.join(DTYPES)}, got {cache_dtype!r}")
    words = {"steps": steps, "batch": batch, "lr": lr, "weight_decay": weight_decay}
    asked: dict[str, Any] = {
        "mae_weight": mae_weight,
        "distill_weight": distill_weight,
        "distill_every": distill_every,
        "match_routing": match_routing,
        "norm": norm,
    }
    with holding(out):
        course = open_course(model, data, seed, out, options)
        course.cache, course.cache_limit, course.cache_dtype = cache, cache_limit, cache_dtype
        kind = course.encoder.kind
        objective = Objective(match=match or MATCHES[kind], **asked)
        recipe = open_recipe(course.encoder, words, options)
        if recipe.lora is not None and objective.match == "weights":
            raise ValueError('match="weights" compares weights, which LoRA leaves: choose another')
        first = dataclasses.replace(recipe, steps=steps if teacher_steps is None else teacher_steps)
        plan = {
            "method": "self-distill",
            "seed": seed,
            "rounds": rounds,
            "teacher": None if teacher is None else _key(course.encoder, teacher),
            "teacher_steps": first.steps,
            "cache": cache,
            "cache_limit": cache_limit,
            "cache_dtype": cache_dtype,
            **dataclasses.asdict(objective),
            **dataclasses.asdict(recipe),
        }
        flops = course.flops(recipe, objective)
        course.prepare(plan, recipe, objective)
        stages = [course.further(first)] if teacher is None else []
        state = stages[0].state if teacher is None else teacher
        for number in range(1, rounds + 1):
            stages.append(course.distil(number, recipe, objective, state))
            state = stages[-1].state
    course.encoder.model.load_state_dict(dict(state))
    course.encoder.model.eval()  # where all stages were read, too
    flops["total"] = sum(_spent(stage, flops) for stage in stages)
    return Adapted(course.encoder, course.weights, stages, flops)


def _spent(stage: Trained, flops: Mapping[str, float]) -> float:
    """The FLOPs of a stage in all."""
    if stage.name == "further" or "cached" not in flops:
        return stage.steps * flops["further"]
    if stage.online is not None:
        return stage.steps * flops["online"]
    return stage.steps * flops["cached"] + flops["build"]


def _key(encoder: Encoder, state: Mapping[str, Tensor]) -> str:
    other = encoder.copy()
    try:
        other.model.load_state_dict(dict(state))
    except RuntimeError:  # many lines
        raise ValueError("teacher holds weights of another model: give those of this one") from None
    return other.weights_key(whole=True)
