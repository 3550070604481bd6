"""Cosine gates: scores are cosines between token and expert, plain or with perturbed norms.

router = moiety.build_router("perturbed-cosine", dim=64, experts=8, k=2, project=16)
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Opt, Router, need_k, top_k
from .registry import register
from .softmax import dense_routing
from .value import Routing

GAIN = 0.32  # norm of an expert's embedding at the start (X-MoE)
MOST_SCALE = 100.0  # of the cosine; a larger one makes the gate a step (Tutel)

K = Annotated[
    int | None, Opt("experts a token; None = all, weighed by softmax", alt=3, low=1, optional=True)
]
Project = Annotated[
    int | None, Opt("width of a learned projection of the token; None = none", alt=4, low=1)
]
Temperature = Annotated[float, Opt("cosines are divided by it", alt=0.2, low=1 / MOST_SCALE)]
LearnTemperature = Annotated[bool, Opt("the temperature is a parameter", alt=True)]
Offset = Annotated[bool, Opt("each expert has a learned b0, zero at the start", alt=False)]
Renormalise = Annotated[bool, Opt("weights of the chosen sum to one", alt=False)]


class CosineRouter(Router):
    """What `cosine` and `perturbed-cosine` share.

    Embeddings are `[E, W]`, W the width of the projection, or of the model where there is none.
    """

    per_expert = ("embedding", "bias", "shift")

    shift: Tensor
    log_scale: Tensor

    def __init__(
        self,
        dim: int,
        experts: int,
        k: int | None,
        project: int | None,
        temperature: float,
        learn_temperature: bool,
        b0: bool,
        renormalise: bool,
    ) -> None:
        super().__init__(dim, experts)
        need_k(self.name, k or 1, experts)
        self.k, self.renormalise, self.dense = k, renormalise, k is None
        whole = renormalise or k in (None, experts)
        self.weights_sum = "one" if whole else "at most one"
        self.embedding = nn.Parameter(torch.empty(experts, project or dim))
        self.projection = None if project is None else nn.Parameter(torch.empty(project, dim))
        self.bias = nn.Parameter(torch.zeros(experts)) if b0 else None
        log_scale = torch.tensor(-math.log(temperature))
        if learn_temperature:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale)
        # Grown experts share their parent's mass, as in the softmax gate.
        self.register_buffer("shift", torch.zeros(experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Orthogonal embeddings, or where there are more than dimensions, normal of equal norm."""
        experts, width = self.embedding.shape
        if experts <= width:
            nn.init.orthogonal_(self.embedding, gain=GAIN)
        else:
            nn.init.normal_(self.embedding, std=GAIN * width**-0.5)
        if self.projection is not None:
            nn.init.normal_(self.projection, std=self.dim**-0.5)

    def split(self, parents: list[int]) -> dict[str, list[int]] | None:
        """Give each parent a copy whose score, like the parent's own, is lower by log 2."""
        if not self.dense:
            return None
        self.shift[parents] -= math.log(2)
        return self._append_rows(parents)

    def taus(self, tokens: Tensor, random: bool) -> tuple[float | Tensor, float | Tensor]:
        """What is added to the norms of the experts and of the tokens."""
        return 0.0, 0.0

    def scores(self, u_TW: Tensor, random: bool = False) -> Tensor:
        """<u, e> / ((‖e‖ + τ1)(‖u‖ + τ2)) · exp(scale) + b0."""
        tau_1, tau_2 = self.taus(u_TW, random)
        e_EW = shrink(self.embedding.to(u_TW.dtype), tau_1)
        cosine = F.linear(shrink(u_TW, tau_2), e_EW)
        scale = self.log_scale.to(u_TW.dtype).clamp(max=math.log(MOST_SCALE)).exp()
        scores = cosine * scale + self.shift
        return self.check_scores(scores if self.bias is None else scores + self.bias)

    def route(
        self, x_TD: Tensor, mask: Tensor | None, ids: Tensor | None, group: int | None
    ) -> Routing:
        u_TW = x_TD
        if self.projection is not None:
            u_TW = F.linear(x_TD, self.projection.to(x_TD.dtype))
        scores = chosen_by = self.scores(u_TW)
        if self.training and self.stochastic:
            chosen_by = self.scores(u_TW, random=True)
        gate, probs = chosen_by.softmax(-1), scores.softmax(-1)
        if self.k is None:
            return dense_routing(gate, probs=probs, scores=scores)
        return Routing.choose(
            top_k(chosen_by, self.k),
            gate,
            probs=probs,
            renormalise=self.renormalise,
            scores=scores,
        )


@register(
    "cosine",
    paper="X-MoE (Chi et al. 2022); Nguyen et al. 2025",
    equation="softmax_i(<b1_i, x> / (‖b1_i‖ ‖x‖) + b0_i)",
)
class Cosine(CosineRouter):
    """Choose experts by the cosine of token and embedding.

    A zero token or embedding has no direction: its cosine is 0, with a finite gradient.
    """

    def __init__(
        self,
        dim: int,
        experts: int,
        *,
        k: K = 2,
        project: Project = None,
        temperature: Temperature = 1.0,
        learn_temperature: LearnTemperature = False,
        b0: Offset = True,
        renormalise: Renormalise = True,
    ) -> None:
        super().__init__(dim, experts, k, project, temperature, learn_temperature, b0, renormalise)


def shrink(v: Tensor, tau: float | Tensor) -> Tensor:
    """v / (‖v‖ + τ) along the last axis; 0 with a finite gradient at v = 0, also for τ = 0.

    Rows are first divided by their largest entry: squares then neither under- nor overflow, and a
    tiny row keeps its direction, which the usual max(‖v‖, ε) would take from it.
    """
    peak = v.detach().abs().amax(-1, keepdim=True)
    zero = peak == 0
    peak = peak.masked_fill(zero, 1.0)
    w = v / peak
    # A root at zero has no gradient, so a zero row takes the root of 1; the result is then 0 / 1
    # without τ, and v / τ, as it should be, with it.
    norm = w.square().sum(-1, keepdim=True).masked_fill(zero, 1.0).sqrt()
    perturbed = norm.masked_fill(zero, 0.0) + tau / peak
    return w / torch.where(perturbed > 0, perturbed, norm)
