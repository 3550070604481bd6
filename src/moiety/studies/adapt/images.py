"""Does self-distillation beat fine-tuning and its rivals on images? (Table 1)"""

from __future__ import annotations

from .statements import ALIKE, LEAD, ahead, alike
from .tables import IMAGES, METHODS, adapt_study, arms_of

study = adapt_study(
    name="adapt/images",
    title="Six ways to a classifier of images",
    question="Is self-distillation more accurate than fine-tuning, its variants and further "
    "pre-training?",
    arms=arms_of(IMAGES, METHODS),
    tunes=2,
    claims=[
        *ahead(
            "self-distillation",
            ["fine-tuning", "RecAdam", "MARS", "R3F", "further pre-training"],
            IMAGES,
            quote="self-distillation is more accurate on every image set",
            mark="3 §5.3",
            **LEAD,
        ),
        *alike(
            "further pre-training",
            ["fine-tuning"],
            IMAGES,
            quote="further pre-training alone helps a Vision Transformer little",
            mark="3 §1, §5.3",
            number="from -2.0 to +1.1 points, on the mean of six sets -0.1",
            **ALIKE,
        ),
    ],
    deviations=[
        "PneumoniaMNIST, Fashion-MNIST with 1 000 labels, USPS with 500 and Omniglot with 12 "
        "drawings of a character instead of Aircraft, CUB, Chest X-ray, DTD, Dogs and Flower",
    ],
)
