"""MNIST in 500 mega-batches: how long to wait, and whether to ensemble or to grow.

(Caccia et al. 2022, Figures 1 to 3 for the 3-layer MLP.) A block of seeds is one program for each
waiting time and width.
"""

from __future__ import annotations

from ...lab.study import Scale, Study
from . import PAPER
from .statements import arms_of, ensembles, growing, larger, mixtures, shorter
from .vision import MACHINE, METRICS, run_block

SMALL, LARGE = WIDTHS = (4, 64)
WAITS, TWO = (1, 5, 10, 50, 100, 500), (10, 50)
LADDER = (4, 16, 64, 320)  # of single models; the last costs more than what grows from large ones

COMMON = {"model": "mlp", "widths": WIDTHS, "ladder": LADDER, "of": 500, "batch": 128, "members": 3}
SMOKE = {**COMMON, "data": "digits", "rows": 120, "batches": 4, "epochs": 2, "patience": 1}
SCALES = {
    "smoke": Scale(seeds=2, settings={**SMOKE, "copies": 2}),
    "small": Scale(
        seeds=5,
        settings={
            **COMMON,
            "data": "mnist",
            "rows": 2400,
            "batches": 20,
            "epochs": 20,
            "patience": 5,
            "copies": 5,
        },
    ),
    "full": Scale(
        seeds=10,
        settings={
            **COMMON,
            "data": "mnist",
            "batches": 500,
            "epochs": 100,
            "patience": 25,
            "kept": True,
        },
    ),
}
WAITING = {"mark": "4 §4.6 (2)", "tier": "exact"}

study = Study(
    name="anytime/mnist",
    title="MNIST in 500 mega-batches: wait, ensemble or grow",
    question="How long should an MLP wait before it trains, and does growing it pay?",
    run_block=run_block,
    block=10,
    arms=arms_of(WIDTHS, WAITS, TWO, LADDER, TWO),
    metrics=METRICS,
    scales=SCALES,
    claims=[
        *shorter("SM", SMALL, 10, [1, 100], quote="some waiting suits small models", **WAITING),
        *shorter("Ens", SMALL, 10, [1, 100], quote="some waiting suits small Ens", **WAITING),
        *shorter("SM", LARGE, 1, [10, 50], quote="short waiting wins for large models", **WAITING),
        *shorter("Ens", LARGE, 1, [10, 50], quote="short waiting wins for large Ens", **WAITING),
        *larger(SMALL, LARGE, 10, "exact"),
        *growing(SMALL, 50, "exact"),
        *growing(LARGE, 50, "exact"),
        *ensembles(LARGE, 50, "exact"),
        *mixtures(SMALL, LARGE, 50, "exact"),
    ],
    varies=("cut of the stream", "first weights", "order of the images", "new gates"),
    along="Mega-batch",
    paper=PAPER,
    deviations=(
        "validation: a tenth of each mega-batch, as in the text; the paper's code splits a phase",
        "UMix averages logits and gEns probabilities, as in the text; the code sums and averages "
        "logits",
        "gMoE starts with one expert a layer, as in the text; a leaf is split by its loss",
        "growth: every phase where there are 10 or fewer, else about 10 times in a stream; the "
        "paper's code has every phase, for 10 phases",
        "Firefly is width growth of hidden layers as in section 3.5 of the digest, for an MLP",
        "Mem and Comp are sums from t = 1; backward passes count in Comp (the paper's forward-only "
        "figure stands beside it)",
    ),
    notes=(
        "waiting: before the first phase the error is chance; at smaller scales a waiting time is "
        "the same share of fewer mega-batches",
        "equal cost: the average error of single models of widths 4, 16, 64 and 320, interpolated "
        "in the logarithm of Comp or Mem, minus the learner's; none more than a "
        "tenth beyond the ends",
        "single models are the first members of the ensembles, with the same seeds",
        "search: none; the settings are those of the paper's code for all arms",
        *MACHINE,
    ),
)
