"""Which parts of self-distillation matter? (Table 3), and what is lost by distilling less often?"""

from __future__ import annotations

from ...lab.claims import equivalent
from .statements import JUDGED, LEAD, ahead
from .tables import FURTHER, SELF, adapt_study, arm, arms_of

SETS = ("omniglot", "scierc")
EVERY = 4
VARIANTS = {
    "self-distillation": SELF,
    "without L_MAE": {**SELF, "mae_weight": 0.0},
    "further pre-training": FURTHER,  # without L_Distill
    "further pre-training, twice": {**FURTHER, "times": 2},
    "prediction matching": {**SELF, "match": "prediction"},
    "weight matching, l2": {**SELF, "match": "weights"},
    "weight matching, MARS": {**SELF, "match": "weights", "norm": "mars"},
    f"every {EVERY} steps": {**SELF, "distill_every": EVERY},
}
PAPERS = [name for name in VARIANTS if name not in ("self-distillation", f"every {EVERY} steps")]
TABLE = {  # full less variant, in points: CUB, SCIERC
    "without L_MAE": (0.46, 1.13),
    "further pre-training": (2.34, 1.47),
    "further pre-training, twice": (4.65, 1.27),
    "prediction matching": (2.79, 0.70),
    "weight matching, l2": (4.36, 1.25),
    "weight matching, MARS": (3.24, 0.84),
}

study = adapt_study(
    name="adapt/ablation",
    title="Self-distillation without one of its parts",
    question="Which parts of self-distillation does its lead need?",
    arms=arms_of(SETS, VARIANTS),
    claims=[
        *ahead(
            "self-distillation",
            PAPERS,
            SETS,
            quote="the whole method is better",
            mark="3 §5.5",
            numbers={
                (target, name): f"{lead[i]:+.2f} points ({('CUB', 'SCIERC')[i]})"
                for name, lead in TABLE.items()
                for i, target in enumerate(SETS)
            },
            **LEAD,
        ),
        *(
            equivalent(
                arm(target, f"every {EVERY} steps"),
                arm(target, "self-distillation"),
                margin=LEAD["margin"],
                metric=JUDGED,
                quote=f"distilling at every {EVERY}th step, four times as strongly, is as good "
                f"on {target}",
                reason="half a point, the smallest lead that counts for the method itself",
                tier="our own",
            )
            for target in SETS
        ),
    ],
    deviations=["Omniglot stands for CUB, with many classes of few examples; SciERC is SciERC"],
    notes=[
        "weight matching: weight 1, as all terms; prediction matching compares what both decoders "
        "say of the same masked places",
    ],
)
