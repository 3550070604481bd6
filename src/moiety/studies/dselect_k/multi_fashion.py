"""Multi-Fashion (DSelect-k, Table 2): two pieces of clothing in one image."""

from __future__ import annotations

from ...lab.claims import greater
from .multi_digits import ARMS, HALF_A_POINT, make_study

study = make_study(
    "dselect-k/multi-fashion",
    "fashion-mnist",
    "Is a smooth static gate the best at naming two pieces of clothing in one image?",
    [
        greater(
            "dselect-k-static",
            other,
            HALF_A_POINT,
            metric="accuracy",
            quote=f"static DSelect-k is best: better than {other}",
            reason="no number is given; half of the point that is reported for Multi-MNIST",
            tier="scaled down",
            mark="2 §5",
        )
        for other in ARMS[1:]
    ],
    title="Multi-Fashion: two images in one, a gate for each",
)
