"""Perturbed cosine gate: cosines whose norms are enlarged by constants.

router = moiety.build_router("perturbed-cosine", dim=64, experts=8, k=2, tau_1=0.1)
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from .base import Opt
from .cosine import CosineRouter, K, LearnTemperature, Offset, Project, Renormalise, Temperature
from .registry import register

Tau = Annotated[float, Opt("added to the norm of an expert (1) or a token (2)", alt=1.0, low=0.0)]


@register(
    "perturbed-cosine",
    paper="Nguyen et al. 2025 (ICLR)",
    equation="softmax_i(<b1_i, x> / ((‖b1_i‖ + τ1)(‖x‖ + τ2)) + b0_i)",
)
class PerturbedCosine(CosineRouter):
    """Choose experts by a cosine whose norms are enlarged by τ1 (expert) and τ2 (token).

    τ1 makes the length of an embedding count, so that it can be learned.
    """

    def __init__(
        self,
        dim: int,
        experts: int,
        *,
        k: K = 2,
        project: Project = None,
        temperature: Temperature = 1.0,
        learn_temperature: LearnTemperature = False,
        b0: Offset = True,
        renormalise: Renormalise = True,
        tau_1: Tau = 0.1,
        tau_2: Tau = 0.1,
        noise: Annotated[
            str,
            Opt(
                "random: in training each norm gets its own τ·|N(0, 1)|; the paper's is constant",
                alt="random",
                choices=("constant", "random"),
            ),
        ] = "constant",
    ) -> None:
        super().__init__(dim, experts, k, project, temperature, learn_temperature, b0, renormalise)
        self.tau_1, self.tau_2, self.noise = tau_1, tau_2, noise
        self.stochastic = noise == "random"

    def taus(self, tokens: Tensor, random: bool) -> tuple[float | Tensor, float | Tensor]:
        if not random:
            return self.tau_1, self.tau_2
        one_E, one_T = tokens.new_empty(self.experts, 1), tokens[:, :1]
        return (
            self.tau_1 * torch.randn_like(one_E).abs(),
            self.tau_2 * torch.randn_like(one_T).abs(),
        )
