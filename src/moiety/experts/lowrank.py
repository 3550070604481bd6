"""`LowRank`: a dense base that every token passes, and experts that correct it.

    y = FFN(x) + Σ_e w_e · B_e A_e x

B starts at zero, so a fresh layer computes exactly its base, with any router and any capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..routing.value import Plan
from .base import StackedExperts, active_dtype
from .grouped import grouped_mm


class LowRank(StackedExperts):
    """E corrections of rank r on a base module; `frozen` keeps the base out of training."""

    def __init__(
        self, base: nn.Module, experts: int, dim: int, rank: int = 8, *, frozen: bool = True
    ) -> None:
        super().__init__()
        if not isinstance(experts, int) or experts < 1:
            raise ValueError(f"experts must be a whole number, at least 1, got {experts!r}")
        if not isinstance(rank, int) or not 1 <= rank <= dim:
            raise ValueError(f"rank must be a whole number from 1 to dim = {dim}, got {rank!r}")
        self.base = base
        self.experts, self.dim, self.out_dim, self.rank = experts, dim, dim, rank
        self.frozen = frozen
        if frozen:
            base.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(experts, rank, dim))  # A
        self.up = nn.Parameter(torch.zeros(experts, dim, rank))  # B
        nn.init.normal_(self.down, std=dim**-0.5)

    def stacks(self) -> tuple[Tensor, Tensor]:
        return self.down, self.up

    def always(self, x_TD: Tensor) -> Tensor:
        return self.base(x_TD)

    def loop(self, rows: Iterable[Tensor]) -> Iterator[Tensor]:
        for x, down, up in zip(rows, self.down.unbind(), self.up.unbind(), strict=True):
            yield F.linear(F.linear(x, down), up)

    def grouped(self, rows_ND: Tensor, plan: Plan) -> Tensor:
        dtype = active_dtype(rows_ND)
        h = grouped_mm(rows_ND.to(dtype), self.down.to(dtype), plan.ends_E)
        return grouped_mm(h, self.up.to(dtype), plan.ends_E)

    def dense(self, x_TD: Tensor, weight_TE: Tensor) -> Tensor:
        h = torch.einsum("td,erd->ter", x_TD, self.down) * weight_TE[..., None]
        return torch.einsum("ter,edr->td", h, self.up)

    def flops_per_row(self) -> list[float]:
        return [4.0 * self.rank * self.dim] * self.experts

    def extra_repr(self) -> str:
        base = "frozen" if self.frozen else "trainable"
        return f"experts={self.experts}, dim={self.dim}, rank={self.rank}, base {base}"
