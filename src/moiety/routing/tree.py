"""Tree gate: a binary tree of soft decisions whose leaves are the experts.

router = moiety.build_router("tree", dim=64, experts=8)
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Opt, Router, need_k, top_k
from .registry import register
from .softmax import dense_routing
from .value import Routing

FRESH_STD = 0.01  # of a new node's gate: halves at first, but not the same for all tokens


@register(
    "tree",
    paper="ALMA's gMoE (Caccia et al. 2022); Jordan & Jacobs 1994",
    equation="p(leaf) = Π over its path of σ(±(w_n x + b_n))",
)
class Tree(Router):
    """Weigh each expert by the product of the decisions on its path.

    `sign[e, n]` is +1 or −1 where node n sends tokens to expert e by σ(z_n) or σ(−z_n), and 0 where
    n is not on e's path. E − 1 nodes; at the start the tree is balanced.
    """

    sign: Tensor

    def __init__(
        self,
        dim: int,
        experts: int,
        *,
        k: Annotated[
            int | None, Opt("experts a token, the likeliest leaves; None = all", alt=2, low=1)
        ] = None,
        renormalise: Annotated[
            bool, Opt("weights of the chosen sum to one", alt=False, given={"k": 2})
        ] = True,
    ) -> None:
        super().__init__(dim, experts)
        need_k(self.name, k or 1, experts)
        self.k, self.renormalise, self.dense = k, renormalise, k is None
        whole = renormalise or k in (None, experts)
        self.weights_sum = "one" if whole else "at most one"
        self.weight = nn.Parameter(torch.randn(experts - 1, dim) * dim**-0.5)
        self.bias = nn.Parameter(torch.zeros(experts - 1))
        self.register_buffer("sign", balanced(experts))

    def split(self, parents: list[int]) -> dict[str, list[int]] | None:
        """Turn each parent's leaf into a node above it and its copy: together they weigh as it did.

        The new gates are random, so that the copies see different tokens and grow apart.
        """
        if not self.dense:
            return None
        nodes, new = self.weight.shape[0], len(parents)
        sign = torch.cat([self.sign, self.sign[parents]])
        fork = sign.new_zeros(len(sign), new)
        for n, parent in enumerate(parents):
            fork[parent, n], fork[self.experts + n, n] = 1, -1
        self.sign = torch.cat([sign, fork], dim=1)
        fresh = self.weight.data.new_empty(new, self.dim).normal_(std=FRESH_STD)
        level = torch.zeros_like(fresh[:, 0])
        for name, added in (("weight", fresh), ("bias", level)):
            old = getattr(self, name)
            setattr(self, name, nn.Parameter(torch.cat([old.data, added]), old.requires_grad))
        self.experts = len(sign)
        rows = [*range(nodes), *[-1] * new]
        return {"weight": rows, "bias": rows}

    def scores(self, x_TD: Tensor) -> Tensor:
        """`[T, E]`: log p. Sums of log σ(±z) stay finite where products of σ would be zero."""
        z_TN = F.linear(x_TD, self.weight.to(x_TD.dtype), self.bias.to(x_TD.dtype))
        yes_EN, no_EN = (self.sign > 0).to(x_TD.dtype), (self.sign < 0).to(x_TD.dtype)
        log_p = F.linear(F.logsigmoid(z_TN), yes_EN) + F.linear(F.logsigmoid(-z_TN), no_EN)
        return self.check_scores(log_p)

    def route(
        self, x_TD: Tensor, mask: Tensor | None, ids: Tensor | None, group: int | None
    ) -> Routing:
        scores = self.scores(x_TD)
        gate = scores.exp()
        if self.k is None:
            return dense_routing(gate, scores=scores)
        index = top_k(scores, self.k)
        return Routing.choose(index, gate, renormalise=self.renormalise, scores=scores)


def balanced(experts: int) -> Tensor:
    """The `[E, E − 1]` signs of a tree whose depths differ by at most one."""
    sign = torch.zeros(experts, max(experts - 1, 0), dtype=torch.int8)
    ranges, node = [(0, experts)], 0
    while ranges:
        low, high = ranges.pop(0)
        if high - low < 2:
            continue
        middle = (low + high + 1) // 2
        sign[low:middle, node], sign[middle:high, node] = 1, -1
        ranges += [(low, middle), (middle, high)]
        node += 1
    return sign
