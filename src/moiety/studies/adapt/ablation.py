"""Which parts of self-distillation matter? (Table 3), and what is lost by distilling less often?"""

from __future__ import annotations

from .scales import VARIANT_SCALES
from .statements import LEAD, ahead, alike
from .tables import adapt_study, arms_of
from .variants import EVERY, NOTES, VARIANTS

ON = "fashion-mnist / "
TABLE = {  # full less variant, in points, on CUB
    "further pre-training": 2.34,
    "further pre-training, twice": 4.65,
    "prediction matching": 2.79,
    "weight matching, l2": 4.36,
    "weight matching, MARS": 3.24,
}

study = adapt_study(
    name="adapt/ablation",
    title="Self-distillation of an image model, without one of its parts",
    question="Which parts of self-distillation does its lead need?",
    arms=arms_of(["fashion-mnist"], VARIANTS),
    claims=[
        *ahead(
            "self-distillation",
            TABLE,
            on=ON,
            quote="the whole method is better",
            mark="3 §5.5",
            numbers={name: f"{lead:+.2f} points (CUB)" for name, lead in TABLE.items()},
            **LEAD,
        ),
        alike(
            f"every {EVERY} steps",
            "self-distillation",
            on=ON,
            quote=f"distilling at every {EVERY}th step, four times as strongly, is as good",
            margin=LEAD["margin"],
            reason="half a point, the smallest lead that counts for the method itself",
            tier="our own",
        ),
    ],
    deviations=[
        "Fashion-MNIST with 1 000 labels stands for CUB: 10 000 test images tell small differences"
    ],
    notes=NOTES,
    scales=VARIANT_SCALES,
)
