"""Does self-distillation help most where labels are few? (Fig. 3)"""

from __future__ import annotations

from .scales import VARIANT_SCALES
from .statements import LEAD, ahead
from .tables import FINE_TUNING, SELF, adapt_study, arms_of

LABELS = (100, 1000, 3000)
ARMS = {}
for labels in LABELS:
    ARMS[f"fine-tuning, {labels}"] = {**FINE_TUNING, "labels": labels}
    ARMS[f"self-distillation, {labels}"] = {**SELF, "labels": labels}

study = adapt_study(
    name="adapt/low-resource",
    title="Self-distillation with few labels",
    question="How much does self-distillation gain with 100 to 3 000 labels?",
    arms=arms_of(["fashion-mnist"], ARMS),
    claims=[
        claim
        for labels in LABELS
        for claim in ahead(
            f"self-distillation, {labels}",
            [f"fine-tuning, {labels}"],
            on="fashion-mnist / ",
            quote=f"self-distillation gains with {labels} labels",
            mark="3 §5.8 Fig. 3",
            number="13 points at 1 000 images, 6 at 2 500 (CIFAR-100)",
            **LEAD,
        )
    ],
    deviations=["Fashion-MNIST with 100 to 3 000 labels instead of CIFAR-100 with 1 000 to 50 000"],
    notes=[
        "gains: that they fall with the labels is seen from the table; a claim compares two arms, "
        "not two differences",
    ],
    scales=VARIANT_SCALES,
)
