"""`FeedForward`: E two-layer networks, gated or plain, as stacked weights.

plain:  y = W_out act(W_in x + b_in) + b_out
gated:  y = W_out (act(W_gate x) · W_up x) + b_out, with W_in = [W_gate; W_up] (SwiGLU and kin)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..routing.value import Plan
from .base import StackedExperts, active_dtype
from .dispatch import spread
from .grouped import grouped_mm


class FeedForward(StackedExperts):
    """E feed-forward experts.

    activation  a name of `transformers.activations.ACT2FN`, or a callable
    gated       multiply by a second linear map: SwiGLU is gated=True with activation="silu"
    same_init   start all experts from the same weights (V-MoE)
    """

    def __init__(
        self,
        experts: int,
        dim: int,
        hidden: int,
        *,
        activation: str | Callable[[Tensor], Tensor] = "gelu",
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        out_dim: int | None = None,
        same_init: bool = False,
    ) -> None:
        super().__init__()
        out_dim = dim if out_dim is None else out_dim
        sizes = {"experts": experts, "dim": dim, "hidden": hidden, "out_dim": out_dim}
        for word, n in sizes.items():
            if not isinstance(n, int) or n < 1:
                raise ValueError(f"{word} must be a whole number, at least 1, got {n!r}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and less than 1, got {dropout!r}")
        self.experts, self.dim, self.hidden, self.out_dim = experts, dim, hidden, out_dim
        self.gated, self.dropout, self.same_init = gated, dropout, same_init
        self.activation = find_activation(activation)
        wide = 2 * hidden if gated else hidden
        self.w_in = nn.Parameter(torch.empty(experts, wide, dim))
        self.w_out = nn.Parameter(torch.empty(experts, self.out_dim, hidden))
        self.b_in = nn.Parameter(torch.empty(experts, wide)) if bias else None
        self.b_out = nn.Parameter(torch.empty(experts, self.out_dim)) if bias else None
        self.reset_parameters()

    def stacks(self) -> tuple[Tensor, Tensor]:
        return self.w_in, self.w_out

    def reset_parameters(self) -> None:
        """Uniform in ±1/√(inputs), as `nn.Linear` starts."""
        for p, inputs in (
            (self.w_in, self.dim),
            (self.b_in, self.dim),
            (self.w_out, self.hidden),
            (self.b_out, self.hidden),
        ):
            if p is not None:
                nn.init.uniform_(p, -(inputs**-0.5), inputs**-0.5)
                if self.same_init:
                    p.data.copy_(p.data[:1].expand_as(p))

    def _between(self, h: Tensor) -> Tensor:
        if self.gated:
            gate, up = h.chunk(2, dim=-1)
            h = self.activation(gate) * up
        else:
            h = self.activation(h)
        return F.dropout(h, self.dropout, self.training) if self.dropout else h

    def _learned_activation(self) -> bool:
        act = self.activation
        return isinstance(act, nn.Module) and next(act.parameters(), None) is not None

    def _each(self) -> list[tuple[Tensor, Tensor | None, Tensor, Tensor | None]]:
        """The weights of every expert."""
        none = [None] * self.experts
        # Unbound, a stack has one stack as its gradient; E of its slices would make E of them.
        w_in, w_out = self.w_in.unbind(), self.w_out.unbind()
        b_in = none if self.b_in is None else self.b_in.unbind()
        b_out = none if self.b_out is None else self.b_out.unbind()
        return list(zip(w_in, b_in, w_out, b_out, strict=True))

    def loop(self, rows: Iterable[Tensor]) -> Iterator[Tensor]:
        for x, own in zip(rows, self._each(), strict=True):
            yield self._one(x, *own)

    def _one(
        self, x: Tensor, w_1: Tensor, b_1: Tensor | None, w_2: Tensor, b_2: Tensor | None
    ) -> Tensor:
        return F.linear(self._between(F.linear(x, w_1, b_1)), w_2, b_2)

    def grouped(self, rows_ND: Tensor, plan: Plan) -> Tensor:
        dtype = active_dtype(rows_ND)
        h = grouped_mm(rows_ND.to(dtype), self.w_in.to(dtype), plan.ends_E)
        if self.b_in is not None:
            h = h + spread(self.b_in.to(dtype), plan)
        if plan.full or not self._learned_activation():
            h = self._between(h)
        else:  # its gradient is a sum over all rows: those of nobody must add nothing
            used = plan.used()[:, None]
            h = torch.where(used, self._between(torch.where(used, h, 0.0)), 0.0)
        y = grouped_mm(h.to(dtype), self.w_out.to(dtype), plan.ends_E)
        return y if self.b_out is None else y + spread(self.b_out.to(dtype), plan)

    def dense(self, x_TD: Tensor, weight_TE: Tensor) -> Tensor:
        h = torch.einsum("td,efd->tef", x_TD, self.w_in)
        if self.b_in is not None:
            h = h + self.b_in
        h = self._between(h) * weight_TE[..., None]
        y = torch.einsum("tef,edf->td", h, self.w_out)
        return y if self.b_out is None else y + weight_TE @ self.b_out

    def answers(self, x_TD: Tensor, ids: Tensor | None = None, backend: str = "loop") -> Tensor:
        parts = [self.w_in, self.b_in, self.w_out, self.b_out]
        if backend == "loop":
            chosen = range(self.experts) if ids is None else ids.tolist()
            if not torch.is_grad_enabled():  # no gradient to gather: the others are not looked at
                own: Any = ([p if p is None else p[e] for p in parts] for e in chosen)
                return torch.stack([self._one(x_TD, *weights) for weights in own])
            each = self._each()
            return torch.stack([self._one(x_TD, *each[e]) for e in chosen])
        w_in, b_in, w_out, b_out = (
            p if p is None or ids is None else p.index_select(0, ids) for p in parts
        )
        h = torch.einsum("td,ufd->utf", x_TD, w_in)
        h = self._between(h if b_in is None else h + b_in[:, None])
        y_UTD = torch.einsum("utf,udf->utd", h, w_out)
        return y_UTD if b_out is None else y_UTD + b_out[:, None]

    def flops_per_row(self) -> list[float]:
        per_row = 2.0 * (self.w_in[0].numel() + self.w_out[0].numel())
        return [per_row] * self.experts

    def extra_repr(self) -> str:
        kind = "gated" if self.gated else "plain"
        return f"experts={self.experts}, dim={self.dim}, hidden={self.hidden}, {kind}"


def find_activation(activation: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A callable as it is, or the one of that name in `transformers`."""
    if callable(activation):
        return activation
    from transformers.activations import ACT2FN

    if activation not in ACT2FN:
        if activation.endswith("glu"):
            raise ValueError(
                f'for {activation!r} take gated=True; "silu" makes SwiGLU, "gelu" GeGLU'
            )
        raise ValueError(f"no activation is named {activation!r}; there are {', '.join(ACT2FN)}")
    return ACT2FN[activation]
