"""Top-k gate: the k experts with the largest scores work for a token."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from .base import LinearRouter, Opt, need_k, top_k
from .registry import register
from .value import Routing


@register(
    "top-k",
    paper="Shazeer et al. 2017; DSelect-k (Hazimeh et al. 2021)",
    equation="g(x) = softmax(KeepTopK(W x, k))",
)
class TopK(LinearRouter):
    """Choose the k largest scores; weigh them by their softmax."""

    def __init__(
        self,
        dim: int,
        experts: int,
        *,
        k: Annotated[int, Opt("experts a token", alt=3, low=1)] = 2,
        renormalise: Annotated[
            bool,
            Opt("softmax after the choice, weights sum to one; False: before it", alt=False),
        ] = True,
    ) -> None:
        super().__init__(dim, experts)
        need_k(self.name, k, experts)
        self.k, self.renormalise = k, renormalise
        self.weights_sum = "one" if renormalise or k == experts else "at most one"

    def route(
        self, x_TD: Tensor, mask: Tensor | None, ids: Tensor | None, group: int | None
    ) -> Routing:
        scores = self.scores(x_TD)
        index = top_k(scores, self.k)
        return Routing.choose(
            index, scores.softmax(-1), renormalise=self.renormalise, scores=scores
        )
