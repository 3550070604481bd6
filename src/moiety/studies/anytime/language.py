"""Switch transformers on a stream of text (Fig. 5): wait for size, ensemble, or grow?

Four mega-batches of film reviews, a fifth for the test; every mega-batch is a phase. All arms see
the same tokens in every phase, in a number of passes; the arm with half the passes is an ensemble
that costs as much as a single model. Average perplexity is over the four times. Claims are about
nats per token, of which 0.01 is one percent of perplexity whatever its level.

The time at full scale, by which the tokens of a mega-batch were chosen (a guess, before any run on
a GPU; `python -m moiety.studies.anytime.pilot full cuda` measures it):

    FLOPs a token, forward and backward:   base 27 M, large 119 M (counted)
    a phase of one model:                  1792 sequences × 256 tokens × 4 passes = 1.8 M tokens,
                                           in 448 steps of 16 sequences
    language: models × phases, each size:  (3 SM + 2 Ens + 1 half Ens + gEns + 2 gMoE) × 4 = 36
    sequential (see there), each size:     2 members × (4 + 3 + 4 + 4) = 30
    both, 5 seeds:                         66 × 448 × 5 = 148 000 steps of each size, and
                                           66 × 1.8 M × (27 M + 119 M) × 5 = 8.8e16 FLOPs
    a captured step of one process:        about 4 ms (base) and 6 ms (large): 25 minutes; small
                                           kernels leave half of the GPU idle, so that processes
                                           which share it should need 15, at 100 TFLOP/s
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from ...anytime.ledger import Line, summary
from ...lab.claims import Claim, greater
from ...lab.study import Metric, Metrics, Running, Scale, Settings, Study
from . import PAPER
from .language_models import make, settled
from .text import corpus_of
from .walk import largest_gap, walk

AVERAGE, NATS, AHEAD = "average perplexity", "nats", "nats, large ahead"
MARGIN = 0.01  # nats a token
LARGE, BASE = "large", "base"
HALF = "Ens4@2, half the passes"

KINDS: dict[str, Settings] = {
    "SM4": {"learner": "single", "experts": 4},
    "SM8": {"learner": "single", "experts": 8},
    "SM12": {"learner": "single", "experts": 12},
    "Ens4@2": {"learner": "ensemble", "experts": 4, "options": {"members": 2}},
    HALF: {"learner": "ensemble", "experts": 4, "options": {"members": 2}, "share": 0.5},
    "gEns": {"learner": "growing-ensemble", "experts": 4},
    "gMoE families": {"learner": "growing-switch", "experts": 4, "options": {"how": "families"}},
    "gMoE rows": {"learner": "growing-switch", "experts": 4, "options": {"how": "rows"}},
}


# -- a trial ---------------------------------------------------------------------------------------


def run(running: Running) -> Metrics:
    """Walk one learner over the stream, from one seed."""
    seed, device = running.seed, running.device
    settings = settled(running.settings, device)
    corpus = corpus_of(settings, device)
    running.curve.rewind(-1)

    def draw(line: Line) -> None:
        shown = {word: line[word] for word in ("loss", "perplexity")}
        running.curve.append(line["t"], **shown)

    lines = walk(
        make(settings, corpus, seed, device),
        corpus.batches,
        corpus.test,
        seed=seed,
        metric="perplexity",
        checkpoint=running.checkpoint,
        tick=running.tick,
        on_line=draw,
    )
    running.extra["parameters"] = lines[-1]["parameters"]
    rate = settings["sizes"][settings["size"]]["lr"]
    return {**metrics_of(lines, settings["size"]), "lr": rate}


def metrics_of(lines: list[Line], size: str) -> dict[str, float | None]:
    """The numbers of a ledger."""
    sums = summary(lines)
    return {
        AVERAGE: sums.average,
        NATS: fmean(line["loss"] for line in lines),
        AHEAD: lines[0 if size == LARGE else -1]["loss"],
        "first": lines[0]["perplexity"],
        "last": sums.final,
        "validation": lines[-1]["validation"],
        "training": sums.comp / 1e15,
        "forward": sums.comp_forward / 1e15,
        "memory": sums.mem / 1e6,
        "parameters": lines[-1]["parameters"] / 1e6,
        "answer": lines[-1]["inference_flops"] / 1e9,
        "gap": largest_gap(lines),
    }


# -- claims ----------------------------------------------------------------------------------------


def better(a: str, b: str, quote: str, *, metric: str = NATS, **words: Any) -> Claim:
    usual = {"tier": "proxy", "mark": "4 §4.6 (8)"}
    return greater(
        a,
        b,
        margin=MARGIN,
        metric=metric,
        quote=quote,
        reason="one percent of perplexity, the smallest difference that the paper's Table 1 "
        "speaks of (24.35 against 24.13)",
        **{**usual, **words},
    )


OWN = {"tier": "our own", "mark": ""}
SIZE_FIRST = "large models after 1 mega-batch beat all base models after 4"
CLAIMS = [
    *(better(f"{LARGE} SM4", f"{BASE} {k}", SIZE_FIRST, metric=AHEAD) for k in KINDS if k != HALF),
    *(
        better(f"{LARGE} {HALF}", f"{LARGE} {k}", "Ens is best at equal compute for large models")
        for k in ("SM4", "SM8", "SM12", "gEns", "gMoE families")
    ),
    *(
        better(f"{BASE} SM12", f"{BASE} {k}", "SM is best at equal compute for base models")
        for k in (HALF, "gEns", "gMoE families")
    ),
    *(
        better(f"{s} gMoE families", f"{s} gEns", "gMoE is more memory-efficient than gEns")
        for s in (BASE, LARGE)
    ),
    *(
        better(f"{s} gMoE families", f"{s} {k}", quote, **OWN)
        for s in (BASE, LARGE)
        for k, quote in (
            ("gMoE rows", "growth that keeps the function is better than copied rows"),
            ("SM4", "experts that are added on the way are worth having"),
        )
    ),
]


# -- the study -------------------------------------------------------------------------------------


def plain(label: str, form: str) -> Metric:
    return Metric(label, better="", format=form, split="")


METRICS = {
    AVERAGE: Metric("Average perplexity", "lower", ".1f"),
    NATS: Metric("Average loss, nats a token", "lower", ".3f"),
    AHEAD: Metric("Loss after 1 (large) or all (base) mega-batches", "lower", ".3f"),
    "first": Metric("Perplexity after the first", "lower", ".1f"),
    "last": Metric("Perplexity after the last", "lower", ".1f"),
    "validation": Metric("Score on the last validation, −nats", "higher", ".3f", "validation"),
    "training": plain("Training, PFLOPs", ".3g"),
    "forward": plain("Forward passes of training, PFLOPs", ".3g"),
    "memory": plain("Mem, million parameters summed over t", ".4g"),
    "parameters": plain("Million parameters at the end", ".4g"),
    "answer": plain("GFLOPs of a sequence at the end", ".3g"),
    "gap": Metric("Largest change by growth", "lower", ".2g", "validation"),
    "lr": plain("Learning rate", ".2g"),
}
SMOKE: dict[str, Any] = {
    "text": "made up",
    "batches": 2,
    "vocabulary": 290,
    "length": 16,
    "sequences": 16,
    "validation": 2,
    "test": 8,
    "batch": 16,
    "passes": 2,
    "save_every": 10.0,
    "sizes": {
        BASE: {"dim": 16, "depth": 2, "heads": 2, "lr": 3e-3},
        LARGE: {"dim": 32, "depth": 2, "heads": 2, "lr": 3e-3},
    },
}
SMALL = SMOKE | {
    "text": "reviews",
    "batches": 4,
    "vocabulary": 1024,
    "length": 64,
    "sequences": 256,
    "validation": 32,
    "test": 128,
    "batch": 16,
    "sizes": {
        BASE: {"dim": 32, "depth": 2, "heads": 4, "lr": 1e-2},
        LARGE: {"dim": 64, "depth": 4, "heads": 4, "lr": 1e-2},
    },
}
FULL = SMALL | {
    "vocabulary": 4096,
    "length": 256,
    "sequences": 1792,
    "validation": 128,
    "test": 1024,
    "eval_batch": 64,
    "passes": 4,
    "save_every": 60.0,  # a state is up to 2 GB
    "sizes": {
        BASE: {"dim": 256, "depth": 4, "heads": 4, "rates": [7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2]},
        LARGE: {"dim": 512, "depth": 6, "heads": 8, "rates": [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]},
    },
}
TEXT_NOTES = (
    "corpus: 40 000 film reviews in a fixed order, in 4 equal mega-batches and a fifth for the "
    "test; of a mega-batch the last tenth of its reviews is for validation; at full scale 1 792 "
    "sequences of 256 tokens of each are trained on and 1 024 of the test are measured",
    "tokens: 4 096 byte pairs learned from the first mega-batch; 3.7 bytes a token",
    "training: AdamW, fresh in each phase, with a linear warm-up over a tenth of its steps and a "
    "cosine down to nothing; no dropout; after each pass validation decides whether the weights "
    "are kept",
    "learning rates: one for each size, the same for all arms; at full scale that of five, twice "
    "as large each, with the best validation of a single model with four experts after the first "
    "mega-batch, chosen by a rule set before any run at that scale; its runs are not in the "
    "seconds of the trials",
    "settings: the middle rate, and batches of 16 sequences instead of 32, were set after single "
    "runs of small models on the corpus, whose perplexity on the test was seen; margins stayed",
    "measuring: at full scale 64 sequences share the capacity of an expert, in training 16 do",
    "seeds: as many as fit the time, set beforehand",
    "precision: bf16 on a GPU except for routers and losses",
    "smallest scale: a text of a small grammar in the place of the corpus",
)
TEXT_DEVIATIONS = (
    "an eighth (base) and a fifth (large) of the paper's parameters, a thousandth of its text and "
    "448 steps a mega-batch instead of 120 000; Books, Wikipedia and Common "
    "Crawl are replaced by film reviews",
    "of a mega-batch the first 18 % of the text that is there to train on, 0.46 of some 2.6 "
    "million tokens, and of the test the first 9 %, to fit the time",
    "validation data are of the mega-batch itself, not a fixed set",
    "base is 4 layers × 256 (6 × 512 in the paper), large 6 × 512 (12 × 768), length 256 (512)",
)

study = Study(
    name="anytime/language",
    title="Switch transformers on a stream of text",
    question="For a language model whose text arrives in parts, what is a larger model, an "
    "ensemble or growth worth?",
    run=run,
    arms={
        f"{size} {kind}": {"size": size, **settings}
        for size in (BASE, LARGE)
        for kind, settings in KINDS.items()
    },
    metrics=METRICS,
    scales={
        "smoke": Scale(seeds=2, settings=SMOKE),
        "small": Scale(seeds=5, settings=SMALL),
        "full": Scale(seeds=5, settings=FULL),
    },
    claims=CLAIMS,
    varies=("first weights", "order of the sequences"),
    along="Mega-batches",
    paper=PAPER,
    deviations=TEXT_DEVIATIONS,
    notes=(
        *TEXT_NOTES,
        "compute: all arms see the same tokens; an ensemble of two costs twice as much, so that "
        "at equal compute it has half the passes",
        "growth: before each phase but the first the two experts of a layer with the largest loss "
        "are copied, 4 to 10 in four mega-batches; the growing ensemble adds a copy of its last "
        "member and freezes the old ones",
        "memory: gMoE holds fewer parameters than gEns at every time (counted: column Mem), so it "
        "is the more efficient one where its loss is not higher; a higher one would settle nothing",
    ),
)
