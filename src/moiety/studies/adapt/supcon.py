"""Is further training with labels, by a contrastive loss, worse than fine-tuning? (Table 5)"""

from __future__ import annotations

from .scales import VARIANT_SCALES
from .statements import LEAD, ahead
from .tables import FINE_TUNING, adapt_study, together

study = adapt_study(
    name="adapt/supcon",
    title="Further training with labels: supervised contrast",
    question="Is a supervised contrastive loss worse than fine-tuning alone?",
    arms=together(
        ["pneumoniamnist", "fashion-mnist"],
        {"SupCon": {"adapt": "supcon"}, "fine-tuning": FINE_TUNING},
    ),
    claims=ahead(
        "fine-tuning",
        ["SupCon"],
        quote="further training with labels by SupCon hurts",
        mark="3 §5.7 Table 5",
        numbers={"SupCon": "+1.85 points (X-ray), +12.08 (Flower)"},
        **LEAD,
    ),
    deviations=[
        "PneumoniaMNIST and Fashion-MNIST instead of Chest X-ray and Flower",
        "SupCon's details are not in the paper: class token without a projection, two views that "
        "differ by noise alone, temperature 0.1, the rate of further pre-training; better ones may "
        "do better",
    ],
    scales=VARIANT_SCALES,
)
