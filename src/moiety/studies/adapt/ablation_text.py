"""Which parts of self-distillation matter for texts? (Table 3)"""

from __future__ import annotations

from .scales import TEXT_SCALES
from .statements import LEAD, ahead
from .tables import adapt_study, arms_of
from .variants import NOTES, VARIANTS

study = adapt_study(
    name="adapt/ablation-text",
    title="Self-distillation of a text model, without one of its parts",
    question="Which parts of self-distillation does its lead need?",
    arms=arms_of(["scierc"], VARIANTS),
    claims=ahead(
        "self-distillation",
        ["without L_MAE"],
        on="scierc / ",
        quote="the whole method is better",
        mark="3 §5.5",
        numbers={"without L_MAE": "+1.13 points (SCIERC)"},
        **LEAD,
    ),
    notes=NOTES,
    scales=TEXT_SCALES,
)
