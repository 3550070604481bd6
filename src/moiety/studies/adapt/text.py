"""Does self-distillation beat fine-tuning and its rivals on texts? (Table 2)"""

from __future__ import annotations

from .scales import TEXT_SCALES, TEXTS
from .statements import LEAD, ahead
from .tables import METHODS, adapt_study, together

RIVALS = [name for name in METHODS if name != "self-distillation"]
LEADS = (4.67, 4.37, 7.92, 6.20, 1.63)  # of self-distillation over these, means of four sets

study = adapt_study(
    name="adapt/text",
    title="Six ways to a classifier of texts",
    question="Has self-distillation a higher F1 than fine-tuning, its variants and further "
    "pre-training?",
    arms=together(TEXTS, METHODS),
    claims=[
        *ahead(
            "self-distillation",
            RIVALS,
            quote="self-distillation has the highest F1 on text sets",
            mark="3 §5.4",
            numbers=dict(zip(RIVALS, (f"{lead:+.2f} points" for lead in LEADS))),
            **LEAD,
        ),
        *ahead(
            "further pre-training",
            ["fine-tuning"],
            quote="on texts, further pre-training alone helps",
            mark="3 §5.4",
            numbers={"fine-tuning": "+3.04 points, mean of four sets"},
            **LEAD,
        ),
    ],
    notes=["acl-arc: 139 test texts, of which a part has 28"],
    scales=TEXT_SCALES,
)
