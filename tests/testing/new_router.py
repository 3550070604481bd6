"""Quadratic gate: experts stand at points of the token space, and the nearest ones work.

router = moiety.build_router("quadratic", dim=64, experts=8, k=2)
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn

from moiety.routing import Opt, Router, Routing, register
from moiety.routing.base import need_k, top_k


@register(
    "quadratic",
    paper="Xu, Jordan & Hinton 1995",
    equation="g(x) = softmax(−‖x − c_e‖² / (2 τ D)) at its k largest",
)
class Quadratic(Router):
    """Choose the k experts whose centres are nearest; weigh them by their softmax."""

    def __init__(
        self,
        dim: int,
        experts: int,
        *,
        k: Annotated[int, Opt("experts a token", alt=3, low=1)] = 2,
        temperature: Annotated[
            float, Opt("squared distances are divided by it", alt=0.5, low=1e-3)
        ] = 1.0,
    ) -> None:
        super().__init__(dim, experts)
        need_k(self.name, k, experts)
        self.k, self.temperature = k, temperature
        self.centre = nn.Parameter(torch.randn(experts, dim))

    def default_balance(self) -> dict[str, float]:
        return {"switch": 0.01}

    def route(
        self, x_TD: Tensor, mask: Tensor | None, ids: Tensor | None, group: int | None
    ) -> Routing:
        # Products, not differences: no [T, E, D] table. ‖x‖² is the same for all experts.
        centre_ED = self.centre.to(x_TD.dtype)
        near_TE = x_TD @ centre_ED.t() - centre_ED.square().sum(1) / 2
        scores = self.check_scores(near_TE / (self.temperature * self.dim))
        return Routing.choose(
            top_k(scores, self.k), scores.softmax(-1), renormalise=True, scores=scores
        )
