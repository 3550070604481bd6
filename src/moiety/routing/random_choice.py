"""Random gate: the baseline that every learned choice must beat.

router = moiety.build_router("random", dim=64, experts=8, k=2)
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from .base import Opt, Router, need_k
from .hash import even, shuffled
from .registry import register
from .value import Routing


@register(
    "random",
    paper="baseline; THOR (Zuo et al. 2022) trains with random experts",
    equation="k distinct experts, uniformly",
)
class Random(Router):
    """Choose k different experts at random, each weighing 1/k.

    Training draws anew at each call. Eval is a fixed function of the seed and the token's position,
    its place among the flattened tokens of the call (padding included).
    """

    stochastic = True
    positional = True

    def __init__(
        self,
        dim: int,
        experts: int,
        *,
        k: Annotated[int, Opt("different experts a token", alt=2, low=1)] = 1,
        seed: Annotated[int, Opt("of the choice in eval", alt=1, low=0)] = 0,
    ) -> None:
        super().__init__(dim, experts)
        need_k(self.name, k, experts)
        self.k, self.seed = k, seed

    def route(
        self, x_TD: Tensor, mask: Tensor | None, ids: Tensor | None, group: int | None
    ) -> Routing:
        tokens = x_TD.shape[0]
        if self.training:
            order_TE = torch.rand(tokens, self.experts, device=x_TD.device).argsort(-1)
        else:
            position_T = torch.arange(tokens, device=x_TD.device)
            order_TE = shuffled(position_T, self.experts, self.seed)
        return even(order_TE[:, : self.k], x_TD, self.experts)
