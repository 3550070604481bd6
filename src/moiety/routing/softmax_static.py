"""Static softmax gate: every expert, with the same learned weights for all tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import register
from .static import StaticLogits, facts
from .value import Routing


@register(
    "softmax-static",
    paper="DSelect-k (Hazimeh et al. 2021)",
    equation="g = softmax(b): the softmax gate with A = 0",
)
class SoftmaxStatic(StaticLogits):
    """Weigh all experts by softmax(b), the same for all tokens."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__(dim, experts)
        self.reset_parameters()

    def diagnostics(self) -> dict[str, object]:
        gate_E = (self.weight + self.shift).softmax(0)
        return facts(gate_E, torch.ones_like(gate_E, dtype=torch.bool))

    def route(
        self, x_TD: Tensor, mask: Tensor | None, ids: Tensor | None, group: int | None
    ) -> Routing:
        scores_E = self.check_scores(self.weight.to(x_TD.dtype)) + self.shift.to(x_TD.dtype)
        return self.whole(x_TD, scores_E.softmax(0), scores=scores_E[None])
