"""Is a stream worse than all its text at once? (Table 1: the same data, the same compute.)

An ensemble of two models with four experts meets k mega-batches one after the other, or all of them
shuffled, from the same first weights and with as many steps. What the stream costs is the
difference of the losses on the test; the arm "i.i.d." is what it is compared with: nothing.

The mega-batches are of one distribution. So two things differ: passes are repeated over a part
before the next one comes, and sequential training warms up and decays in each mega-batch, as a
learner must that is to be good at any time, where i.i.d. training does so once. The "order" costs
what is left of it beside i.i.d. training with the same k fresh starts. With k = 4 sequential
training is the run with k = 3, gone on: 4 + 3 + 4 + 4 phases a member. (Time: see `language`.)
"""

from __future__ import annotations

from typing import Any

from ...anytime.ledger import Line
from ...lab.claims import Claim, greater
from ...lab.study import Metric, Metrics, Running, Scale, Study
from . import PAPER, language
from .language import (
    BASE,
    KINDS,
    LARGE,
    TEXT_DEVIATIONS,
    TEXT_NOTES,
)
from .language_models import make, phase_steps, settled
from .text import Corpus, corpus_of
from .walk import Tick, Under, part_of, walk

LENGTHS = (3, 4)  # mega-batches; the paper's k
IID, SMALL_ONE, BIG = "i.i.d.", "small", "big"
COST = {k: f"cost, k = {k}" for k in LENGTHS}
LAST = max(LENGTHS)
PHASES = LAST + sum(LENGTHS) + LAST  # as long as that of a mega-batch
ORDER, RESTARTS = f"order, k = {LAST}", "restarts"


def run(running: Running) -> Metrics:
    """Train both ways at every k, from one seed."""
    running.curve.rewind(-1)
    if "size" not in running.settings:
        return nothing(running)
    corpus = corpus_of(running.settings, running.device)
    parts: list[str | int] = ["sequential", *LENGTHS, RESTARTS]
    saved = running.checkpoint.load()
    found: dict[str, Any] = dict(saved["before"]) if saved else {}
    for number, part in enumerate(parts):
        if str(part) not in found:
            tick = part_of(running.tick, number, len(parts))
            found[str(part)] = _part(running, corpus, part, dict(found), tick)
    metrics = metrics_of(found)
    for k in LENGTHS:
        running.curve.append(k, loss=metrics[COST[k]])
    return metrics


def _part(
    running: Running, corpus: Corpus, part: str | int, before: dict[str, Any], tick: Tick | None
) -> dict[str, Any]:
    """Train one way: the losses on the test after each phase, parameters and FLOPs."""
    settings = settled(running.settings, running.device)
    seed, batches = running.seed, corpus.batches
    if isinstance(part, int):
        batches = (corpus.joined(part),)
    elif part == RESTARTS:  # as long as on one mega-batch each time, in a new order
        batches = tuple(corpus.joined(LAST, number) for number in range(1, LAST + 1))
        settings = {**settings, "steps": phase_steps({**settings, "options": {}})}
    lines = walk(
        make(settings, corpus, seed, running.device),
        batches,
        corpus.test,
        seed=seed,
        metric="perplexity",
        checkpoint=Under(running.checkpoint, before),
        tick=tick,
    )
    return told(lines)


def told(lines: list[Line]) -> dict[str, Any]:
    """What is kept of a part."""
    return {
        "losses": [line["loss"] for line in lines],
        "perplexities": [line["perplexity"] for line in lines],
        "flops": [line["flops"]["train"] for line in lines],
        "parameters": lines[-1]["parameters"],
    }


def metrics_of(found: dict[str, Any]) -> dict[str, float | None]:
    """The numbers of a trial: at every k both perplexities, and their difference in nats."""
    metrics: dict[str, float | None] = {}
    stream = found["sequential"]
    for k in LENGTHS:
        once = found[str(k)]
        metrics |= {
            COST[k]: stream["losses"][k - 1] - once["losses"][-1],
            f"i.i.d., k = {k}": once["perplexities"][-1],
            f"sequential, k = {k}": stream["perplexities"][k - 1],
            f"training i.i.d., k = {k}": once["flops"][-1] / 1e15,
            f"training sequential, k = {k}": sum(stream["flops"][:k]) / 1e15,
        }
    again = found[RESTARTS]
    return {
        **metrics,
        ORDER: stream["losses"][LAST - 1] - again["losses"][-1],
        RESTARTS: again["perplexities"][-1],
        "training with restarts": sum(again["flops"]) / 1e15,
        "parameters": stream["parameters"] / 1e6,
    }


def nothing(running: Running) -> Metrics:
    """What i.i.d. training costs beside itself."""
    for k in LENGTHS:
        running.curve.append(k, loss=0.0)
    return {name: 0.0 if name in (*COST.values(), ORDER) else None for name in METRICS}


# -- claims ----------------------------------------------------------------------------------------

PAID = {  # Table 1
    (SMALL_ONE, 3): "24.57 against 24.30",
    (BIG, 3): "19.14 against 18.04",
    (SMALL_ONE, 4): "24.35 against 24.13",
    (BIG, 4): "18.92 against 17.88",
}


def worse(size: str, k: int) -> Claim:
    return greater(
        IID,
        size,
        margin=0.005,
        metric=COST[k],
        quote=f"sequential training is worse than i.i.d. training: {size} models, k = {k}",
        reason="half of the smallest difference in the paper's table, 0.009 nats (24.35 against "
        "24.13): half a percent of perplexity",
        tier="proxy",
        mark="4 §4.5, §4.6 (9)",
        number=PAID[size, k],
    )


def more_for_big(k: int) -> Claim:
    return greater(
        SMALL_ONE,
        BIG,
        margin=0.01,
        metric=COST[k],
        quote=f"and more so for big models, k = {k}",
        reason="one percent of perplexity, a fifth of the paper's 0.048 nats",
        tier="proxy",
        mark="4 §4.5, §4.6 (9)",
        number=f"{PAID[BIG, k]}; {PAID[SMALL_ONE, k]}",
    )


def by_order(size: str) -> Claim:
    return greater(
        IID,
        size,
        margin=0.005,
        metric=ORDER,
        quote=f"the order alone, at equal schedules, makes sequential training worse: {size}",
        reason="as of the whole cost: half a percent of perplexity",
        tier="our own",
    )


# -- the study -------------------------------------------------------------------------------------

METRICS = {
    **{COST[k]: Metric(f"Cost of the stream, k = {k}, nats", "lower", ".3f") for k in LENGTHS},
    ORDER: Metric(f"Cost of its order alone, k = {LAST}, nats", "lower", ".3f"),
    **{
        f"{way}, k = {k}": Metric(f"Perplexity, {way}, k = {k}", "lower", ".2f")
        for k in LENGTHS
        for way in ("i.i.d.", "sequential")
    },
    **{
        f"training {way}, k = {k}": language.plain(f"PFLOPs of training, {way}, k = {k}", ".3g")
        for k in LENGTHS
        for way in ("i.i.d.", "sequential")
    },
    RESTARTS: Metric(f"Perplexity, i.i.d. with {LAST} starts", "lower", ".2f"),
    "training with restarts": language.plain("PFLOPs of training, i.i.d. with restarts", ".3g"),
    "parameters": language.plain("Million parameters", ".4g"),
}
ENSEMBLE = KINDS["Ens4@2"]

study = Study(
    name="anytime/sequential",
    title="The same text at once or in sequence",
    question="What does it cost a language model to meet its text in parts, one after the other?",
    run=run,
    arms={
        IID: {},
        SMALL_ONE: {"size": BASE, **ENSEMBLE},
        BIG: {"size": LARGE, **ENSEMBLE},
    },
    metrics=METRICS,
    scales={
        "smoke": Scale(seeds=2, settings={**language.SMOKE, "batches": LAST}),
        "small": Scale(seeds=5, settings=language.SMALL),
        "full": Scale(seeds=5, settings=language.FULL),
    },
    claims=[
        *(worse(size, k) for size in (SMALL_ONE, BIG) for k in LENGTHS),
        *(more_for_big(k) for k in LENGTHS),
        *(by_order(size) for size in (SMALL_ONE, BIG)),
    ],
    varies=("first weights", "order of the sequences"),
    along="Mega-batches",
    paper=PAPER,
    deviations=TEXT_DEVIATIONS,
    notes=(
        *TEXT_NOTES,
        "schedule: i.i.d. training has one warm-up and one decay, sequential training one of each "
        "in every mega-batch; the cost holds both, this and the order; that of the order alone is "
        "beside i.i.d. training with a fresh start in every quarter of its steps",
        "curve: the loss drawn at k = 3 and 4 is what the stream costs, in nats",
        "claims: the two on the order alone are ours; the paper has none with equal schedules",
        "arms: i.i.d. is no training but the zero that a cost is compared with; the perplexities "
        "of i.i.d. training stand beside those of sequential training",
    ),
)
