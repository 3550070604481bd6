"""How large the studies of adaptation are at each scale, and what they search for.

Settings are searched on seed 0, its validation split and fine-tunes of its own: 8 points, a
learning rate in each quarter of the range for each of two lengths, and one more number for the
methods that have one. The test stays closed. What a batch of an H200 takes, see `projection`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...lab.study import Scale, Settings
from ...lab.tuning import Choice, LogUniform, Search
from . import pool
from .pool import kind_of
from .sources import SEEDS

VALIDATION = "validation score"  # the metric that settings are chosen by
IMAGES = ("pneumoniamnist", "fashion-mnist", "usps", "omniglot")
TEXTS = ("acl-arc", "scierc", "chemprot", "tweeteval-emotion")


def _kind(
    steps: int, tune: int, batch: int, lr: float, precision: str = "float32", **more: Any
) -> dict[str, Any]:
    """The settings of images or of texts at a scale."""
    return {
        "adapt_steps": steps,
        "adapt_batch": 2 * batch,
        "adapt_lr": lr,
        "adapt_weight_decay": 0.01,
        "adapt_precision": precision,
        "tune_steps": tune,
        "tune_batch": batch,
        "tune_weight_decay": 0.01,
        "tune_precision": precision,
        "tune_dropout": 0.1,
        **more,
    }


STAND_INS = {**dict.fromkeys(IMAGES, "digits"), **dict.fromkeys(TEXTS, "made up")}
SCALES = {
    "smoke": Scale(
        seeds=1,  # the one that settings are searched on, so that its encoders serve both
        settings={
            "source": "smoke",
            "sets": STAND_INS,
            "parts": 2,
            "copies": 1,
            "tunes": 1,
            "label_share": 0.02,  # of the labels that an arm of its own number has
            "image": _kind(2, 2, 8, 1e-3),
            "text": _kind(2, 2, 8, 1e-3, length=16),
        },
    ),
    "small": Scale(  # what two cores can carry in a day
        seeds=SEEDS,
        settings={
            "source": "small",
            "sets": {},
            "parts": SEEDS,
            "copies": SEEDS,
            "crew": False,  # on a CPU, models take their steps faster alone
            "tunes": 1,
            "label_share": 1.0,
            "image": _kind(240, 150, 32, 1e-3),
            "text": _kind(300, 300, 32, 3e-4, "bfloat16", length=64),
        },
    ),
    "full": Scale(
        seeds=SEEDS,
        settings={
            "source": "full",
            "sets": {},
            "parts": SEEDS,
            "copies": SEEDS,
            "tunes": 1,
            "label_share": 1.0,
            "image": _kind(600, 250, 32, 5e-4, "bfloat16"),
            "text": _kind(600, 250, 32, 3e-4, "bfloat16", length=128),
        },
    ),
}


def of_seeds(scale: Scale, seeds: int) -> Scale:
    """A scale of another number of seeds, and of parts of the test."""
    return replace(scale, seeds=seeds, settings={**scale.settings, "parts": seeds, "copies": seeds})


# Texts take longer, and what follows the first studies of images has ten minutes of one H200.
TEXT_SCALES = {**SCALES, **{name: of_seeds(SCALES[name], 5) for name in ("small", "full")}}
VARIANT_SCALES = {**TEXT_SCALES, "small": SCALES["small"]}

# -- the search ------------------------------------------------------------------------------------

POINTS = {"smoke": 1, "small": 8, "full": 8}
RATES = {"image": LogUniform(1e-4, 3e-3), "text": LogUniform(5e-5, 1e-3)}
# Of the methods that have a number of their own; lr times strength stays below 1.
OWN = {
    "recadam": {"strength": LogUniform(1, 300)},
    "mars": {"radius": LogUniform(0.3, 30)},
    "r3f": {"weight": LogUniform(0.1, 10)},  # beside dropout its noise hardly counts
}
# Where weights and losses are compared, all arms are fine-tuned alike: a rate from the middle of
# that search, and its longer length.
COMMON: Settings = {"lr": 5e-4, "longer": 2}
BALANCED = 2217  # of the draws: a rate in each quarter of the range for each length


def search_of(arms: Mapping[str, Settings]) -> Search:
    """The same search for every arm."""
    spaces = {
        name: {
            "lr": RATES[kind_of(pool.each_of(settings)[0]["target"])],
            **OWN.get(settings.get("method", "plain"), {}),
        }
        for name, settings in arms.items()
    }
    space = {"longer": Choice([1, 2])}
    return Search(space=space, spaces=spaces, trials=POINTS, metric=VALIDATION, seed=BALANCED)
