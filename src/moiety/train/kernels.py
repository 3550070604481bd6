"""Triton kernels for stacked models: convolutions and pooling of S copies in one launch.

cuDNN runs S small convolutions with different weights as one grouped convolution, which it does
several times slower than one after another. Here a program belongs to one copy: a tile of output
positions is the product of that copy's weights with the pixels under them, read where they lie.
A column of ones after the weights' columns carries the bias.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

POSITIONS, IMAGES = 128, 8  # of a tile, and of one part of a gradient
COLUMNS = 64


@triton.jit
def _convolve(
    x, weight, bias, y,
    images, channels, height, width, out, rows, columns, padding,
    KH: tl.constexpr, KW: tl.constexpr, BIAS: tl.constexpr,
    OUT: tl.constexpr, K: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    copy = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)  # a position of an image
    here = m < images * rows * columns
    image, row, column = m // (rows * columns), m // columns % rows - padding, m % columns - padding
    x += copy * images * channels * height * width
    n = tl.arange(0, OUT)
    depth = channels * KH * KW
    total = tl.zeros([OUT, M], tl.float32)
    for start in range(0, depth + BIAS, K):
        k = start + tl.arange(0, K)
        c, i, j = k // (KH * KW), k // KW % KH, k % KW
        r, q = row[None, :] + i[:, None], column[None, :] + j[:, None]
        inside = (k[:, None] < depth) & here & (r >= 0) & (r < height) & (q >= 0) & (q < width)
        at = ((image[None, :] * channels + c[:, None]) * height + r) * width + q
        pixels = tl.load(x + at, mask=inside, other=0.0)
        w = tl.load(
            weight + (copy * out + n[:, None]) * depth + k,
            mask=(n[:, None] < out) & (k < depth), other=0.0,
        )  # fmt: skip
        if BIAS:
            pixels = tl.where(k[:, None] == depth, 1.0, pixels)
            b = tl.load(bias + copy * out + n, mask=n < out, other=0.0)
            w = tl.where(k == depth, b[:, None], w)
        total = tl.dot(w, pixels, total, input_precision=PRECISION)
    area = rows * columns
    at = (copy * images + image[None, :]) * out * area + n[:, None] * area + m % area
    tl.store(y + at, total, mask=(n[:, None] < out) & here)


@triton.jit
def _gradient(
    x, g, parts,
    images, channels, height, width, out, rows, columns, padding, per_part,
    KH: tl.constexpr, KW: tl.constexpr, OUT: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    copy, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    k = tl.program_id(0) * K + tl.arange(0, K)
    depth = channels * KH * KW
    c, i, j = k // (KH * KW), k // KW % KH, k % KW
    n = tl.arange(0, OUT)
    area = rows * columns
    x += copy * images * channels * height * width
    g += copy * images * out * area
    first = part * per_part * area
    last = tl.minimum(first + per_part * area, images * area)
    total = tl.zeros([OUT, K], tl.float32)
    for start in range(first, last, M):
        m = start + tl.arange(0, M)
        here = m < last
        image, row, column = m // area, m // columns % rows - padding, m % columns - padding
        r, q = row[None, :] + i[:, None], column[None, :] + j[:, None]
        inside = (k[:, None] < depth) & here & (r >= 0) & (r < height) & (q >= 0) & (q < width)
        at = ((image[None, :] * channels + c[:, None]) * height + r) * width + q
        pixels = tl.load(x + at, mask=inside, other=0.0)
        pixels = tl.where(k[:, None] == depth, 1.0, pixels)
        at = (image[None, :] * out + n[:, None]) * area + m % area
        slope = tl.load(g + at, mask=(n[:, None] < out) & here, other=0.0)
        total = tl.dot(slope, tl.trans(pixels), total, input_precision=PRECISION)
    at = ((part * tl.num_programs(1) + copy) * out + n[:, None]) * (depth + 1) + k
    tl.store(parts + at, total, mask=(n[:, None] < out) & (k < depth + 1))


@triton.jit
def _pool(x, y, choice, count, height, width, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    rows, columns = height // SIZE, width // SIZE
    plane, row, column = at // (rows * columns), at // columns % rows, at % columns
    corner = x + (plane * height + row * SIZE) * width + column * SIZE
    best = tl.load(corner, mask=here, other=0.0)
    which = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(SIZE):
        for j in tl.static_range(SIZE):
            value = tl.load(corner + i * width + j, mask=here, other=0.0)
            more = (value > best) | (value != value)  # NaN wins, as in torch
            best, which = tl.where(more, value, best), tl.where(more, i * SIZE + j, which)
    tl.store(y + at, best, mask=here)
    tl.store(choice + at, which.to(tl.uint8), mask=here)


@triton.jit
def _unpool(g, choice, gx, count, height, width, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    rows, columns = height // SIZE, width // SIZE
    plane, r, q = at // (height * width), at // width % height, at % width
    pooled = here & (r < rows * SIZE) & (q < columns * SIZE)
    source = (plane * rows + r // SIZE) * columns + q // SIZE
    which = tl.load(choice + source, mask=pooled, other=255).to(tl.int32)
    value = tl.load(g + source, mask=pooled, other=0.0)
    mine = which == r % SIZE * SIZE + q % SIZE
    tl.store(gx + at, tl.where(mine, value, 0.0), mask=here)


def convolve(x_SBCHW: Tensor, weight_SOCKL: Tensor, bias_SO: Tensor | None, padding: int) -> Tensor:
    """S convolutions of stride 1, each with weights of its own."""
    copies, images, channels, height, width = x_SBCHW.shape
    _, out, _, kh, kw = weight_SOCKL.shape
    rows, columns = height + 2 * padding - kh + 1, width + 2 * padding - kw + 1
    y = x_SBCHW.new_empty(copies, images, out, rows, columns)
    grid = (triton.cdiv(images * rows * columns, POSITIONS), copies)
    _convolve[grid](
        x_SBCHW.contiguous(), weight_SOCKL.contiguous(), _contiguous(bias_SO, y), y,
        images, channels, height, width, out, rows, columns, padding,
        KH=kh, KW=kw, BIAS=int(bias_SO is not None), OUT=_tile(out), K=32, M=POSITIONS,
        PRECISION=_precision(),
    )  # fmt: skip
    return y


def convolve_gradients(
    x_SBCHW: Tensor, g_SBOHW: Tensor, kernel: tuple[int, int], padding: int
) -> tuple[Tensor, Tensor]:
    """The gradients of weights and bias; parts of the batch are added in fixed order."""
    copies, images, channels, height, width = x_SBCHW.shape
    out, rows, columns = g_SBOHW.shape[2:]
    depth, parts = channels * kernel[0] * kernel[1], triton.cdiv(images, IMAGES)
    total = x_SBCHW.new_empty(parts, copies, out, depth + 1)
    tile = min(_tile(depth + 1), COLUMNS)
    grid = (triton.cdiv(depth + 1, tile), copies, parts)
    _gradient[grid](
        x_SBCHW.contiguous(), g_SBOHW.contiguous(), total,
        images, channels, height, width, out, rows, columns, padding, IMAGES,
        KH=kernel[0], KW=kernel[1], OUT=_tile(out), K=tile, M=64, PRECISION=_precision(),
    )  # fmt: skip
    weight, bias = total.sum(0).split([depth, 1], -1)
    return weight.reshape(copies, out, channels, *kernel), bias.squeeze(-1)


def pool(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The largest of each `size` × `size` square, and which of them it was."""
    x = x.contiguous()
    height, width = x.shape[-2:]
    y = x.new_empty(*x.shape[:-2], height // size, width // size)
    choice = torch.empty_like(y, dtype=torch.uint8)
    grid = (triton.cdiv(y.numel(), 1024),)
    _pool[grid](x, y, choice, y.numel(), height, width, SIZE=size, BLOCK=1024)
    return y, choice


def unpool(g: Tensor, choice: Tensor, size: int, shape: torch.Size) -> Tensor:
    """The gradient of `pool`."""
    gx = g.new_empty(shape)
    grid = (triton.cdiv(gx.numel(), 1024),)
    _unpool[grid](
        g.contiguous(), choice, gx, gx.numel(), shape[-2], shape[-1], SIZE=size, BLOCK=1024
    )
    return gx


def _tile(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def _contiguous(bias: Tensor | None, other: Tensor) -> Tensor:
    return other if bias is None else bias.contiguous()


def _precision() -> str:
    # As torch would have run the convolution: TF32 unless the user forbids it.
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
