"""Triton kernels of the grouped product in float32, which never wait for the host.

The library's product of float32 asks the GPU how many rows each expert has and then runs one
matrix product after another. Here every program finds out for itself which tile is its own, so that
the host runs ahead, and a step can be captured as a CUDA graph.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, OUT, DEEP = 128, 64, 32  # of a tile: rows, outputs, and inputs that are added at once
PARTS = 512  # programs that share a sum over rows, if there are rows for so many


@triton.jit
def _tile(ends, pid, E: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """The expert of a tile (E: there is none), its first row and the end of the expert's rows."""
    e = tl.arange(0, EXPERTS)
    end = tl.load(ends + e, e < E, 0).to(tl.int32)
    start = tl.load(ends + e - 1, (e > 0) & (e < E), 0).to(tl.int32)
    tiles = tl.where(e < E, (end - start + ROWS - 1) // ROWS, 0)
    past = tl.cumsum(tiles, 0)
    expert = tl.sum(((past <= pid) & (e < E)).to(tl.int32), 0)
    mine = e == expert
    first = tl.sum(tl.where(mine, start + (pid - past + tiles) * ROWS, 0), 0)
    return expert, first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def _product(
    a, w, ends, y, a_row, a_column, w_expert, w_out, w_in,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    expert, first, end = _tile(ends, tl.program_id(0), E, EXPERTS, ROWS)
    if expert < E:
        n = (first + tl.arange(0, ROWS)).to(tl.int64)
        o = tl.program_id(1) * OUT + tl.arange(0, OUT)
        w += expert.to(tl.int64) * w_expert
        total = tl.zeros([ROWS, OUT], tl.float32)
        for k in range(0, INPUTS, DEEP):
            i = k + tl.arange(0, DEEP)
            here = (n < end)[:, None] & (i < INPUTS)[None, :]
            rows = tl.load(a + n[:, None] * a_row + i[None, :] * a_column, here, 0.0)
            there = (i < INPUTS)[:, None] & (o < OUTPUTS)[None, :]
            matrix = tl.load(w + i[:, None] * w_in + o[None, :] * w_out, there, 0.0)
            total += tl.dot(rows, matrix, input_precision=PRECISION)
        here = (n < end)[:, None] & (o < OUTPUTS)[None, :]
        tl.store(y + n[:, None] * OUTPUTS + o[None, :], total, here)


@triton.jit
def _outer(
    g, a, ends, y, g_row, g_column, a_row, a_column,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, E: tl.constexpr, SHARE: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    expert, part = tl.program_id(0) % E, tl.program_id(0) // E
    start = tl.load(ends + expert - 1, expert > 0, 0).to(tl.int32)
    end = tl.load(ends + expert).to(tl.int32)
    deep = (end - start + SHARE * DEEP - 1) // (SHARE * DEEP) * DEEP  # rows of a part
    first = start + part * deep
    o = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(2) * OUT + tl.arange(0, OUT)
    total = tl.zeros([ROWS, OUT], tl.float32)
    for k in range(0, deep, DEEP):
        n = (first + k + tl.arange(0, DEEP)).to(tl.int64)
        left = tl.load(
            g + o[:, None] * g_column + n[None, :] * g_row,
            (o < OUTPUTS)[:, None] & (n < end)[None, :], 0.0,
        )  # fmt: skip
        right = tl.load(
            a + n[:, None] * a_row + i[None, :] * a_column,
            (n < end)[:, None] & (i < INPUTS)[None, :], 0.0,
        )  # fmt: skip
        total += tl.dot(left, right, input_precision=PRECISION)
    y += tl.program_id(0).to(tl.int64) * OUTPUTS * INPUTS
    here = (o < OUTPUTS)[:, None] & (i < INPUTS)[None, :]
    tl.store(y + o[:, None] * INPUTS + i[None, :], total, here)


def product(a_NI: Tensor, w_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """`[N, O]`: row n times the transposed matrix of its expert; rows of nobody are not written."""
    (n, i), (e, o, _) = a_NI.shape, w_EOI.shape
    y_NO = a_NI.new_empty(n, o)
    tiles = triton.cdiv(n, ROWS) + e  # at least: the last tile of an expert need not be full
    _product[tiles, triton.cdiv(o, OUT)](
        a_NI, w_EOI, ends_E, y_NO, *a_NI.stride(), *w_EOI.stride(),
        OUTPUTS=o, INPUTS=i, E=e, EXPERTS=triton.next_power_of_2(e), PRECISION=_precision(),
        ROWS=ROWS, OUT=OUT, DEEP=DEEP,
    )  # fmt: skip
    return y_NO


def outer(g_NO: Tensor, a_NI: Tensor, ends_E: Tensor) -> Tensor:
    """`[E, O, I]`: Σ g_n a_nᵀ over the rows of each expert; in parts, added in a fixed order."""
    (n, o), i, e = g_NO.shape, a_NI.shape[1], len(ends_E)
    tiles = triton.cdiv(o, ROWS), triton.cdiv(i, OUT)
    share = max(min(PARTS // (e * tiles[0] * tiles[1]), n // (e * DEEP)), 1)
    y = a_NI.new_empty(share, e, o, i)
    _outer[share * e, *tiles](
        g_NO, a_NI, ends_E, y, *g_NO.stride(), *a_NI.stride(),
        OUTPUTS=o, INPUTS=i, E=e, SHARE=share, PRECISION=_precision(),
        ROWS=ROWS, OUT=OUT, DEEP=DEEP,
    )  # fmt: skip
    return y[0] if share == 1 else y.sum(0)


def _precision() -> str:
    """TF32 where matrix products may use it, else three products of TF32 that make up a float32."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"
