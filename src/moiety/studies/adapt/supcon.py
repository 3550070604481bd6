"""Is further training with labels, by a contrastive loss, worse than fine-tuning? (Table 5)"""

from __future__ import annotations

from .statements import LEAD, ahead
from .tables import FINE_TUNING, FURTHER, SELF, adapt_study, arms_of

SETS = ("pneumoniamnist", "omniglot")
TABLE = {  # less SupCon, in points: Chest X-ray, Flower
    "fine-tuning": (1.85, 12.08),
    "further pre-training": (2.49, 11.93),
    "self-distillation": (4.38, 13.58),
}
METHODS = {
    "SupCon": {"adapt": "supcon"},
    "fine-tuning": FINE_TUNING,
    "further pre-training": FURTHER,
    "self-distillation": SELF,
}

study = adapt_study(
    name="adapt/supcon",
    title="Further training with labels: supervised contrast",
    question="Is a supervised contrastive loss worse than fine-tuning alone?",
    arms=arms_of(SETS, METHODS),
    claims=[
        claim
        for better, points in TABLE.items()
        for claim in ahead(
            better,
            ["SupCon"],
            SETS,
            quote=f"{better} is better",
            mark="3 §5.7",
            number=f"{points[0]:+.2f} points (X-ray), {points[1]:+.2f} (Flower, from Table 1)",
            **LEAD,
        )
    ],
    deviations=[
        "PneumoniaMNIST and Omniglot instead of Chest X-ray and Flower",
        "SupCon's details are not in the paper: class token, two noisy views, temperature 0.1",
    ],
)
