"""The fine-tunes that the studies of adaptation share.

    def run_block(runs):                                 # trials of a study, see `tables`
        cases = [case_of(run.settings, run.seed, run.device) for run in runs]
        found = tuned([Asked(case, plan, tune, number=0, test=True) for case in cases])

A fine-tune depends on its encoder (`pool`), on its own settings and on a number, not on the study.
Whoever needs one first makes it.

    <folder of the encoder>/tuned-<key>/found.json        what it came to

The test is read by the fine-tunes of main trials alone, once each, when their training is over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import io
from ...adapt import finetune
from ...adapt.encoders import Encoder
from ...adapt.finetune import Tuned
from ...adapt.recipe import Diverged
from ...adapt.scores import scores
from ...adapt.together import Member
from ...adapt.tuning import OPTIONS
from ...train.draws import step_seed
from . import pool
from .pool import Case, Plan, adapted, all_of, held, key_of, kind_of, make, quick
from .targets import TARGETS, Examples

TUNE = 21  # what the seed of a case is used for, besides its own draws
TUNED = ("batch", "weight_decay", "precision", "dropout")  # of the settings of a trial
Tick = Callable[[float], None]


def tune_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """How the classifier of a trial is trained; `lr` and `longer` are searched."""
    target = pool.target_of(settings)
    own, method = settings[kind_of(target)], settings.get("method", "plain")
    return {
        **{word: own[f"tune_{word}"] for word in TUNED},
        "lr": settings["lr"],
        "steps": own["tune_steps"] * settings["longer"] * TARGETS[target].longer,
        "method": method,
        "options": {word: settings[word] for word in OPTIONS[method] if word in settings},
    }


@dataclass(frozen=True, eq=False)
class Asked:
    """A fine-tune: of which encoder, how, and which of several."""

    case: Case
    plan: Plan | None
    tune: Mapping[str, Any]
    number: int
    test: bool

    def path(self) -> Path:
        """Where it is told what it came to."""
        parts = self.case.parts if self.test else 0
        words = {**self.tune, "number": self.number, "test": self.test, "parts": parts}
        return self.case.home(self.plan) / f"tuned-{key_of(words)}" / "found.json"


def tuned(asked: Sequence[Asked], ticks: Sequence[Tick] = ()) -> list[dict[str, Any] | None]:
    """What fine-tunes of one method came to, done now or found; None: one whose loss diverged.

    train, validation, test   scores; test only if asked for
    without                   test scores without each of its parts in turn
    distance                  l2, of the trunk from the source's
    curve                     of the training
    """
    if not all(one.path().exists() for one in asked):
        for plan, cases in _by_plan(asked):
            make(cases, plan)
        where = quick(asked[0].case.device, asked[0].tune["precision"])
        with held(one.path().parent for one in asked), where:
            if not all(one.path().exists() for one in asked):
                _tune(asked, ticks)
    return [io.read_json(one.path())["found"] for one in asked]


def _by_plan(asked: Sequence[Asked]) -> Iterator[tuple[Plan | None, list[Case]]]:
    """Each plan with the cases, each once, that want an encoder of it."""
    plans = {json.dumps(one.plan, sort_keys=True): one.plan for one in asked}
    for text, plan in plans.items():
        mine = [one.case for one in asked if json.dumps(one.plan, sort_keys=True) == text]
        yield plan, list({case.home(plan): case for case in mine}.values())


def _tune(asked: Sequence[Asked], ticks: Sequence[Tick]) -> None:
    """Fine-tune them; together also those that were found: what one draws depends on the others."""
    hear: Sequence[Tick | None] = ticks or [None] * len(asked)
    calls = [partial(_told, one, tick) for one, tick in zip(asked, hear)]
    if asked[0].case.together:
        for one, told in zip(asked, all_of(calls)):
            _keep(one, told)
        return
    for one, call in zip(asked, calls):
        if not one.path().exists():
            _keep(one, call(None))


def _keep(asked: Asked, told: dict[str, Any] | None) -> None:
    if not asked.path().exists():
        about = {"tune": dict(asked.tune), "number": asked.number, "found": told}
        io.write_json(asked.path(), about)


def _told(asked: Asked, tick: Tick | None, crew: Member | None) -> dict[str, Any] | None:
    try:
        return _found(asked, tick, crew)
    except Diverged:  # others go on
        return None


def _found(asked: Asked, tick: Tick | None, crew: Member | None) -> dict[str, Any]:
    case, target = asked.case, asked.case.open()
    encoder = adapted(case, asked.plan)
    found = finetune(
        encoder,
        case.rows(encoder, target.labelled(case.seed, case.labels)),
        validation=case.rows(encoder, target.validation(case.seed, case.labels)),
        classes=target.classes,
        seed=step_seed(step_seed(case.seed, TUNE), asked.number),
        checks=2,
        capture=pool.CAPTURE,
        crew=crew,
        tick=tick,
        **asked.tune,
    )
    told = {
        **found.scores,
        "distance": found.classifier.distance(case.start()),
        "curve": [{"step": line["step"], "loss": line["loss"]} for line in found.history],
        "seconds": round(found.seconds, 3),  # of all that ran with it
    }
    return {**told, **_tested(found, encoder, case, target.test())} if asked.test else told


def _tested(found: Tuned, encoder: Encoder, case: Case, test: Examples) -> dict[str, Any]:
    """Scores on the test, whole and without each of its parts."""
    assert test.labels is not None
    logits, labels = found.logits(case.rows(encoder, test)), test.labels
    part = parts_of(labels, case.parts)
    kept = [scores(logits[part != p], labels[part != p]) for p in range(case.parts)]
    return {"test": scores(logits, labels), "without": kept}


def parts_of(labels: Tensor, count: int) -> Tensor:
    """`[N]`: the number of the part that each test item is in; every class is spread over all."""
    mixed = np.random.default_rng(0).permutation(len(labels))
    part = np.empty(len(labels), dtype=np.int64)
    # Dealt out class by class: the items of a class go to the parts in turn.
    part[mixed[np.argsort(labels.numpy()[mixed], kind="stable")]] = np.arange(len(labels)) % count
    return torch.from_numpy(part)


def on_part(found: Mapping[str, Any], measure: str, part: int) -> float:
    """A score of one part of the test, as a jackknife has it: P · whole − (P − 1) · without it.

    Of an accuracy or a mean loss it is the plain value on that part, where parts are equal; of F1,
    which is no mean over items, its share in the whole, whose mean over parts is nearly the whole.
    """
    count = len(found["without"])
    return count * found["test"][measure] - (count - 1) * found["without"][part][measure]


def mean_of(found: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> float:
    """Of nested fine-tunes."""
    return fmean(value(one) for one in found)
