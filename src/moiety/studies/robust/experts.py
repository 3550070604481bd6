"""Do more experts make V-MoE more robust? (Fig. 3: a sweep over E at two experts a token)

The paper says two things: on JFT it helps up to 16 experts, on ImageNet all numbers above 2 are
about equal. Both are claimed here, each beside its data set, and as our own claims of the models
that were fine-tuned on attacks. One expert, with a weight of 1 for every token, stands for a dense
layer in the same place.
"""

from __future__ import annotations

from typing import Any

from ...lab.claims import Claim, equivalent, greater
from ...lab.study import Settings
from .curves import ALIKE, LEAD, at, curve_study

EXPERTS = (1, 2, 4, 8, 16, 32)
TUNED = ", adversarial"


def name(experts: int, tuned: str = "") -> str:
    return f"{experts} expert{'s' * (experts > 1)}{tuned}"


ARMS: dict[str, Settings] = {
    name(n, tuned): {"model": "v-moe", "experts": n, "adversarial": bool(tuned)}
    for tuned in ("", TUNED)
    for n in EXPERTS
}


def sweep(eps: list[str], tuned: str = "", **words: Any) -> list[Claim]:
    """The paper's statements, and that more than one expert helps at all."""
    one, two, four, eight, sixteen, most = (name(n, tuned) for n in EXPERTS)
    grows = {"quote": f"robustness improves up to 16 experts (JFT){tuned}", **words, **LEAD}
    ends = {"quote": f"16 and 32 experts overlap (JFT){tuned}", **words, **ALIKE}
    flat = {"quote": f"all numbers above 2 are about equal (ImageNet){tuned}", **words, **ALIKE}
    choice = {"quote": f"a choice among 16 is more robust than one expert for all{tuned}", **LEAD}
    return [
        *at(eps, greater, sixteen, two, **grows),
        *at(eps, equivalent, most, sixteen, **ends),
        *at(eps, equivalent, four, sixteen, **flat),
        *at(eps, equivalent, eight, sixteen, **flat),
        *at(["mean error"], greater, sixteen, one, **choice, tier="our own"),
    ]


study = curve_study(
    name="robust/experts",
    title="V-MoE with 1 to 32 experts under PGD",
    question="Does V-MoE become more robust with more experts, and up to how many?",
    arms=ARMS,
    claims=[
        *sweep(["error at 1/255", "error at 2/255"], mark="1 §6.5 (5)"),
        *sweep(["error at 4/255"], TUNED, tier="our own"),
    ],
    deviations=[
        "one expert: a token has no second one, as it has with all other numbers, and costs less",
        "the numbers of experts of the paper's sweep are from memory",
    ],
)
