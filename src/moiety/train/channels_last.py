"""Triton kernels for stacked convolutions of many channels, whose channels lie side by side.

A stacked tensor `[S, B, C, H, W]` lies in memory as `[B, H, W, S, C]`: batch norm sees the channels
of all copies as the last axis of one tensor and needs no copy, a pixel of a copy is read in whole
vectors, and whether it lies inside the image is asked once for all of its channels, so that nothing
is padded. A program belongs to one copy, as in `kernels`, which are better where channels are few.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .kernels import _precision, _tile
from .layers import from_last, to_last

# Measured on an H200: positions of a tile, warps, stages, channels of a product.
FORWARD = {"M": 128, "num_warps": 4, "num_stages": 3}
BACKWARD = {"M": 64, "num_stages": 1}
DEEPEST = 32
PARTS, LEAST = 16, 1024  # of the positions, whose gradients are added in fixed order; of a part


@triton.jit
def _under(x, m, here, tap, k, copy, copies, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr,
           WIDTH: tl.constexpr, SIZE: tl.constexpr, PADDING: tl.constexpr,
           ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """The pixels of a copy under a weight, at output positions m and channels k."""
    row = m // COLUMNS % ROWS + tap // SIZE - PADDING
    column = m % COLUMNS + tap % SIZE - PADDING
    inside = here & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
    pixel = (m // (ROWS * COLUMNS) * HEIGHT + row) * WIDTH + column
    at = (pixel.to(tl.int64) * copies + copy) * CHANNELS
    seen = inside[:, None] & (k < CHANNELS)[None, :]
    return tl.load(x + (at[:, None] + k[None, :]), mask=seen, other=0.0)


@triton.jit
def _convolve(
    x, weight, bias, y, positions, copies,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    PADDING: tl.constexpr, OUT: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = HEIGHT + 2 * PADDING - SIZE + 1
    COLUMNS: tl.constexpr = WIDTH + 2 * PADDING - SIZE + 1
    CHUNKS: tl.constexpr = (CHANNELS + K - 1) // K
    copy = tl.program_id(1).to(tl.int64)
    m, n = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, N)
    here = m < positions
    weight += copy * SIZE * SIZE * OUT * CHANNELS
    total = tl.zeros([M, N], tl.float32)
    for step in range(SIZE * SIZE * CHUNKS):
        tap, k = step // CHUNKS, step % CHUNKS * K + tl.arange(0, K)
        under = _under(x, m, here, tap, k, copy, copies,
                       CHANNELS, HEIGHT, WIDTH, SIZE, PADDING, ROWS, COLUMNS)  # fmt: skip
        real = (n < OUT)[None, :] & (k < CHANNELS)[:, None]
        w = tl.load(weight + ((tap * OUT + n)[None, :] * CHANNELS + k[:, None]), real, other=0.0)
        total = tl.dot(under, w, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + copy * OUT + n, mask=n < OUT, other=0.0)[None, :]
    at = (m.to(tl.int64) * copies + copy) * OUT
    tl.store(y + (at[:, None] + n[None, :]), total, mask=here[:, None] & (n < OUT)[None, :])


@triton.jit
def _gradient(
    x, g, parts, bias, positions, copies,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PADDING: tl.constexpr,
    OUT: tl.constexpr, PER_PART: tl.constexpr, PRECISION: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Of the three weights of a row, which share the slopes."""
    SIZE: tl.constexpr = 3
    ROWS: tl.constexpr = HEIGHT + 2 * PADDING - SIZE + 1
    COLUMNS: tl.constexpr = WIDTH + 2 * PADDING - SIZE + 1
    CHUNKS: tl.constexpr = (CHANNELS + K - 1) // K
    tap, part = tl.program_id(0) // CHUNKS * SIZE, tl.program_id(2)
    copy = tl.program_id(1).to(tl.int64)
    k, n = tl.program_id(0) % CHUNKS * K + tl.arange(0, K), tl.arange(0, N)
    last = tl.minimum((part + 1) * PER_PART, positions)
    left = tl.zeros([K, N], tl.float32)
    middle = tl.zeros([K, N], tl.float32)
    right = tl.zeros([K, N], tl.float32)
    sums = tl.zeros([N], tl.float32)
    for start in range(part * PER_PART, last, M):
        m = start + tl.arange(0, M)
        here = m < last
        at = (m.to(tl.int64) * copies + copy) * OUT
        real = here[:, None] & (n < OUT)[None, :]
        slope = tl.load(g + (at[:, None] + n[None, :]), mask=real, other=0.0)
        sums += tl.sum(slope, 0)
        under = _under(x, m, here, tap, k, copy, copies,
                       CHANNELS, HEIGHT, WIDTH, SIZE, PADDING, ROWS, COLUMNS)  # fmt: skip
        left = tl.dot(tl.trans(under), slope, left, input_precision=PRECISION)
        under = _under(x, m, here, tap + 1, k, copy, copies,
                       CHANNELS, HEIGHT, WIDTH, SIZE, PADDING, ROWS, COLUMNS)  # fmt: skip
        middle = tl.dot(tl.trans(under), slope, middle, input_precision=PRECISION)
        under = _under(x, m, here, tap + 2, k, copy, copies,
                       CHANNELS, HEIGHT, WIDTH, SIZE, PADDING, ROWS, COLUMNS)  # fmt: skip
        right = tl.dot(tl.trans(under), slope, right, input_precision=PRECISION)
    own = part * copies + copy
    row = (own * SIZE * SIZE + tap) * CHANNELS + k
    at = parts + (row[:, None] * OUT + n[None, :])
    inside = (k < CHANNELS)[:, None] & (n < OUT)[None, :]
    tl.store(at, left, mask=inside)
    tl.store(at + CHANNELS * OUT, middle, mask=inside)
    tl.store(at + 2 * CHANNELS * OUT, right, mask=inside)
    tl.store(bias + own * OUT + n, sums, mask=(n < OUT) & (tl.program_id(0) == 0))


def convolve(x_SBCHW: Tensor, weight_SOCKK: Tensor, bias_SO: Tensor | None, padding: int) -> Tensor:
    """S square convolutions of stride 1, each with weights of its own; the result lies as said."""
    x = to_last(x_SBCHW)
    images, height, width, copies, channels = x.shape
    out, size = weight_SOCKK.shape[1], weight_SOCKK.shape[-1]
    more = 2 * padding - size + 1
    y = x.new_empty(images, height + more, width + more, copies, out)
    positions = y.shape[:3].numel()
    weight = weight_SOCKK.permute(0, 3, 4, 1, 2).contiguous()  # [S, K, K, O, C]
    _convolve[(triton.cdiv(positions, FORWARD["M"]), copies)](
        x, weight, weight if bias_SO is None else bias_SO.contiguous(), y, positions, copies,
        CHANNELS=channels, HEIGHT=height, WIDTH=width, SIZE=size, PADDING=padding, OUT=out,
        BIAS=bias_SO is not None, PRECISION=_precision(), N=_tile(out), K=_depth(channels),
        **FORWARD,
    )  # fmt: skip
    return from_last(y)


def convolve_gradients(
    x_SBCHW: Tensor, g_SBOHW: Tensor, size: int, padding: int
) -> tuple[Tensor, Tensor]:
    """The gradients of weights, which are 3 × 3, and of the bias."""
    assert size == 3
    x, g = to_last(x_SBCHW), to_last(g_SBOHW)
    _, height, width, copies, channels = x.shape
    out, positions = g.shape[-1], g.shape[:3].numel()
    tile, depth = _tile(out), min(_tile(channels), DEEPEST)
    per_part = max(triton.cdiv(positions, PARTS), LEAST)
    parts = triton.cdiv(positions, per_part)
    weight = x.new_empty(parts, copies, size, size, channels, out)
    bias = x.new_empty(parts, copies, out)
    _gradient[(size * triton.cdiv(channels, depth), copies, parts)](
        x, g, weight, bias, positions, copies,
        CHANNELS=channels, HEIGHT=height, WIDTH=width, PADDING=padding, OUT=out,
        PER_PART=per_part, PRECISION=_precision(), N=tile, K=depth,
        num_warps=max(tile // 32, 1), **BACKWARD,
    )  # fmt: skip
    return weight.sum(0).permute(0, 4, 3, 1, 2), bias.sum(0)


def _depth(channels: int) -> int:
    """Channels of a product, whole ones where that is possible."""
    whole = (k for k in (DEEPEST, DEEPEST // 2) if channels % k == 0)
    return next(whole, min(_tile(channels), DEEPEST))
