"""Noisy top-k gate: the k largest scores after noise was added, so that losers get a try.

router = moiety.build_router("noisy-top-k", dim=64, experts=8, k=2)
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import LinearRouter, Opt, need_k, top_k
from .registry import register
from .value import Routing

LEAST_STD = 1e-2  # keeps a learned standard deviation, by which the load loss divides, above zero


@register(
    "noisy-top-k",
    paper="V-MoE (Riquelme et al. 2021); Shazeer et al. 2017",
    equation="softmax(W x + ε) at its k largest; learned std: Shazeer (3)–(5)",
)
class NoisyTopK(LinearRouter):
    """Choose the k largest noisy scores; weigh them by the noisy softmax.

    In eval there is no noise. The load loss may change the noisy score at the threshold as well as
    the noise-free ones, as in V-MoE: the threshold is differentiable, only which expert holds it is
    not.
    """

    stochastic = True
    per_expert = ("weight", "noise_weight")

    def __init__(
        self,
        dim: int,
        experts: int,
        *,
        k: Annotated[int, Opt("experts a token", alt=3, low=1)] = 2,
        noise: Annotated[
            str,
            Opt(
                "one standard deviation for all, or softplus(W_noise x) for each score",
                alt="learned",
                choices=("fixed", "learned"),
            ),
        ] = "fixed",
        std: Annotated[
            float | None, Opt("of the fixed noise; None = 1/E, 0 = no noise", alt=1.0, low=0.0)
        ] = None,
        renormalise: Annotated[bool, Opt("weights sum to one (Shazeer)", alt=True)] = False,
    ) -> None:
        super().__init__(dim, experts)
        need_k(self.name, k, experts)
        if noise == "learned" and std is not None:
            raise ValueError(f"{self.name}: std is for noise='fixed'; learned noise has its own")
        self.k, self.noise, self.renormalise = k, noise, renormalise
        self.std = 1 / experts if std is None else std
        self.stochastic = self.noisy = noise == "learned" or self.std > 0
        self.weights_sum = "one" if renormalise or k == experts else "at most one"
        if noise == "learned":
            # Zero: every score starts with the same noise, softplus(0) = log 2.
            self.noise_weight = nn.Parameter(torch.zeros(experts, dim))

    def default_balance(self) -> dict[str, float]:
        # V-MoE: with two experts the load loss can become NaN.
        if self.experts == 2:
            return {"gshard": 0.01}
        return {"importance": 0.005, "load": 0.005}

    def noise_std(self, x_TD: Tensor) -> Tensor:
        """Scalar, or `[T, E]` where it is learned."""
        if self.noise == "fixed":
            return x_TD.new_full((), self.std)  # a fill, where new_tensor would copy from the host
        return F.softplus(F.linear(x_TD, self.noise_weight.to(x_TD.dtype))) + LEAST_STD

    def route(
        self, x_TD: Tensor, mask: Tensor | None, ids: Tensor | None, group: int | None
    ) -> Routing:
        scores = self.scores(x_TD)
        probs = scores.softmax(-1)
        if not (self.training and self.stochastic):
            index = top_k(scores, self.k)
            return Routing.choose(index, probs, renormalise=self.renormalise, scores=scores)
        std = self.noise_std(x_TD)
        noisy = scores + torch.randn_like(scores) * std
        index = top_k(noisy, self.k)
        return Routing.choose(
            index,
            noisy.softmax(-1),
            probs=probs,
            renormalise=self.renormalise,
            scores=scores,
            threshold=noisy.gather(1, index[:, -1:]).squeeze(1),
            noise_std=std,
        )
