"""Multi-MNIST (DSelect-k, Table 2): two digits in one image."""

from __future__ import annotations

from ...lab.claims import equivalent, greater
from .multi_digits import HALF_A_POINT, make_study

study = make_study(
    "dselect-k/multi-mnist",
    "mnist",
    "Does a smooth static gate name two digits in one image better than a hard choice?",
    [
        greater(
            "dselect-k-static",
            "top-k-static",
            HALF_A_POINT,
            metric="accuracy, task 2",
            quote="static DSelect-k is over 1 point better than static top-k on task 2",
            number="> 0.01",
            reason="half of the point that is reported",
            tier="scaled down",
            mark="2 §5",
        ),
        greater(
            "dselect-k-static",
            "softmax",
            5.5,
            metric="experts used",
            quote="static DSelect-k uses about 1.7 experts on average, the softmax mixture 8",
            number="1.7 against 8",
            reason="at most 2.5 of the 8: more would not round to the paper's number of 2",
            tier="scaled down",
            mark="2 §5",
        ),
        equivalent(
            "dselect-k-static",
            "softmax",
            HALF_A_POINT,
            metric="accuracy",
            quote="a static gate that uses few experts is as good as one that uses all by example",
            reason="half a point, as for the other claims on accuracy",
            tier="our own",
        ),
        greater(
            "dselect-k-static",
            "shared-bottom",
            HALF_A_POINT,
            metric="accuracy",
            quote="a few experts, chosen by task, beat one network for both tasks",
            reason="half a point, as for the other claims on accuracy",
            tier="our own",
        ),
    ],
    title="Multi-MNIST: two images in one, a gate for each",
)
