"""Does the weight of the masked loss matter? (Table 6)"""

from __future__ import annotations

from .scales import VARIANT_SCALES
from .statements import ALIKE, alike
from .tables import SELF, adapt_study, arms_of

WEIGHTS = (1, 0.5, 0.3, 0.1)

study = adapt_study(
    name="adapt/weight",
    title="The weight of the masked loss in self-distillation",
    question="Is self-distillation as good with a smaller weight of the masked loss?",
    arms=arms_of(
        ["fashion-mnist"],
        {f"weight {w:g}": SELF if w == 1 else {**SELF, "mae_weight": w} for w in WEIGHTS},
    ),
    claims=[
        alike(
            "weight 1",
            f"weight {w:g}",
            on="fashion-mnist / ",
            quote="a smaller weight of the masked loss changes little",
            mark="3 §5.7 Table 6",
            number="58.06 % at 1; 57.76, 58.21 and 57.76 % at 0.5, 0.3 and 0.1 (CUB)",
            **ALIKE,
        )
        for w in WEIGHTS[1:]
    ],
    deviations=["Fashion-MNIST with 1 000 labels instead of CUB"],
    scales=VARIANT_SCALES,
)
