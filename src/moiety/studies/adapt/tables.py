"""What the studies of adaptation share: arms, one trial, and its numbers.

    study = adapt_study(name="adapt/images", arms=together(SETS, METHODS), claims=[…], …)

An arm is a method on one set, or on several with the same settings: then its numbers are means
over the sets, and the score of each set is told beside them. A seed is a new source model, labelled
subset, validation split and fine-tunes; the fine-tunes of a seed are nested in it, their mean is
its number, and intervals are over seeds.

The test is the same for all seeds, so that a spread over seeds would not know that another test
might have said something else. So it is cut into as many parts as there are seeds, and claims are
judged on scores in which both differ: that of a seed on the whole test, moved by how much a part of
the test, another one for each seed, differs from the whole for all seeds (`judged`). The mean stays
that of the whole test, and a t-interval covers sources, splits, fine-tunes and test items.

How much of all this a scale has, and how settings are searched: `scales`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from ...lab.claims import Claim
from ...lab.study import Metric, Metrics, Running, Scale, Settings, Study
from ...lab.tuning import FIRST_SEED
from . import PAPER, pool, tunes
from .pool import kind_of
from .scales import SCALES, VALIDATION, search_of
from .statements import (
    ALIKE_TUNED,
    CHOSEN,
    DEVIATIONS,
    JUDGED,
    JUDGED_GAP,
    JUDGED_LOSS,
    NOTES,
    RELATIVE,
    SEARCHING,
)
from .targets import TARGETS

BLOCK = 8  # seeds, or points of the search, that are one program at most
SEARCH = 1000  # the first number of the fine-tunes of a search
SEARCHED = 0  # the seed whose validation split settings are chosen on

# -- arms ------------------------------------------------------------------------------------------

FINE_TUNING: Settings = {"adapt": None}
FURTHER: Settings = {"adapt": "further"}
SELF: Settings = {"adapt": "distil"}
METHODS: dict[str, Settings] = {
    "fine-tuning": FINE_TUNING,
    "RecAdam": {**FINE_TUNING, "method": "recadam"},
    "MARS": {**FINE_TUNING, "method": "mars"},
    "R3F": {**FINE_TUNING, "method": "r3f"},
    "further pre-training": FURTHER,
    "self-distillation": SELF,
}


def arm(target: str, method: str) -> str:
    """The name of an arm."""
    return f"{target} / {method}"


def arms_of(targets: Iterable[str], methods: Mapping[str, Settings]) -> dict[str, Settings]:
    """Every method on every set."""
    return {
        arm(target, method): {"target": target, **settings}
        for target in targets
        for method, settings in methods.items()
    }


def together(targets: Sequence[str], methods: Mapping[str, Settings]) -> dict[str, Settings]:
    """Every method, on all sets at once."""
    return {method: {"target": list(targets), **words} for method, words in methods.items()}


# -- a trial ---------------------------------------------------------------------------------------

SCORE, GAP, DISTANCE = "score", "gap", "distance"
TRAIN_LOSS, TEST_LOSS = "training loss", "test loss"
METRICS = {
    SCORE: Metric("Test accuracy or F1", format=".1%"),
    JUDGED: Metric("Test accuracy or F1, with the test's own error", format=".1%"),
    VALIDATION: Metric("Validation accuracy or F1", format=".1%", split="validation"),
    TEST_LOSS: Metric("Test loss", better="lower", format=".3f"),
    JUDGED_LOSS: Metric("Test loss, with the test's own error", better="lower", format=".3f"),
    TRAIN_LOSS: Metric("Training loss", better="", format=".2g", split="train"),
    GAP: Metric("Test less training loss", better="lower", format=".3f"),
    JUDGED_GAP: Metric("Test less training loss, likewise", better="lower", format=".3f"),
    DISTANCE: Metric("Distance from the source's weights", better="lower", format=".2f", split=""),
    RELATIVE: Metric("Its natural logarithm", better="lower", format=".3f", split=""),
}


def run_block(runs: Sequence[Running]) -> list[Metrics]:
    """Fine-tune the encoders of an arm for several seeds, or points of the search, at once.

    Seeds past "copies", which nobody asked for, are not trained.
    """
    searching = runs[0].settings.get("stage") == "tune"
    asked = runs if searching else runs[: runs[0].settings.get("copies")]
    sets = [one["target"] for one in pool.each_of(runs[0].settings)]
    told = [run_set(asked, number, searching) for number in range(len(sets))]
    found: list[Metrics] = [_joined(sets, each) for each in zip(*told)]
    return found + [dict.fromkeys(found[0]) for _ in runs[len(asked) :]]


def _joined(sets: Sequence[str], told: Sequence[dict[str, float | None] | None]) -> Metrics:
    """The numbers of a trial from those of its sets; none where a loss diverged."""
    known = [one for one in told if one is not None]
    if len(known) < len(told):
        return {}
    means = {name: _mean([one[name] for one in known]) for name in METRICS}
    if len(sets) == 1:
        return means
    return means | {each_score(target): one[SCORE] for target, one in zip(sets, known)}


def run_set(
    runs: Sequence[Running], number: int, searching: bool
) -> list[dict[str, float | None] | None]:
    """The numbers of one set, by trial."""
    asked: list[tunes.Asked] = []
    for run in runs:
        settings = pool.each_of(run.settings)[number]
        case = pool.case_of(settings, SEARCHED if searching else run.seed, run.device)
        plan, tune = pool.plan_of(settings), tunes.tune_of(settings)
        # Of its own in the search, and the same one for every study.
        first = SEARCH + run.seed - FIRST_SEED if searching else 0
        numbers = range(first, first + (1 if searching else settings["tunes"]))
        asked += [tunes.Asked(case, plan, tune, n, test=not searching) for n in numbers]
    each = len(asked) // len(runs)  # fine-tunes of a trial
    found = tunes.tuned(asked, [run.tick for run in runs for _ in range(each)])
    by_trial = [found[i : i + each] for i in range(0, len(found), each)]
    cases = [one.case for one in asked[::each]]
    told = [_told(*own, searching) for own in zip(runs, cases, by_trial)]
    if not searching:
        _judge([one for one in zip(told, cases, by_trial) if one[0] is not None])
    return told


def _told(
    running: Running, case: pool.Case, found: list[dict[str, Any] | None], searching: bool
) -> dict[str, float | None] | None:
    """The numbers of one set of a trial; none where a loss diverged."""
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    running.curve.rewind(-1)  # of several sets, the curve of the last
    for row in known[0]["curve"]:
        running.curve.append(**row)
    measure = TARGETS[case.target].measure
    told = {VALIDATION: tunes.mean_of(known, lambda one: one["validation"][measure])}
    if searching:  # the test stays closed
        return {**dict.fromkeys(METRICS), **told}
    return {**told, **tested(known, measure)}


def _judge(trials: Sequence[tuple[Any, pool.Case, list[Any]]]) -> None:
    """Add to the numbers of an arm those that claims are judged on."""
    if not trials:
        return
    places = [case.seed % case.parts for _, case, _ in trials]
    measure = TARGETS[trials[0][1].target].measure
    for name, plain, of in ((JUDGED, SCORE, measure), (JUDGED_LOSS, TEST_LOSS, "loss")):
        parts = [
            [fmean(tunes.on_part(one, of, place) for one in found) for place in places]
            for _, _, found in trials
        ]
        whole = [told[plain] for told, *_ in trials]
        for (told, *_), value in zip(trials, judged(whole, parts)):
            told[name] = value
    for told, *_ in trials:
        told[JUDGED_GAP] = told[JUDGED_LOSS] - told[TRAIN_LOSS]


def judged(whole: Sequence[float], parts: Sequence[Sequence[float]]) -> list[float]:
    """The score of every seed, moved by what its part of the test does to all of them.

    whole    by seed, on the whole test
    parts    by seed, on the part of each seed in turn

    With the seeds' own spread a, that of the parts b and that of what is left c, the variance of
    the mean is a/S + b/S + c/S², and that of these scores over S a/S + b/S + about 2c/S²: a little
    more than it need be, where a seed on its own part alone would have a/S + b/S + c/S.
    """
    mean = fmean(whole)
    return [score + fmean(column) - mean for score, column in zip(whole, zip(*parts))]


def each_score(target: str) -> str:
    """The metric of one set of several."""
    return f"score, {target}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def tested(found: list[dict[str, Any]], measure: str) -> dict[str, float]:
    """The numbers of a main trial by itself."""
    test = tunes.mean_of(found, lambda one: one["test"]["loss"])
    train = tunes.mean_of(found, lambda one: one["train"]["loss"])
    return {
        SCORE: tunes.mean_of(found, lambda one: one["test"][measure]),
        TEST_LOSS: test,
        TRAIN_LOSS: train,
        GAP: test - train,
        DISTANCE: tunes.mean_of(found, lambda one: one["distance"]),
        RELATIVE: tunes.mean_of(found, lambda one: math.log(one["distance"])),
    }


# -- a study ---------------------------------------------------------------------------------------

VARIES = (
    "source model",
    "labelled subset and validation split",
    "adaptation and fine-tunes",
    "part of the test",
)


def _without(scale: Scale, words: Iterable[str]) -> Scale:
    """A scale that lacks some settings, which its trials would not read."""
    kept = {word: value for word, value in scale.settings.items() if word not in words}
    return replace(scale, settings=kept)


def adapt_study(
    *,
    name: str,
    title: str,
    question: str,
    arms: Mapping[str, Settings],
    claims: Sequence[Claim],
    first: Sequence[str] = (),
    deviations: Sequence[str] = (),
    notes: Sequence[str] = (),
    scales: Mapping[str, Scale] = SCALES,
    varies: Sequence[str] = VARIES,
    tuned: Settings | None = None,
) -> Study:
    """A study of such trials.

    first    the metrics to show before the others
    tuned    how all arms are fine-tuned; None: as the search says for each
    """
    arms = {name: {**settings, **(tuned or {})} for name, settings in arms.items()}
    sets = dict.fromkeys(s["target"] for a in arms.values() for s in pool.each_of(a))
    others = {"image", "text"} - {kind_of(target) for target in sets}
    several = any(len(pool.each_of(a)) > 1 for a in arms.values())
    each = {each_score(t): Metric(f"On {t}", format=".1%") for t in sets if several}
    return Study(
        name=name,
        title=title,
        question=question,
        run_block=run_block,
        block=BLOCK,
        arms=arms,
        metrics={
            **{word: METRICS[word] for word in (*first, *(w for w in METRICS if w not in first))},
            **each,
        },
        scales={name: _without(scale, others) for name, scale in scales.items()},
        claims=claims,
        varies=varies,
        paper=PAPER,
        search=None if tuned else search_of(arms),
        deviations=[*DEVIATIONS, ALIKE_TUNED if tuned else CHOSEN, *deviations],
        notes=[*NOTES, *([] if tuned else [SEARCHING]), *notes],
    )
