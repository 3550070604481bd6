"""Switch gate: one expert a token, each expert with a capacity.

router = moiety.build_router("switch", dim=64, experts=8, capacity_factor=1.25)
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from .base import LinearRouter, Opt, top_k
from .capacity import Overflow, limit
from .registry import register
from .value import Routing


@register(
    "switch",
    paper="Switch Transformer (Fedus et al. 2022)",
    equation="y = p_i(x) E_i(x), i = argmax p, p = softmax(W x), (1)–(3)",
)
class Switch(LinearRouter):
    """Choose the largest score; weigh it by its softmax value; drop what exceeds the capacity.

    With overflow "order" an earlier token never loses its place to a later one; "priority" serves
    surer tokens first, so it sees the whole group.
    """

    weights_sum = "at most one"
    stochastic = True

    def __init__(
        self,
        dim: int,
        experts: int,
        *,
        capacity_factor: Annotated[
            float | None,
            Opt(
                "slots of an expert, in even shares of its group's tokens; None = no limit",
                alt=0.5,
                low=0.01,
                optional=True,
            ),
        ] = 1.25,
        overflow: Annotated[
            Overflow,
            Opt(
                "who keeps a place: earlier tokens, or those with the larger weight",
                alt="priority",
                choices=("order", "priority"),
            ),
        ] = "order",
        jitter: Annotated[
            float,
            Opt("in training the router sees x · U(1 − jitter, 1 + jitter)", 0.5, 0.0, 1.0),
        ] = 0.01,
    ) -> None:
        super().__init__(dim, experts)
        self.capacity_factor, self.overflow, self.jitter = capacity_factor, overflow, jitter
        self.causal = capacity_factor is None or overflow == "order"
        self.stochastic = jitter > 0

    def default_balance(self) -> dict[str, float]:
        return {"switch": 0.01}

    @property
    def slots_per_token(self) -> int:
        return 1

    def route(
        self, x_TD: Tensor, mask: Tensor | None, ids: Tensor | None, group: int | None
    ) -> Routing:
        scores = chosen_by = self.scores(x_TD)
        if self.training and self.jitter > 0:
            noise_TD = 1 + self.jitter * (2 * torch.rand_like(x_TD) - 1)
            chosen_by = self.scores(x_TD * noise_TD)
        gate = chosen_by.softmax(-1)
        # The losses see the noise-free gate, as in every router here.
        routing = Routing.choose(top_k(chosen_by, 1), gate, probs=scores.softmax(-1), scores=scores)
        if self.capacity_factor is None:
            return routing
        return limit(routing, self.capacity_factor, overflow=self.overflow, group=group, mask=mask)
