"""What static gates share: one row of weights, learned, the same for every token."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .base import Router
from .softmax import dense_routing
from .value import Routing


class StaticRouter(Router):
    """A router whose parameters alone decide; a token only says how many of them there are."""

    static = True

    def whole(self, x_TD: Tensor, gate_E: Tensor, **fields: Any) -> Routing:
        """Offer all E experts, in the order of their ids, to every token."""
        return dense_routing(gate_E[None], by="all", tokens=x_TD.shape[0], **fields)


class StaticLogits(StaticRouter):
    """A dense static router with a row of parameters for each expert, so that it can grow."""

    dense = True
    per_expert = ("weight", "shift")
    shift: Tensor

    def __init__(self, dim: int, experts: int, *shape: int) -> None:
        super().__init__(dim, experts)
        self.weight = nn.Parameter(torch.empty(experts, *shape))
        # Grown experts share their parent's mass: each copy's logit is shifted by −log 2.
        self.register_buffer("shift", torch.zeros(experts))

    def reset_parameters(self) -> None:
        small_uniform(self.weight)

    def split(self, parents: list[int]) -> dict[str, list[int]]:
        """Give each parent a copy whose logit, like the parent's own, is lower by log 2."""
        self.shift[parents] -= math.log(2)
        return self._append_rows(parents)


def small_uniform(parameter: Tensor, bound: float = 0.05) -> None:
    """Fill in place from ±bound; 0.05 is the start of DSelect-k's code."""
    with torch.no_grad():
        parameter.uniform_(-bound, bound)


def facts(gate_E: Tensor, selected_E: Tensor) -> dict[str, object]:
    """The selected experts, their number and the weights of a static gate, as plain values."""
    ids = selected_E.nonzero().flatten().tolist()
    return {"selected": ids, "count": len(ids), "weights": gate_E.detach().tolist()}
