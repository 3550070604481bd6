"""Softmax gate: every expert works for every token, weighted by a softmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .base import LinearRouter
from .registry import register
from .value import Routing


@register(
    "softmax",
    paper="Jordan & Jacobs 1994; DSelect-k (Hazimeh et al. 2021)",
    equation="g(x) = softmax(W x), a smooth mixture",
)
class Softmax(LinearRouter):
    """Weigh all experts by softmax(W x)."""

    dense = True
    per_expert = ("weight", "shift")

    shift: Tensor

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__(dim, experts)
        # Grown experts share their parent's mass: each copy's logit is shifted by −log 2.
        self.register_buffer("shift", torch.zeros(experts))

    def split(self, parents: list[int]) -> dict[str, list[int]]:
        """Give each parent a copy whose score, like the parent's own, is lower by log 2."""
        self.shift[parents] -= math.log(2)
        return self._append_rows(parents)

    def route(
        self, x_TD: Tensor, mask: Tensor | None, ids: Tensor | None, group: int | None
    ) -> Routing:
        scores = self.scores(x_TD) + self.shift
        return dense_routing(scores.softmax(-1), scores=scores)


def dense_routing(gate: Tensor, **fields: Any) -> Routing:
    """All E experts for every token, in the order of their ids."""
    index = torch.arange(gate.shape[-1], device=gate.device).expand(gate.shape[0], -1)
    return Routing.choose(index, gate, **fields)
