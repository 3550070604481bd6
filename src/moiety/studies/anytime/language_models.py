"""The learners of the language studies, and the learning rates of their models.

    settings = settled(settings, device)               # a rate for each size, chosen once
    make(settings, corpus, seed=0, device=device)

Where a size has several "rates" a pilot chooses: a single model with four experts is trained on the
first mega-batch, as in a phase, with each of them, and the best one on its validation data is taken
for all arms of the size. It sees no test, and what it found is kept for all trials and workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...anytime.base import Learner, Phase
from ...anytime.learners import learner
from ...lab.study import Settings
from .kept import kept
from .switch import Schedule, SwitchTransformer
from .text import SEED, Corpus, corpus_of

PILOT: Settings = {"learner": "single", "experts": 4, "options": {}, "share": 1}
# What decides a rate, besides the size.
DATA = ("text", "batches", "vocabulary", "length", "sequences", "validation")
WORDS = (*DATA, "batch", "eval_batch", "passes")


def make(settings: Settings, corpus: Corpus, seed: int, device: torch.device) -> Learner:
    """The learner of an arm; its models are of "size" and start with so many "experts"."""
    size = settings["sizes"][settings["size"]]
    shape = {word: size[word] for word in ("dim", "depth", "heads")}
    words = {"vocabulary": corpus.vocabulary, "length": settings["length"], **shape}
    return learner(
        settings["learner"],
        lambda seed: SwitchTransformer(experts=settings["experts"], **words),
        seed=seed,
        device=device,
        training=Schedule(
            lr=size["lr"],
            batch=settings["batch"],
            eval_batch=settings.get("eval_batch", settings["batch"]),
            epochs=passes(settings),
            steps=settings.get("steps"),
            save_every=settings["save_every"],
        ),
        **settings.get("options", {}),
    )


def passes(settings: Settings) -> int:
    """Over each mega-batch."""
    return max(round(settings["passes"] * settings.get("share", 1)), 1)


def phase_steps(settings: Settings) -> int:
    """Steps that all models of an arm take together in a phase."""
    models = settings.get("options", {}).get("members", 1)
    return models * passes(settings) * settings["sequences"] // settings["batch"]


# -- learning rates --------------------------------------------------------------------------------


def settled(settings: Settings, device: torch.device) -> dict[str, Any]:
    """The settings of an arm with the learning rate of its size."""
    size = settings["sizes"][settings["size"]]
    if "lr" in size:
        return dict(settings)
    scores = scores_of(settings, device)
    best = max(size["rates"], key=lambda lr: scores[f"{lr:g}"] or float("-inf"))
    return {**settings, "sizes": {settings["size"]: {**size, "lr": best}}}


def scores_of(settings: Settings, device: torch.device) -> dict[str, float | None]:
    """What a phase with each rate brings on validation; None where the loss was lost."""
    words = {"size": settings["sizes"][settings["size"]], "device": device.type}
    words |= {word: settings[word] for word in WORDS if word in settings}
    return kept("rates", words, lambda: _scores({**settings, **PILOT}, words["size"], device))


def _scores(
    settings: Settings, size: Mapping[str, Any], device: torch.device
) -> dict[str, float | None]:
    corpus, found = corpus_of(settings, device), dict[str, float | None]()
    batch = corpus.batches[0]
    for lr in size["rates"]:
        own = {**settings, "sizes": {settings["size"]: {**size, "lr": lr}}}
        phase = Phase(train=batch.train, validation=batch.validation, number=1, seed=SEED)
        try:
            found[f"{lr:g}"] = make(own, corpus, SEED, device).train(phase).validation
        except ValueError as error:
            if not any(said in str(error) for said in ("lower lr", "too large a learning rate")):
                raise
            found[f"{lr:g}"] = None
    return found
