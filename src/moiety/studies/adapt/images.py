"""Does self-distillation beat fine-tuning and its rivals on images? (Table 1)"""

from __future__ import annotations

from .scales import IMAGES
from .statements import ALIKE, LEAD, ahead, alike
from .tables import METHODS, adapt_study, together

RIVALS = [name for name in METHODS if name != "self-distillation"]
LEADS = (1.76, 2.16, 2.02, 2.06, 1.84)  # of self-distillation over these, means of six sets

study = adapt_study(
    name="adapt/images",
    title="Six ways to a classifier of images",
    question="Is self-distillation more accurate than fine-tuning, its variants and further "
    "pre-training?",
    arms=together(IMAGES, METHODS),
    claims=[
        *ahead(
            "self-distillation",
            RIVALS,
            quote="self-distillation is more accurate on image sets",
            mark="3 §5.3",
            numbers=dict(zip(RIVALS, (f"{lead:+.2f} points" for lead in LEADS))),
            **LEAD,
        ),
        alike(
            "further pre-training",
            "fine-tuning",
            quote="further pre-training alone helps a Vision Transformer little",
            mark="3 §1, §5.3",
            number="from -2.0 to +1.1 points, on the mean of six sets -0.1",
            **ALIKE,
        ),
    ],
    deviations=[
        "PneumoniaMNIST, Fashion-MNIST with 1 000 labels, USPS with 500 and 47 characters of "
        "Omniglot with 12 drawings each instead of Aircraft, CUB, Chest X-ray, DTD, Dogs and "
        "Flower",
    ],
)
