"""Gumbel gate: each expert is kept or not by a learned coin, the same for all tokens."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Opt
from .registry import register
from .static import StaticRouter, facts, small_uniform
from .value import Routing


@register(
    "gumbel-static",
    paper="DSelect-k (Hazimeh et al. 2021), adapted there from AdaShare (Sun et al. 2020)",
    equation="g_i = softmax(α)_i U_i, U_i ~ Bernoulli(p_i), penalty Σ log p_i",
)
class Gumbel(StaticRouter):
    """Keep each expert with a learned probability; weigh the kept by their share of a softmax.

    Training draws U once a call and lets the gradient pass straight through: forward 0 or 1,
    backward that of the binary concrete σ((a + logistic noise) / τ) with p = σ(a). So an expert
    with U = 0 has a live gradient and is computed. Eval keeps p > 0.5 and skips the rest. Weights
    are not renormalised. `sparsity` = Σ log p is minimised, which lowers p; it has no lower bound,
    but its gradient in a, 1 − p, is bounded.
    """

    stochastic = True
    per_expert = ("alpha", "weight")
    weights_sum = "at most one"
    temperature: Tensor

    def __init__(
        self,
        dim: int,
        experts: int,
        *,
        temperature: Annotated[
            float,
            Opt("τ of the gradient; low is true to the coin, high is calm", alt=0.5, low=1e-3),
        ] = 1.0,
        start: Annotated[
            # Above one half, or a new router would keep nobody in eval.
            float, Opt("probability of each expert at the start", alt=0.6, low=0.01, high=0.99)
        ] = 0.9,
    ) -> None:
        super().__init__(dim, experts)
        self.start = start
        # A buffer: a training loop may lower it as it goes, and checkpoints keep it.
        self.register_buffer("temperature", torch.tensor(float(temperature)))
        self.alpha = nn.Parameter(torch.empty(experts))
        self.weight = nn.Parameter(torch.empty(experts))  # a, the logit of p
        self.reset_parameters()

    def reset_parameters(self) -> None:
        small_uniform(self.alpha)
        nn.init.constant_(self.weight, math.log(self.start / (1 - self.start)))

    def default_balance(self) -> dict[str, float]:
        """A small pull to fewer experts: a task gradient above 1e-3 · (1 − p) keeps an expert."""
        return {"sparsity": 1e-3}

    def diagnostics(self) -> dict[str, object]:
        kept_E = self.weight > 0
        found = facts(self.alpha.softmax(0) * kept_E, kept_E)
        return {**found, "probabilities": self.weight.detach().sigmoid().tolist()}

    def route(
        self, x_TD: Tensor, mask: Tensor | None, ids: Tensor | None, group: int | None
    ) -> Routing:
        logit_E = self.check_scores(self.weight.to(x_TD.dtype))
        share_E = self.check_scores(self.alpha.to(x_TD.dtype)).softmax(0)
        keep_E = self.toss(logit_E) if self.training else (logit_E > 0).to(x_TD.dtype)
        return self.whole(
            x_TD,
            share_E * keep_E,
            active=None if self.training else (logit_E > 0)[None],
            probs=(share_E * logit_E.sigmoid())[None],
            scores=logit_E[None],
            # log p; `logsigmoid` fails on a GPU in a vmap inside another.
            penalties={"sparsity": -F.softplus(-logit_E).sum()},
        )

    def toss(self, logit_E: Tensor) -> Tensor:
        """Draw U: 0 or 1, with the gradient of the binary concrete."""
        noisy_E = logit_E + torch.rand_like(logit_E).logit()
        soft_E = (noisy_E / self.temperature.to(noisy_E.dtype)).sigmoid()
        # In this order the forward is 0 or 1 to the bit.
        return (noisy_E > 0).to(soft_E.dtype) + (soft_E - soft_E.detach())
