"""Do more experts make V-MoE more robust? (Fig. 3: a sweep over E at two experts a token)

The paper says two things: on JFT it helps up to 16 experts, on ImageNet all numbers above 2 are
about equal. Both are claimed here, each beside its data set. One expert, with a weight of 1 for
every token, stands for a dense layer in the same place.
"""

from __future__ import annotations

from ...lab.claims import equivalent, greater
from .curves import ALIKE, LEAD, at, curve_study

EPS = ["error at 1/255", "error at 2/255"]
ARMS = {
    f"{n} expert{'s' * (n > 1)}": {"model": "v-moe", "experts": n} for n in (1, 2, 4, 8, 16, 32)
}

study = curve_study(
    name="robust/experts",
    title="V-MoE with 1 to 32 experts under PGD",
    question="Does V-MoE become more robust with more experts, and up to how many?",
    arms=ARMS,
    claims=[
        *at(
            EPS,
            greater,
            "16 experts",
            "2 experts",
            quote="robustness improves up to 16 experts (JFT)",
            mark="1 §6.5 (5)",
            **LEAD,
        ),
        *at(
            EPS,
            equivalent,
            "32 experts",
            "16 experts",
            quote="16 and 32 experts overlap (JFT)",
            mark="1 §6.5 (5)",
            **ALIKE,
        ),
        *(
            claim
            for fewer in ("4 experts", "8 experts")
            for claim in at(
                EPS,
                equivalent,
                fewer,
                "16 experts",
                quote="all numbers of experts above 2 are about equal (ImageNet)",
                mark="1 §6.5 (5)",
                **ALIKE,
            )
        ),
        *at(
            ["mean error"],
            greater,
            "16 experts",
            "1 expert",
            quote="a choice among 16 experts is more robust than one expert for all",
            tier="our own",
            **LEAD,
        ),
    ],
    deviations=[
        "one expert: a token has no second one, as it has with all other numbers, and costs less",
        "the numbers of experts of the paper's sweep are from memory",
    ],
)
