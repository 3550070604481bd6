"""Is V-MoE less wrong than ViT under PGD, and as good as a larger ViT at less cost? (Fig. 1)

40 steps of eps / 40 from the image itself, on models that were trained without attacks.
"""

from __future__ import annotations

from ...lab.claims import equivalent, greater
from .curves import ALIKE, COST, LEAD, MODELS, STANDARD, at, curve_study

study = curve_study(
    name="robust/pgd",
    title="ViT, ViT++ and V-MoE under PGD",
    question="Is V-MoE less wrong than ViT over a range of eps, and as good as ViT++ for less?",
    arms=MODELS,
    claims=[
        *at(
            ["clean error"],
            greater,
            "V-MoE",
            "ViT",
            quote="V-MoE has a lower error than ViT without attack",
            mark="1 §6.4",
            number="17.8 % against 19.3 % (ImageNet)",
            **LEAD,
        ),
        *at(
            [*STANDARD, "mean error"],
            greater,
            "V-MoE",
            "ViT",
            quote="V-MoE has a lower error than ViT over a wide range of eps",
            mark="1 §6.5 (1)",
            **LEAD,
        ),
        *at(
            [*STANDARD, "mean error"],
            equivalent,
            "ViT++",
            "V-MoE",
            quote="ViT++ is comparable to V-MoE",
            mark="1 §6.5 (1)",
            **ALIKE,
        ),
        *at(
            [COST],
            greater,
            "V-MoE",
            "ViT++",
            quote="but ViT++ costs more",
            mark="1 §6.1, §6.5 (1)",
            number="12.4 against 17.9 GFLOPs, of ViT 8.9: 1.39 against 2.01",
            margin=0.3,
            reason="about half of the paper's 0.62, and nearly what a V-MoE costs above a ViT",
        ),
    ],
)
