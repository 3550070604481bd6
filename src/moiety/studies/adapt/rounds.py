"""Does the first round of self-distillation do most? (Fig. 4, Fig. 5c)"""

from __future__ import annotations

from .statements import ALIKE, DISTANCE, FAR, LEAD, ahead, alike
from .tables import DISTANCE as SHOWN
from .tables import FURTHER, SCORE, SELF, adapt_study, arms_of

SET = ["omniglot"]
ROUNDS = (1, 2, 3)
LATER = [f"round {t}" for t in ROUNDS[1:]]

study = adapt_study(
    name="adapt/rounds",
    title="Rounds of self-distillation",
    question="Does the first round do most, for accuracy and for the distance from the source?",
    arms=arms_of(
        SET, {"round 0": FURTHER, **{f"round {t}": {**SELF, "rounds": t} for t in ROUNDS}}
    ),
    first=[SCORE, SHOWN],
    claims=[
        *ahead(
            "round 1",
            ["round 0"],
            SET,
            quote="accuracy jumps with the first round",
            mark="3 §5.8 Fig. 4",
            **LEAD,
        ),
        *alike(
            "round 1", LATER, SET, quote="and is flat afterwards", mark="3 §5.8 Fig. 4", **ALIKE
        ),
        *ahead(
            "round 1",
            ["round 0"],
            SET,
            metric=DISTANCE,
            quote="the distance from the initial weights drops with the first round",
            mark="3 §5.8 Fig. 5c",
            **FAR,
        ),
        *alike(
            "round 1",
            LATER,
            SET,
            metric=DISTANCE,
            quote="and mainly with that",
            mark="3 §5.8 Fig. 5c",
            margin=0.2,
            reason="twice the smallest drop that counts for the first round",
        ),
    ],
    deviations=["Omniglot instead of Flower; rounds 0 to 3 (paper: 0 to 5)"],
    notes=["distance: l2, after fine-tuning, of the whole trunk; settings are chosen for each arm"],
)
