"""DSelect-k: k smooth selectors, each of which spells the number of one expert in binary.

router = moiety.build_router("dselect-k", dim=64, experts=16, k=4)
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Opt
from .dselect import (
    Codes,
    DSelect,
    EntropySteps,
    Reach,
    Seed,
    Selectors,
    Slots,
    WarmSteps,
    Width,
    WidthEnd,
    WidthSteps,
)
from .registry import register
from .selector import is_plateau
from .static import facts
from .value import Routing


@register(
    "dselect-k",
    paper="DSelect-k (Hazimeh et al. 2021)",
    equation="v(x) = Σ_i softmax(G x)_i r(S_b(W⁽ⁱ⁾ x))",
)
class DSelectK(DSelect):
    """Mix k binary-coded selectors that each token steers by a linear map.

    An expert is inactive exactly where every selector has put a digit of its code on a plateau.
    The penalty `entropy` is that of the selectors over the codes that belong to experts (all codes
    if E is a power of two), `reachability` the mean over real tokens of a sum over selectors. In
    code form the latter is k, not 0, when all mass is reachable, as in the paper's code.
    """

    def __init__(
        self,
        dim: int,
        experts: int,
        *,
        k: Selectors = 2,
        width: Width = 1.0,
        width_end: WidthEnd = None,
        width_steps: WidthSteps = 0,
        reach: Reach = "paper",
        entropy: Annotated[
            str,
            Opt(
                "entropy penalty over the real tokens: the paper's sum, which grows with the "
                "batch, or their mean",
                alt="mean",
                choices=("sum", "mean"),
            ),
        ] = "sum",
        entropy_steps: EntropySteps = 0,
        warm_steps: WarmSteps = 0,
        codes: Codes = "natural",
        seed: Seed = None,
        slots: Slots = None,
    ) -> None:
        super().__init__(
            dim,
            experts,
            k=k,
            width=width,
            width_end=width_end,
            width_steps=width_steps,
            reach=reach,
            entropy_steps=entropy_steps,
            warm_steps=warm_steps,
            codes=codes,
            seed=seed,
            slots=slots,
        )
        self.entropy = entropy

    def make_parameters(self) -> None:
        self.alpha_weight = nn.Parameter(torch.empty(self.k, self.dim))  # G
        self.alpha_bias = nn.Parameter(torch.empty(self.k))
        self.z_weight = nn.Parameter(torch.empty(self.k * self.digits, self.dim))  # W
        self.z_bias = nn.Parameter(torch.empty(self.k * self.digits))

    def logits(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        t = x_TD.dtype
        alpha_TK = F.linear(x_TD, self.alpha_weight.to(t), self.alpha_bias.to(t))
        z_TN = F.linear(x_TD, self.z_weight.to(t), self.z_bias.to(t))
        shape = (x_TD.shape[0], self.k, self.digits)
        return self.check_scores(alpha_TK), self.check_scores(z_TN).view(shape)

    @torch.no_grad()
    def is_binary(self, x_TD: Tensor) -> Tensor:
        """`[T]` bool: every digit of the token's selectors is exactly 0 or 1."""
        x_TD = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
        return is_plateau(self.logits(x_TD)[1], self.width_at(self.calls, x_TD.dtype))


@register(
    "dselect-k-static",
    paper="DSelect-k (Hazimeh et al. 2021)",
    equation="(6): q(α, Z) = Σ_i softmax(α)_i r(S_b(z⁽ⁱ⁾))",
)
class DSelectKStatic(DSelect):
    """Mix k binary-coded selectors that are the same for all tokens.

    Penalties as in `dselect-k`, for one gate instead of one a token.
    """

    static = True

    def make_parameters(self) -> None:
        self.alpha = nn.Parameter(torch.empty(self.k))
        self.z = nn.Parameter(torch.empty(self.k, self.digits))

    def logits(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        alpha_K, z_KM = self.alpha.to(x_TD.dtype), self.z.to(x_TD.dtype)
        return self.check_scores(alpha_K)[None], self.check_scores(z_KM)[None]

    @torch.no_grad()
    def is_binary(self) -> bool:
        """Every digit of every selector is exactly 0 or 1: from now on the selection stays."""
        x_TD = self.any_token()
        return bool(is_plateau(self.logits(x_TD)[1], self.width_at(self.calls, x_TD.dtype)))

    @torch.no_grad()
    def diagnostics(self) -> dict[str, object]:
        """Selected experts, their number, all weights; whether the gate is binary; b now."""
        x_TD = self.any_token()
        routing = self.decide(x_TD, None, self.calls)
        found = facts(routing.dense()[0], routing.choice()[0])
        width = float(self.width_at(self.calls, x_TD.dtype))
        return {**found, "is_binary": self.is_binary(), "width": width}

    def any_token(self) -> Tensor:
        """A token of the dtype in which the gate is computed; its values do not matter."""
        dtype = torch.promote_types(self.alpha.dtype, torch.float32)
        return self.alpha.new_zeros(1, self.dim, dtype=dtype)


def selected(routing: Routing) -> Tensor:
    """`[T]`: how many experts work for each token; 0 for padding, and none that `slots` cut."""
    return routing.choice().sum(1)
