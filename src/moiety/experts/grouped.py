"""The grouped product: each run of rows times the matrix of its own expert.

`torch.nn.functional.grouped_mm` does it in one kernel where it can. It takes no float64, only
widths that are multiples of 16 bytes, no expanded gradient, no forward-mode AD, and compiles only
in bf16 (torch 2.11 to 2.13). `grouped_mm` here lifts these limits: what the library's kernel
refuses goes through a custom op of ours that multiplies expert by expert. In float32 on a GPU the
library does so itself, and waits for the host; there the op takes kernels of ours (kernels.py).
(Forward-mode AD is the `dense` backend's: torch.compile refuses a function that brings its own.)

Rows past `ends_E[-1]` come back uninitialised: nothing may read them.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

KERNELS = bool(importlib.util.find_spec("triton"))  # it comes with torch for GPUs
# Of both widths: where TF32 is on, torch is faster from here on, though it waits for the host
# (results/grouped.json).
WIDE_PRODUCT, WIDE_SUMS = 1024, 512


def grouped_mm(a_NI: Tensor, w_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """`[N, O]`: row n times the transposed matrix of the expert whose run it is in."""
    return _Product.apply(a_NI, w_EOI, ends_E)


def grouped_outer(g_NO: Tensor, a_NI: Tensor, ends_E: Tensor) -> Tensor:
    """`[E, O, I]`: for each expert the sum over its rows of g_n a_nᵀ."""
    return _Outer.apply(g_NO, a_NI, ends_E)


def native(dtype: torch.dtype, device: torch.device, *widths: int) -> str | None:
    """Why the library's kernel cannot be used, or None where it can."""
    if not hasattr(F, "grouped_mm"):
        return "this torch has no grouped_mm"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"grouped_mm takes no {_name(dtype)}"
    if torch.compiler.is_compiling() and dtype != torch.bfloat16:
        return f"grouped_mm does not compile in {_name(dtype)}"
    wide = 16 // dtype.itemsize
    if any(width % wide for width in widths):
        return f"grouped_mm needs widths that are multiples of {wide} in {_name(dtype)}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "grouped_mm needs compute capability 8.0"
    return None


def _by_library(a: Tensor, b: Tensor, wide: int) -> bool:
    """Whether the library's kernel multiplies these rows with their other factor."""
    return native(a.dtype, a.device, a.shape[1], *b.shape[1:]) is None and not _own(a, b, wide)


def _own(a: Tensor, b: Tensor, wide: int) -> bool:
    """Whether our kernels do: in float32 on a GPU, where the library's wait for the host."""
    if not (KERNELS and a.is_cuda and a.dtype == torch.float32):
        return False
    slower = torch.backends.cuda.matmul.fp32_precision == "tf32"
    slower = slower and min(a.shape[1], b.shape[1]) >= wide
    return not slower or torch.cuda.is_current_stream_capturing()


def _dense_rows(t: Tensor) -> Tensor:
    """grouped_mm refuses a gradient that was expanded (the gradient of a sum, for example)."""
    return t.contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Product(torch.autograd.Function):
    """y_n = W_e a_n for row n of expert e. Its gradient is made of itself and `_Outer`."""

    @staticmethod
    def forward(a_NI: Tensor, w_EOI: Tensor, ends_E: Tensor) -> Tensor:
        if a_NI.shape[0] == 0:
            return a_NI.new_zeros(0, w_EOI.shape[1])
        if _by_library(a_NI, w_EOI, WIDE_PRODUCT):
            return F.grouped_mm(_dense_rows(a_NI), w_EOI.transpose(1, 2), offs=ends_E)
        return product_by_expert(a_NI, w_EOI, ends_E)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g_NO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a_NI, w_EOI, ends_E = ctx.saved_tensors
        need_a, need_w, _ = ctx.needs_input_grad
        da = _Product.apply(g_NO, w_EOI.transpose(1, 2), ends_E) if need_a else None
        dw = _Outer.apply(g_NO, a_NI, ends_E) if need_w else None
        return da, dw, None


class _Outer(torch.autograd.Function):
    """G_e = Σ g_n a_nᵀ over the rows n of expert e."""

    @staticmethod
    def forward(g_NO: Tensor, a_NI: Tensor, ends_E: Tensor) -> Tensor:
        if a_NI.shape[0] == 0:
            return a_NI.new_zeros(ends_E.shape[0], g_NO.shape[1], a_NI.shape[1])
        if _by_library(a_NI, g_NO, WIDE_SUMS):
            return F.grouped_mm(_dense_rows(g_NO).t(), _dense_rows(a_NI), offs=ends_E)
        return outer_by_expert(g_NO, a_NI, ends_E)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, d_EOI: Tensor) -> tuple[Tensor, Tensor, None]:
        g_NO, a_NI, ends_E = ctx.saved_tensors
        dg = _Product.apply(a_NI, d_EOI.contiguous(), ends_E)
        da = _Product.apply(g_NO, d_EOI.transpose(1, 2), ends_E)
        return dg, da, None


@torch.library.custom_op("moiety::product_by_expert", mutates_args=())
def product_by_expert(a_NI: Tensor, w_EOI: Tensor, ends_E: Tensor) -> Tensor:
    if _own(a_NI, w_EOI, WIDE_PRODUCT):
        from . import kernels

        return kernels.product(a_NI, w_EOI, ends_E)
    if _by_library(
        a_NI, w_EOI, WIDE_PRODUCT
    ):  # compiled code comes here in fp32, where eager can do it
        return F.grouped_mm(_dense_rows(a_NI), w_EOI.transpose(1, 2), offs=ends_E)
    out = a_NI.new_empty(a_NI.shape[0], w_EOI.shape[1])
    start = 0
    for w_OI, end in zip(w_EOI, ends_E.tolist(), strict=True):
        torch.mm(a_NI[start:end], w_OI.t(), out=out[start:end])
        start = end
    return out


@product_by_expert.register_fake
def _(a_NI: Tensor, w_EOI: Tensor, ends_E: Tensor) -> Tensor:
    return a_NI.new_empty(a_NI.shape[0], w_EOI.shape[1])


@torch.library.custom_op("moiety::outer_by_expert", mutates_args=())
def outer_by_expert(g_NO: Tensor, a_NI: Tensor, ends_E: Tensor) -> Tensor:
    if _own(a_NI, g_NO, WIDE_SUMS):
        from . import kernels

        return kernels.outer(g_NO, a_NI, ends_E)
    if _by_library(a_NI, g_NO, WIDE_SUMS):
        return F.grouped_mm(_dense_rows(g_NO).t(), _dense_rows(a_NI), offs=ends_E)
    out = a_NI.new_empty(ends_E.shape[0], g_NO.shape[1], a_NI.shape[1])
    start = 0
    for out_OI, end in zip(out, ends_E.tolist(), strict=True):
        torch.mm(g_NO[start:end].t(), a_NI[start:end], out=out_OI)
        start = end
    return out


@outer_by_expert.register_fake
def _(g_NO: Tensor, a_NI: Tensor, ends_E: Tensor) -> Tensor:
    return a_NI.new_empty(ends_E.shape[0], g_NO.shape[1], a_NI.shape[1])
