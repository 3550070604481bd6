"""Does self-distillation help an upcycled mixture of experts, and with which router? (ours)

The source becomes a mixture, four experts in every second block, before anything else; experts
start as copies of the dense block, so that every arm of a seed starts from one function.
"""

from __future__ import annotations

from ...lab.claims import Claim, equivalent, greater
from .scales import TEXT_SCALES
from .statements import JUDGED, LEAD
from .tables import FINE_TUNING, SELF, Settings, adapt_study, arm, arms_of

SET = "scierc"
ROUTERS = ("top-k", "cosine", "softmax")
SHARED = {"experts": 4, "layers": "every:2", "balance": {"switch": 0.01}}
OPTIONS: dict[str, Settings] = {"top-k": {"k": 2}, "cosine": {"k": 2}}
METHODS: dict[str, Settings] = {"fine-tuning": FINE_TUNING, "self-distillation": SELF}


def mixture(router: str) -> Settings:
    """The words of `upcycle`."""
    return {**SHARED, "router": router, **OPTIONS.get(router, {})}


ARMS: dict[str, Settings] = {
    "dense, fine-tuning": FINE_TUNING,
    "dense, self-distillation": SELF,
    **{
        f"{router}, {name}": {**settings, "experts": mixture(router)}
        for router in ROUTERS
        for name, settings in METHODS.items()
    },
    f"{ROUTERS[0]}, self-distillation, routers too": {
        **SELF,
        "match_routing": 1.0,
        "experts": mixture(ROUTERS[0]),
    },
}


def own(kind: object, a: str, b: str, quote: str) -> Claim:
    """A question of ours, on two arms."""
    assert callable(kind)
    return kind(arm(SET, a), arm(SET, b), metric=JUDGED, quote=quote, tier="our own", **LEAD)


study = adapt_study(
    name="adapt/moe",
    title="Self-distillation of an upcycled mixture",
    question="Does self-distillation help an upcycled mixture of experts, and which router?",
    arms=arms_of([SET], ARMS),
    claims=[
        *(
            own(
                greater,
                f"{router}, self-distillation",
                f"{router}, fine-tuning",
                f"self-distillation helps a mixture of router {router}",
            )
            for router in ROUTERS
        ),
        own(
            greater,
            f"{ROUTERS[0]}, self-distillation",
            "dense, self-distillation",
            "a mixture gains on the dense model",
        ),
        own(
            equivalent,
            f"{ROUTERS[0]}, self-distillation, routers too",
            f"{ROUTERS[0]}, self-distillation",
            "to match the routers to the teacher's changes nothing",
        ),
        *(
            own(
                equivalent,
                f"{router}, self-distillation",
                f"{ROUTERS[0]}, self-distillation",
                f"the router does not matter: {router} is as good as {ROUTERS[0]}",
            )
            for router in ROUTERS[1:]
        ),
    ],
    notes=["mixtures: four experts in every second block; two of them for a token, or all softly"],
    scales=TEXT_SCALES,
)
