"""Static top-k gate: the same k experts, those with the largest learned logits, for all tokens."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn

from .base import Opt, need_k, top_k
from .registry import register
from .static import StaticRouter, facts, small_uniform
from .value import Routing


@register(
    "top-k-static",
    paper="DSelect-k (Hazimeh et al. 2021), after Shazeer et al. 2017",
    equation="g = softmax(KeepTopK(b, k)): the top-k gate with A = 0",
)
class TopKStatic(StaticRouter):
    """Choose the k largest logits for all tokens; weigh them by their softmax."""

    per_expert = ("weight",)

    def __init__(
        self,
        dim: int,
        experts: int,
        *,
        k: Annotated[int, Opt("experts, the same for all tokens", alt=3, low=1)] = 2,
    ) -> None:
        super().__init__(dim, experts)
        need_k(self.name, k, experts)
        self.k = k
        self.weight = nn.Parameter(torch.empty(experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        small_uniform(self.weight)

    def diagnostics(self) -> dict[str, object]:
        index = top_k(self.weight, self.k)
        kept_E = torch.zeros_like(self.weight, dtype=torch.bool).scatter(0, index, True)
        return facts(self.weight.masked_fill(~kept_E, -torch.inf).softmax(0), kept_E)

    def route(
        self, x_TD: Tensor, mask: Tensor | None, ids: Tensor | None, group: int | None
    ) -> Routing:
        scores = self.check_scores(self.weight.to(x_TD.dtype))[None]
        return Routing.choose(
            top_k(scores, self.k),
            scores.softmax(-1),
            renormalise=True,
            scores=scores,
            by="all",
            tokens=x_TD.shape[0],
        )
