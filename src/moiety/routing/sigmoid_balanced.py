"""Bias-balanced sigmoid gate: a bias, moved against the load, chooses; it never weighs.

router = moiety.build_router("sigmoid-balanced", dim=64, experts=8, k=2)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from .base import LinearRouter, Opt, need_k, recomputing, top_k
from .registry import register
from .value import Routing


@register(
    "sigmoid-balanced",
    paper="Wang et al. 2024 (loss-free balancing); DeepSeek-V3 (2024)",
    equation="DeepSeek-V3 (12)–(16): top-k of σ(W x) + b; b += rate · sign(mean load − load)",
)
class SigmoidBalanced(LinearRouter):
    """Choose the k largest sigmoid(W x) + bias; weigh them by their sigmoids.

    The bias moves once an optimizer step: training calls add their load to `seen`, and the first
    one that finds the weight changed applies it. So accumulated gradients make one move, by the
    load of all their calls. With several processes each counts its own tokens, except that
    DistributedDataParallel, which by default broadcasts buffers, keeps the counts of rank 0.
    """

    per_expert = ("weight", "bias", "seen", "last")

    bias: Tensor
    seen: Tensor
    last: Tensor

    def __init__(
        self,
        dim: int,
        experts: int,
        *,
        k: Annotated[int, Opt("experts a token", alt=3, low=1)] = 2,
        rate: Annotated[float, Opt("how far the bias moves in a step", alt=0.1, low=0.0)] = 1e-3,
        zero_mean: Annotated[
            bool, Opt("take the mean off the bias at each move", alt=True)
        ] = False,
        renormalise: Annotated[bool, Opt("weights sum to scale", alt=False)] = True,
        scale: Annotated[float, Opt("factor on all weights", alt=2.5, low=0.0)] = 1.0,
    ) -> None:
        super().__init__(dim, experts)
        need_k(self.name, k, experts)
        self.k, self.rate, self.zero_mean = k, rate, zero_mean
        self.renormalise, self.scale = renormalise, scale
        self.weights_sum = "one" if renormalise and scale == 1 else "free"
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("seen", torch.zeros(experts, dtype=torch.long))
        self.register_buffer("last", self.weight.detach().clone(), persistent=False)

    def route(
        self, x_TD: Tensor, mask: Tensor | None, ids: Tensor | None, group: int | None
    ) -> Routing:
        gate = self.scores(x_TD).sigmoid()
        # Gradient checkpointing repeats a call inside backward: it was counted already.
        counts = self.training and not recomputing()
        if counts:
            self._move((self.weight != self.last).any())
        scores = gate + self.bias
        index = top_k(scores, self.k)
        if counts:
            self._count(index, mask)
        return Routing.choose(
            index, gate, renormalise=self.renormalise, scale=self.scale, scores=scores
        )

    def update(self) -> None:
        """Move the bias by the load seen so far, now: for a loop whose router is frozen."""
        self._move(torch.ones((), dtype=torch.bool, device=self.bias.device))

    @torch.no_grad()
    def _move(self, when: Tensor) -> None:
        # `when` is data on the device: `where`, not `if`, so that the host need not wait for it.
        # E · (mean load − load) in whole numbers: exact, and zero when nothing was seen.
        bias = self.bias + self.rate * torch.sign(self.seen.sum() - self.experts * self.seen)
        if self.zero_mean:
            bias = bias - bias.mean()
        self.bias.copy_(torch.where(when, bias, self.bias))
        self.seen.masked_fill_(when, 0)
        self.last.copy_(self.weight)

    @torch.no_grad()
    def _count(self, index_TK: Tensor, mask: Tensor | None) -> None:
        real_TK = torch.ones_like(index_TK)
        if mask is not None:
            real_TK = real_TK * mask[:, None]
        self.seen.scatter_add_(0, index_TK.flatten(), real_TK.flatten())

    def _apply(self, fn: Callable, recurse: bool = True) -> SigmoidBalanced:
        super()._apply(fn, recurse)
        # In half precision steps of `rate` would be lost beside a bias of ordinary size.
        if self.bias.dtype in (torch.float16, torch.bfloat16):
            self.bias = self.bias.float()
        return self
