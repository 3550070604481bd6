"""Does more further pre-training hurt, and does self-distillation hold up? (Fig. 1)"""

from __future__ import annotations

from .scales import VARIANT_SCALES
from .statements import LEAD, ahead
from .tables import FINE_TUNING, FURTHER, SELF, adapt_study, arms_of

ON = "fashion-mnist / "
TIMES = {"quarter": 0.25, "once": 1, "twice": 2}
ARMS = {"fine-tuning": FINE_TUNING}
for word, times in TIMES.items():
    ARMS[f"further pre-training, {word}"] = {**FURTHER, "times": times}
    ARMS[f"self-distillation, {word}"] = {**SELF, "times": times}

study = adapt_study(
    name="adapt/steps",
    title="Steps of further pre-training",
    question="Does further pre-training get worse with its steps, and does self-distillation not?",
    arms=arms_of(["fashion-mnist"], ARMS),
    claims=[
        *ahead(
            "further pre-training, quarter",
            ["further pre-training, twice"],
            on=ON,
            quote="accuracy falls with the steps of further pre-training",
            mark="3 §5.8 Fig. 1",
            **LEAD,
        ),
        *ahead(
            "self-distillation, twice",
            ["further pre-training, twice"],
            on=ON,
            quote="it stays higher for self-distillation",
            mark="3 §5.8 Fig. 1",
            **LEAD,
        ),
    ],
    deviations=[
        "Fashion-MNIST with 1 000 labels instead of CUB; 150, 600 and 1 200 steps (scale small: "
        "60, 240 and 480; paper: up to 60 000)"
    ],
    notes=["steps: both stages of self-distillation have them"],
    scales=VARIANT_SCALES,
)
