"""CIFAR-10 in 100 mega-batches: how long to wait, and whether to ensemble or to grow.

(Caccia et al. 2022, Figures 1 to 3 for a narrow VGG19.) A block of seeds is one program for each
waiting time and width.

What is said of the data is that of the 30 000 training images which the runs had, wherever this is
read: claims must stay those that were measured. To run it with all 50 000, take out the first
deviation (`replay` has it, too) and, once a phase has 100 epochs again, set `DOWN` and the tier of
replay's claims on CIFAR to "exact".
"""

from __future__ import annotations

from typing import Any

from ...lab.claims import Tier
from ...lab.study import Scale, Study
from . import PAPER
from .firefly import WIDEST
from .statements import arm, arms_of, early_and_late, ensembles, growing, larger, mixtures, shorter
from .vision import MACHINE, METRICS, run_block

SMALL, LARGE = WIDTHS = (8, 32)
WAITS, TWO = (2, 10, 50, 100), (2, 10)
LADDER = (8, 16, 32, 56, 80)  # of single models; the last costs more than a large FF

COMMON = {"model": "vgg", "widths": WIDTHS, "ladder": LADDER, "of": 100, "batch": 128, "members": 3}
SCALES = {
    "smoke": Scale(
        seeds=2,
        settings={
            **COMMON,
            "data": "digits-32",
            "rows": 24,
            "batches": 2,
            "narrow": 32,
            "epochs": 1,
            "patience": 1,
            "batch": 32,
            "members": 2,
            "candidates": 2,
            "copies": 2,
        },
    ),
    "small": Scale(
        seeds=5,
        settings={
            **COMMON,
            "data": "cifar10",
            "rows": 240,
            "batches": 4,
            "narrow": 8,
            "epochs": 2,
            "patience": 2,
            "batch": 32,
            "candidates": 8,
        },
    ),
    "full": Scale(
        seeds=5,
        settings={
            **COMMON,
            "data": "cifar10",
            "batches": 100,
            "epochs": 15,
            "patience": 25,
            "kept": True,
        },
    ),
}
# At w = 2 Firefly becomes 3.4 times as wide, as at w = 10, not 6.4 times, which costs 40 times.
RARER = {arm("FF", width, 2): {"every": 12} for width in WIDTHS}
ARMS = {
    name: {**own, **RARER.get(name, {})}
    for name, own in arms_of(WIDTHS, WAITS, TWO, LADDER, TWO[1:]).items()
}
DOWN: Tier = "scaled down"
BEST: dict[str, Any] = {"mark": "4 §4.6 (1)", "tier": DOWN}

study = Study(
    name="anytime/cifar",
    title="CIFAR-10 in 100 mega-batches: wait, ensemble or grow",
    question="How long should a VGG19 wait before it trains, and does growing it pay?",
    run_block=run_block,
    block=5,
    arms=ARMS,
    metrics=METRICS,
    scales=SCALES,
    claims=[
        *shorter("SM", LARGE, 10, [2, 50, 100], quote="waiting 10 is best for SM", **BEST),
        *shorter("Ens", LARGE, 10, [2, 50, 100], quote="waiting 10 is best for Ens", **BEST),
        *early_and_late("SM", LARGE, [2, 10, 100], DOWN),
        *early_and_late("Ens", LARGE, [2, 10, 100], DOWN),
        *larger(SMALL, LARGE, 10, DOWN),
        *growing(SMALL, 10, DOWN),
        *growing(LARGE, 10, DOWN),
        *ensembles(LARGE, 10, DOWN),
        *mixtures(SMALL, LARGE, 10, DOWN),
    ],
    varies=(
        "cut of the stream",
        "first weights",
        "order of the images",
        "crops and flips",
        "new gates",
    ),
    along="Mega-batch",
    paper=PAPER,
    deviations=(
        "data: 30 000 of the 50 000 training images, so that a mega-batch has 300, not 500",
        "epochs: at most 15 in a phase, not 100, to fit the time; so patience, 25 as the paper's, "
        "never ends one, and the best weights on validation are kept all the same",
        "momentum: plain for all learners; the paper's code has Nesterov's for gMoE and Firefly",
        "normalisation by the mean and spread of our training images",
        "validation: a tenth of each mega-batch, as in the text; the paper's code splits a phase",
        "UMix averages logits and gEns probabilities, as in the text; the code sums and averages "
        "logits",
        "gMoE starts with one expert a layer, as in the text; a leaf is split by its loss",
        "Firefly: batch norm keeps its statistics while candidates are tried; at w = 2 it grows "
        "four times, as at w = 10, not nine times; no layer gets more than "
        f"{WIDEST} channels",
        "Mem and Comp are sums from t = 1; backward passes count in Comp (the paper's forward-only "
        "figure stands beside it)",
    ),
    notes=(
        "waiting: before the first phase the error is chance; at smaller scales a waiting time is "
        "the same share of fewer mega-batches",
        "equal cost: the average error of single models of widths 8, 16, 32, 56 and 80, "
        "interpolated in the logarithm of Comp or Mem, minus the learner's; none more than a tenth "
        "beyond the ends; at w = 10, where the claims are",
        "single models are the first members of the ensembles, with the same seeds",
        "search: none; the settings are those of the paper's code for all arms",
        *MACHINE,
        "smallest scale: digits of scikit-learn, enlarged, stand in for the images",
    ),
)
