"""Does the first round of self-distillation do most? (Fig. 4, Fig. 5c)"""

from __future__ import annotations

from .scales import COMMON
from .statements import ALIKE, FAR, RELATIVE, ahead, alike
from .tables import DISTANCE, FURTHER, SCORE, SELF, adapt_study, arms_of

ON = "fashion-mnist / "
ROUNDS = (1, 2, 3)
LAST = f"round {ROUNDS[-1]}"

study = adapt_study(
    name="adapt/rounds",
    title="Rounds of self-distillation",
    question="Does the first round do most, for accuracy and for the distance from the source?",
    arms=arms_of(
        ["fashion-mnist"],
        {"round 0": FURTHER, **{f"round {t}": {**SELF, "rounds": t} for t in ROUNDS}},
    ),
    first=[SCORE, DISTANCE],
    claims=[
        alike(
            "round 1",
            LAST,
            on=ON,
            quote="accuracy is flat after the first round",
            mark="3 §5.8 Fig. 4",
            **ALIKE,
        ),
        *ahead(
            "round 1",
            ["round 0"],
            on=ON,
            metric=RELATIVE,
            quote="the distance from the initial weights drops with the first round",
            mark="3 §5.8 Fig. 5c",
            **FAR,
        ),
        alike(
            "round 1",
            LAST,
            on=ON,
            metric=RELATIVE,
            quote="and mainly with that",
            mark="3 §5.8 Fig. 5c",
            **FAR,
        ),
    ],
    deviations=["Fashion-MNIST with 1 000 labels instead of Flower; rounds 0 to 3 (paper: 0 to 5)"],
    tuned=COMMON,
    notes=[
        "distance: l2, after fine-tuning, of the whole trunk",
        "settings: one learning rate and length for all arms, as in the paper, set before these "
        "runs: what is chosen by accuracy would move distances too",
        "jump: that accuracy jumps with the first round is asked in adapt/ablation",
    ],
)
