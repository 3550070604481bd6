"""Move tokens to their experts and back: `dispatch` and `combine` (or `by_slot`, unweighted).

Each is the adjoint of the other: taking rows forward is summing rows backward. Both sums run over
a token's rows in a fixed order, and no atomics are used, so repeated runs are equal to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..routing.value import Plan, Routing, readable
from .grouped import grouped_outer


def dispatch(x_TD: Tensor, plan: Plan) -> Tensor:
    """`[N, D]`: the tokens, once for each slot, sorted by expert."""
    return _Take.apply(x_TD, plan.token_N, *_way_back(plan))


def combine(y_ND: Tensor, routing: Routing, plan: Plan) -> Tensor:
    """`[T, D]`: for each token the weighted sum of its experts' outputs."""
    weight_N = routing.by_token().weight.flatten().index_select(0, plan.slot_N)
    if y_ND.dtype == torch.float64:
        weight_N = weight_N.double()
    return _Sum.apply(y_ND, weight_N, plan.token_N, *_way_back(plan))


def by_slot(y_ND: Tensor, plan: Plan) -> Tensor:
    """`[T, K, D]`: the unweighted output of every slot of a token; zero where it is inactive."""
    if plan.slots_per_token is None:
        raise ValueError("outputs by slot need a decision by token: its slots are laid out [T, K]")
    shape = (plan.tokens, plan.slots_per_token)
    if plan.rows == 0:
        return y_ND.new_zeros(*shape, y_ND.shape[1]) + y_ND.sum()  # still a node of the graph
    zero_N = plan.slot_N.new_zeros(plan.tokens * plan.slots_per_token)
    row_N = zero_N.scatter(0, plan.slot_N, torch.arange(plan.rows, device=zero_N.device))
    y_TKD = _Take.apply(y_ND, row_N, plan.slot_N[:, None], None).view(*shape, y_ND.shape[1])
    if plan.full:
        return y_TKD
    used_TK = zero_N.bool().scatter(0, plan.slot_N, plan.used()).view(shape)
    return torch.where(used_TK[..., None], y_TKD, 0.0)  # rows of nobody hold anything at all


def spread(table_EO: Tensor, plan: Plan) -> Tensor:
    """`[N, O]`: the entry of each row's expert; a bias per expert, for example."""
    if not readable(plan.slot_N):
        return _Spread.apply(table_EO, plan.expert_N(), plan.ends_E)
    starts = F.pad(plan.ends_E.long(), (1, 0))
    rows = torch.arange(plan.rows, device=starts.device)
    return _Take.apply(table_EO, plan.expert_N(), rows, starts)


def _way_back(plan: Plan) -> tuple[Tensor, Tensor | None]:
    """Which rows make up a token: `[T, K]` places and a mask, or bags of rows and their starts.

    Bags are one pass over memory on a CPU and fit any shape. Elsewhere, and in compiled code, a
    gather and a sum over K fuse with what surrounds them.
    """
    if readable(plan.slot_N) or plan.slots_per_token is None:
        return plan.bags()
    row_TK = plan.row_of_slot().view(plan.tokens, plan.slots_per_token)
    return row_TK, None if plan.full else row_TK < plan.ends_E[-1]


def _sum_rows(y_ND: Tensor, weight_N: Tensor | None, rows: Tensor, extra: Tensor | None) -> Tensor:
    if rows.dim() == 1:
        assert extra is not None  # the starts of the bags
        return _sum_bags(y_ND, weight_N, rows, extra)
    y_TKD = y_ND[rows]
    if extra is not None:  # rows of nobody hold anything at all: select, never multiply by zero
        y_TKD = torch.where(extra[..., None], y_TKD, 0.0)
    if weight_N is None:
        return y_TKD.sum(1)
    weight_TK = weight_N[rows]
    if extra is not None:
        weight_TK = torch.where(extra, weight_TK, 0.0)
    out_TD = (y_TKD * weight_TK[..., None]).sum(1)  # the product is fp32
    # Compiled by torch 2.11, a function whose output is cast to the type it has gives no gradient.
    return out_TD if out_TD.dtype == y_ND.dtype else out_TD.to(y_ND.dtype)


def _sum_bags(y_ND: Tensor, weight_N: Tensor | None, rows: Tensor, starts: Tensor) -> Tensor:
    if y_ND.shape[0] == 0:
        return y_ND.new_zeros(starts.shape[0] - 1, y_ND.shape[1])
    if weight_N is not None and weight_N.dtype != y_ND.dtype:
        y_ND, weight_N = (y_ND * weight_N[:, None]).to(y_ND.dtype), None
    weights = None if weight_N is None else weight_N[rows]
    # The last start opens a bag for the rows of nobody, which is thrown away. (As the end of the
    # last bag, `include_last_offset`, CUDA ignores it and adds those rows to the last token.)
    return F.embedding_bag(rows, y_ND, starts, mode="sum", per_sample_weights=weights)[:-1]


class _Take(torch.autograd.Function):
    """rows = x[id]; backward sums the rows of each id."""

    @staticmethod
    def forward(x_TD: Tensor, id_N: Tensor, rows: Tensor, extra: Tensor | None) -> Tensor:
        return x_TD.index_select(0, id_N.clamp(max=x_TD.shape[0] - 1)) if len(x_TD) else x_TD

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, g_ND: Tensor) -> tuple[Tensor | None, ...]:
        id_N, rows, extra = ctx.saved_tensors
        return _Sum.apply(g_ND.contiguous(), None, id_N, rows, extra), None, None, None


class _Spread(torch.autograd.Function):
    """rows = table[expert]; backward sums the rows of each expert.

    As a product with ones: a GPU would sum each expert's bag of thousands of rows one by one.
    """

    @staticmethod
    def forward(table_EO: Tensor, expert_N: Tensor, ends_E: Tensor) -> Tensor:
        return table_EO.index_select(0, expert_N.clamp(max=table_EO.shape[0] - 1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, g_NO: Tensor) -> tuple[Tensor, None, None]:
        (ends_E,) = ctx.saved_tensors
        ones = g_NO.new_ones(g_NO.shape[0], 16 // g_NO.dtype.itemsize)  # as narrow as it may be
        return grouped_outer(g_NO, ones, ends_E)[..., 0], None, None


class _Sum(torch.autograd.Function):
    """out_t = Σ w_n y_n over the rows n of t; backward takes the rows of the gradient."""

    @staticmethod
    def forward(
        y_ND: Tensor, weight_N: Tensor | None, id_N: Tensor, rows: Tensor, extra: Tensor | None
    ) -> Tensor:
        return _sum_rows(y_ND, weight_N, rows, extra)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g_TD: Tensor) -> tuple[Tensor | None, ...]:
        y_ND, weight_N, id_N, rows, extra = ctx.saved_tensors
        g_ND = _Take.apply(g_TD, id_N, rows, extra)
        if weight_N is None:
            return g_ND, None, None, None, None
        dw_N = None
        if ctx.needs_input_grad[1]:
            dw_N = (g_ND * y_ND).sum(-1, dtype=weight_N.dtype)
            dw_N = torch.where(id_N < g_TD.shape[0], dw_N, 0.0)  # not from rows of nobody
        return (g_ND * weight_N[:, None]).to(y_ND.dtype), dw_N, None, None, None
