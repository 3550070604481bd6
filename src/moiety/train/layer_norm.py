"""Layer norm of S copies at once, each with a scale and a shift of its own: Triton kernels.

vmap normalises all copies as one, but scales, shifts and takes the gradients of scale and shift in
passes of their own over all activations. Here a program has some rows of a copy in registers: one
pass forwards, one backwards. The gradients of scale and shift are summed part by part in fixed
order, so that they are the same in every run.

    y_STD = layer_norm(x_STD, scale_SD, shift_SD, eps, torch.float32)
    y_STD, half_STD = layer_norm(…, half=torch.bfloat16)        # in both, by one pass
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, PER_PART = 8, 8  # of a tile; tiles of a part
WARPS = 4


@triton.jit
def _forward(
    x, scale, shift, y, half, mean, spread, rows, eps,
    D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    copy = tl.program_id(1).to(tl.int64)
    row, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    there, real = row < rows, d < D
    inside = there[:, None] & real[None, :]
    at = (copy * rows + row)[:, None] * D + d[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    middle = tl.sum(value, 1) / D
    value = tl.where(inside, value - middle[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / D + eps)
    times = tl.load(scale + copy * D + d, mask=real, other=0.0).to(tl.float32)
    plus = tl.load(shift + copy * D + d, mask=real, other=0.0).to(tl.float32)
    made = value * inverse[:, None] * times[None, :] + plus[None, :]
    tl.store(y + at, made, mask=inside)
    if HALF:
        tl.store(half + at, made, mask=inside)
    tl.store(mean + copy * rows + row, middle, mask=there)
    tl.store(spread + copy * rows + row, inverse, mask=there)


@triton.jit
def _backward(
    x, g, of_half, scale, mean, spread, to_x, to_scale, to_shift, rows,
    D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, PER_PART: tl.constexpr,
    FULL: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    part, copy = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, WIDE)
    real = d < D
    times = tl.load(scale + copy * D + d, mask=real, other=0.0).to(tl.float32)
    of_scale, of_shift = tl.zeros([WIDE], tl.float32), tl.zeros([WIDE], tl.float32)
    for tile in range(PER_PART):
        row = (part * PER_PART + tile) * ROWS + tl.arange(0, ROWS)
        there = row < rows
        inside = there[:, None] & real[None, :]
        at = (copy * rows + row)[:, None] * D + d[None, :]
        middle = tl.load(mean + copy * rows + row, mask=there, other=0.0)
        inverse = tl.load(spread + copy * rows + row, mask=there, other=0.0)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        normal = tl.where(inside, (value - middle[:, None]) * inverse[:, None], 0.0)
        slope = tl.zeros([ROWS, WIDE], tl.float32)
        if FULL:
            slope += tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        if HALF:
            slope += tl.load(of_half + at, mask=inside, other=0.0).to(tl.float32)
        of_scale += tl.sum(slope * normal, 0)
        of_shift += tl.sum(slope, 0)
        slope *= times[None, :]
        along = tl.sum(slope * normal, 1) / D
        made = (slope - tl.sum(slope, 1)[:, None] / D - normal * along[:, None]) * inverse[:, None]
        tl.store(to_x + at, made, mask=inside)
    place = (part * tl.num_programs(1) + copy) * D + d
    tl.store(to_scale + place, of_scale, mask=real)
    tl.store(to_shift + place, of_shift, mask=real)


def layer_norm(
    x_STD: Tensor, scale_SD: Tensor, shift_SD: Tensor, eps: float, dtype: Any, half: Any = None
) -> Any:
    """Every row normalised, in float32 inside; T may be several axes.

    half    another dtype to return it in, too
    """
    return _LayerNorm.apply(x_STD, scale_SD, shift_SD, eps, dtype, half)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        eps: float,
        dtype: torch.dtype,
        half: torch.dtype | None,
    ) -> Any:
        x, scale, shift = x.contiguous(), scale.contiguous(), shift.contiguous()
        copies, width = scale.shape
        rows = x.numel() // (copies * width)
        y = torch.empty_like(x, dtype=dtype)
        halved = y if half is None else torch.empty_like(x, dtype=half)
        mean, spread = x.new_empty(2, copies, rows, dtype=torch.float32)
        sizes = {"D": width, "WIDE": triton.next_power_of_2(width), "ROWS": ROWS}
        places = x, scale, shift, y, halved, mean, spread, rows, eps
        words = {**sizes, "HALF": half is not None, "num_warps": WARPS}
        _forward[triton.cdiv(rows, ROWS), copies](*places, **words)
        ctx.save_for_backward(x, scale, mean, spread)
        ctx.sizes, ctx.rows = sizes, rows
        ctx.set_materialize_grads(False)  # often one of the two is not read
        return y if half is None else (y, halved)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, of_half: Tensor | None = None) -> Any:
        x, scale, mean, spread = ctx.saved_tensors
        each = [None if slope is None else slope.contiguous() for slope in (g, of_half)]
        given = next((slope for slope in each if slope is not None), None)
        if given is None:
            return None, None, None, None, None, None
        to_x, (copies, width) = torch.empty_like(x), scale.shape
        parts = triton.cdiv(ctx.rows, ROWS * PER_PART)
        sums = x.new_empty(2, parts, copies, width, dtype=torch.float32)
        slopes = [given if slope is None else slope for slope in each]
        places = x, *slopes, scale, mean, spread, to_x, sums[0], sums[1], ctx.rows
        words = {"FULL": g is not None, "HALF": of_half is not None, "PER_PART": PER_PART}
        _backward[parts, copies](*places, **ctx.sizes, **words, num_warps=WARPS)
        to_scale, to_shift = sums.sum(1).to(scale.dtype)
        return to_x, to_scale, to_shift, None, None, None
