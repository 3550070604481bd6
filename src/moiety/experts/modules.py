"""`ModuleExperts`: any list of modules as experts, small CNNs for example."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import cost
from .base import Experts


class ModuleExperts(Experts):
    """Modules that map `[n, dim]`, or `[n, *shape]` where `shape` is given, to `[n, ...]`.

    A module that gets no token is not called.
    """

    backends: ClassVar[tuple[str, ...]] = ("loop", "dense")

    def __init__(
        self,
        modules: Iterable[nn.Module],
        *,
        dim: int,
        out_dim: int | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(modules)
        if not self.members:
            raise ValueError("ModuleExperts needs at least one module")
        self.experts, self.dim = len(self.members), dim
        self.out_dim = dim if out_dim is None else out_dim
        self.shape = None if shape is None else tuple(shape)
        if self.shape is not None and torch.Size(self.shape).numel() != dim:
            raise ValueError(f"shape {self.shape} does not hold dim = {dim} values")

    def _call(self, member: nn.Module, rows_ND: Tensor) -> Tensor:
        y = member(rows_ND if self.shape is None else rows_ND.view(-1, *self.shape))
        y = y.flatten(1)
        if y.shape[1] != self.out_dim:
            raise ValueError(
                f"an expert answered with {y.shape[1]} values a token, not out_dim = {self.out_dim}"
            )
        return y

    def loop(self, rows: Iterable[Tensor]) -> Iterator[Tensor]:
        for member, x in zip(self.members, rows, strict=True):
            if x.shape[0]:
                yield self._call(member, x)
            else:  # no call; no rows, but still a node of the graph
                idle = [p for p in member.parameters() if p.requires_grad]
                yield _Touch.apply(x.new_zeros(0, self.out_dim) + 0.0 * x.sum(), *idle)

    def dense(self, x_TD: Tensor, weight_TE: Tensor) -> Tensor:
        y_TED = torch.stack([self._call(m, x_TD) for m in self.members], 1)
        return torch.einsum("ted,te->td", y_TED, weight_TE)

    def flops_per_row(self) -> list[float]:
        like = next(self.parameters(), torch.empty(()))
        row = torch.zeros(1, self.dim, device=like.device, dtype=like.dtype)
        return [cost.forward_flops(partial(self._call, m, row), m) for m in self.members]

    def copy(self, parents: list[int]) -> dict[str, list[int] | str]:
        """Append deep copies; returns, for each new parameter, the one it was copied from."""
        origin: dict[str, list[int] | str] = {}
        for parent in parents:
            new = len(self.members)
            self.members.append(copy.deepcopy(self.members[parent]))
            for name, _ in self.members[parent].named_parameters():
                origin[f"members.{new}.{name}"] = f"members.{parent}.{name}"
        self.experts = len(self.members)
        return origin


class _Touch(torch.autograd.Function):
    """Pass y through; give idle parameters a zero gradient.

    A data-parallel run waits for every parameter's gradient on every rank, and stacked experts give
    zeros to an idle expert too.
    """

    @staticmethod
    def forward(y_ND: Tensor, *idle: Tensor) -> Tensor:
        return y_ND.view_as(y_ND)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.idle = inputs[1:]

    @staticmethod
    def backward(ctx: Any, g_ND: Tensor) -> tuple[Tensor, ...]:
        return g_ND, *(torch.zeros_like(p) for p in ctx.idle)
