"""What does adversarial fine-tuning change: is V-MoE still less wrong than ViT? (Fig. 1, dashed)

Every model as it is, and after fine-tuning on batches that PGD attacked at 8/255; then the PGD of
40 steps that `robust/pgd` uses.
"""

from __future__ import annotations

from ...lab.claims import Claim, equivalent, greater
from ...lab.study import Settings
from .curves import ADVERSARIAL, ALIKE, LEAD, MODELS, at, curve_study

TUNED = {model: f"adversarial {model}" for model in MODELS}
ARMS: dict[str, Settings] = {
    **{model: {**words, "adversarial": False} for model, words in MODELS.items()},
    **{TUNED[model]: {**words, "adversarial": True} for model, words in MODELS.items()},
}
PAID = {"ViT": "51.7 % against 19.3 % (ImageNet)", "V-MoE": "49.8 % against 17.8 % (ImageNet)"}


def price(model: str) -> list[Claim]:
    """What fine-tuning costs without attack."""
    return at(
        ["clean error"],
        greater,
        model,
        TUNED[model],
        quote=f"adversarial fine-tuning costs {model} accuracy without attack",
        mark="1 §6.4",
        number=PAID.get(model, ""),
        margin=0.05,
        reason="five points, a sixth of what the paper's models pay: with less, somebody who fears "
        "attacks at all would not hesitate",
    )


def gain(model: str) -> list[Claim]:
    """What fine-tuning gains at the eps that it trained with."""
    return at(
        ["error at 8/255"],
        greater,
        TUNED[model],
        model,
        quote=f"fine-tuned at 8/255, {model} is right on more images there",
        margin=0.1,
        reason="ten points, so that the gain is more than the least price that counts, twice over",
        tier="our own",
    )


study = curve_study(
    name="robust/adversarial-training",
    title="Models before and after adversarial fine-tuning",
    question="Fine-tuned on attacks, is V-MoE still less wrong than ViT, and at what price?",
    arms=ARMS,
    claims=[
        *at(
            ["clean error"],
            greater,
            TUNED["V-MoE"],
            TUNED["ViT"],
            quote="fine-tuned on attacks, V-MoE has a lower error than ViT without attack",
            mark="1 §6.4",
            number="49.8 % against 51.7 % (ImageNet)",
            **LEAD,
        ),
        *at(
            ADVERSARIAL,
            greater,
            TUNED["V-MoE"],
            TUNED["ViT"],
            quote="with adversarial training too V-MoE has a lower error than ViT",
            mark="1 §6.5 (1)",
            **LEAD,
        ),
        *at(
            ADVERSARIAL,
            equivalent,
            TUNED["ViT++"],
            TUNED["V-MoE"],
            quote="with adversarial training too ViT++ is comparable to V-MoE",
            mark="1 §6.5 (1)",
            **ALIKE,
        ),
        *(claim for model in MODELS for claim in (*price(model), *gain(model))),
    ],
    deviations=[
        "fine-tuning: a few epochs from the model of the same seed, at half its learning rate; the "
        "paper fine-tunes a pre-trained model for 10 000 steps, on attacks from the start",
    ],
)
