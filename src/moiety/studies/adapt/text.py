"""Does self-distillation beat fine-tuning and its rivals on texts? (Table 2)"""

from __future__ import annotations

from .statements import LEAD, ahead
from .tables import METHODS, TEXTS, adapt_study, arms_of

RIVALS = [name for name in METHODS if name != "self-distillation"]
TABLE = {  # self-distillation less the others, in points, in the order of RIVALS
    "acl-arc": (9.08, 13.47, 19.60, 13.04, 3.44),
    "scierc": (5.16, 2.34, 7.10, 6.18, 1.47),
    "chemprot": (2.28, 0.14, 2.69, 3.62, 0.54),
    "tweeteval-emotion": (2.16, 1.51, 2.29, 1.98, 1.06),
}

study = adapt_study(
    name="adapt/text",
    title="Six ways to a classifier of texts",
    question="Has self-distillation a higher F1 than fine-tuning, its variants and further "
    "pre-training?",
    arms=arms_of(TEXTS, METHODS),
    tunes=2,
    claims=[
        *ahead(
            "self-distillation",
            RIVALS,
            TEXTS,
            quote="self-distillation has the highest F1 on every text set",
            mark="3 §5.4",
            numbers={
                (target, name): f"{lead:+.2f} points"
                for target, leads in TABLE.items()
                for name, lead in zip(RIVALS, leads)
            },
            **LEAD,
        ),
        *ahead(
            "further pre-training",
            ["fine-tuning"],
            TEXTS,
            quote="on texts, further pre-training alone helps",
            mark="3 §5.4",
            numbers={
                (target, "fine-tuning"): f"{leads[0] - leads[-1]:+.2f} points"
                for target, leads in TABLE.items()
            },
            **LEAD,
        ),
    ],
    notes=[
        "acl-arc: 139 test texts, of which a part has 28; its claims will hardly be decided",
    ],
)
