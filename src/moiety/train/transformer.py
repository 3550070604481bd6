"""Layers of transformers that vmap batches badly, done for all copies at once.

def one(weights, x):                     # of one copy; vmapped over stacked weights
    with Stacked():
        return functional_call(model, weights, x)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from .layers import HAVE_TRITON, Vmapped, _stacked

TILE = 128  # tokens, of flash attention's backward pass
WIDEST = 4096  # numbers that a layer norm is over, so that they fit into registers
# What may stand between queries, keys and values: it changes no number.
VIEWS = (Tensor.view, Tensor.reshape, Tensor.transpose, Tensor.permute, Tensor.shape.__get__)  # type: ignore[attr-defined]


class Stacked(TorchFunctionMode):
    """Inside a vmapped function: the layers of a transformer, of all copies as one.

    vmap has its own ways for them. The one for linear layers adds the bias in a kernel of its own,
    and in float32 even where products are in bfloat16; those for dropout and, on a GPU, for layer
    norm take several passes where one will do; a convolution is done copy by copy.

    halves    of weights by their id, as products want them; others are cast when they are met
    """

    def __init__(self, halves: Mapping[int, Tensor] | None = None) -> None:
        super().__init__()
        self.halves = halves or {}
        # By the last linear layer or norm: what the next one may read, whether with gradients, and
        # its cast.
        self.read: tuple[Tensor, bool, Tensor] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        own = {
            F.linear: self.linear,
            F.conv2d: self.convolve,
            F.scaled_dot_product_attention: self.attend,
            F.dropout: self.drop,
            F.layer_norm: self.norm,
        }
        if func is not F.linear and func not in VIEWS:
            self.read = None  # it may be something else now
        return own.get(func, func)(*args, **(kwargs or {}))

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.dim() != 2 or not _is_stacked(input, weight, bias):
            return F.linear(input, weight, bias)
        read = self.cast(input)
        known = self.halves if read.dtype == torch.bfloat16 else {}  # a router stays in float32
        return _Linear.apply(read, weight, bias, *(known.get(id(part)) for part in (weight, bias)))

    def convolve(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, *words: Any, **more: Any
    ) -> Tensor:
        """One over patches that do not overlap is a linear layer of each patch."""
        if not _is_patching(input, weight, *words, **more):
            return F.conv2d(input, weight, bias, *words, **more)
        height, width = weight.shape[2:]
        parts = input.unflatten(3, (-1, width)).unflatten(2, (-1, height))
        patches = parts.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return self.linear(patches, weight.flatten(1), bias).permute(0, 3, 1, 2)

    def wanted(self, input: Tensor) -> torch.dtype | None:
        """The dtype of products, where it may be another one."""
        if not torch.is_autocast_enabled(input.device.type) or input.dtype == torch.float64:
            return None
        return torch.get_autocast_dtype(input.device.type)

    def cast(self, input: Tensor) -> Tensor:
        """As products want it, once where several layers read the same: queries, keys, values."""
        dtype = self.wanted(input)
        if dtype is None:
            return input
        known = self.read is not None and self.read[0] is input
        if self.read is None or not known or self.read[1] != torch.is_grad_enabled():
            half = input.to(dtype)
            self.read = input, torch.is_grad_enabled(), half
        return self.read[2]

    def drop(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if inplace or not training or not p or not _is_stacked(input):
            return F.dropout(input, p, training, inplace)
        return _Drop.apply(input, p)

    def norm(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        plain = weight is None or bias is None or len(normalized_shape) > 1
        if plain or not _runs_here(input) or not _is_stacked(input, weight, bias):
            return F.layer_norm(input, normalized_shape, weight, bias, eps)
        dtype = self.wanted(input)
        if dtype is None:
            return _Norm.apply(input, weight, bias, eps, input.dtype, None)
        made, half = _Norm.apply(input, weight, bias, eps, torch.float32, dtype)
        self.read = made, torch.is_grad_enabled(), half  # for the linear layer that comes next
        return made

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        parts = query, key, value, attn_mask
        if not _is_stacked(*parts):
            return F.scaled_dot_product_attention(*parts, dropout_p, is_causal, **more)
        return _Attend.apply(*parts, dropout_p, is_causal, more)


def _is_stacked(*parts: Tensor | None) -> bool:
    """Whether copies differ in any of them: vmap asks no rule where all share all."""
    return any(part is not None and torch._C._functorch.is_batchedtensor(part) for part in parts)


def _is_patching(
    input: Tensor,
    weight: Tensor,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> bool:
    """Whether a convolution cuts images into patches of its own size."""
    size = tuple(weight.shape[2:])
    same = tuple(stride) == size if isinstance(stride, Sequence) else (stride, stride) == size
    fits = input.dim() == 4 and not any(n % part for n, part in zip(input.shape[2:], size))
    plain = padding in (0, (0, 0)) and dilation in (1, (1, 1)) and groups == 1
    return same and fits and plain and _is_stacked(input, weight)


def _runs_here(x: Tensor) -> bool:
    """Whether there are kernels for it."""
    wide = x.shape[-1] > WIDEST or x.dtype not in (torch.float32, torch.bfloat16, torch.float16)
    return x.is_cuda and HAVE_TRITON and not wide


class _Linear(Vmapped):
    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, *weights: Tensor | None) -> tuple[Tensor, int]:
        x = _stacked(x, dims[0], info.batch_size)
        weights = tuple(
            None if part is None else _stacked(part, dim, info.batch_size)
            for part, dim in zip(weights, dims[1:])
        )
        y = _Products.apply(x.reshape(len(x), -1, x.shape[-1]), *weights)
        return y.view(*x.shape[:-1], y.shape[-1]), 0


class _Products(Function):
    """x_STD times the turned w_SFD, plus b_SF, in the precision of x.

    torch's own gradient of the weights would lie turned in memory, and be copied and cast.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        half_w: Tensor | None = None,
        half_b: Tensor | None = None,
    ) -> Tensor:
        ctx.dtypes = w.dtype, None if b is None else b.dtype
        w = w.to(x.dtype) if half_w is None else half_w
        ctx.save_for_backward(x, w)
        if b is None:
            return torch.bmm(x, w.transpose(1, 2))
        b = b.to(x.dtype) if half_b is None else half_b
        return torch.baddbmm(b[:, None], x, w.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        of_weight, of_bias = ctx.dtypes
        to_x = torch.bmm(g, w) if ctx.needs_input_grad[0] else None
        to_w = _product(g.transpose(1, 2), x, of_weight) if ctx.needs_input_grad[1] else None
        to_b = g.sum(1, dtype=of_bias) if ctx.needs_input_grad[2] else None
        return to_x, to_w, to_b, None, None


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A batched product in a dtype of its own; a GPU writes float32 as it has summed it."""
    if a.is_cuda and a.dtype == torch.bfloat16 and dtype == torch.float32:
        return torch.bmm(a, b, dtype)
    return torch.bmm(a, b).to(dtype)


class _Attend(Vmapped):
    @staticmethod
    def vmap(
        info: Any,
        dims: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        causal: bool,
        more: Mapping[str, Any],
    ) -> tuple[Tensor, int]:
        size = info.batch_size
        q, k, v = (_stacked(t, d, size).flatten(0, 1) for t, d in zip((query, key, value), dims))
        if mask is not None and (dims[3] is not None or len(mask) > 1):
            mask = _stacked(mask, dims[3], size).flatten(0, 1)
        with sdpa_kernel(attention_kernels(q.shape[2]), set_priority=True):
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, **more)
        return y.unflatten(0, (size, -1)), 0


def attention_kernels(length: int, device: str = "cuda", half: bool = True) -> list[SDPBackend]:
    """The kernels of attention that keep heads inside tokens, the fastest for a length first.

    cuDNN's are fast, too, but what they return must be copied into that order, forwards and
    backwards. Flash attention's tiles are mostly empty for few tokens, and for more than one tile
    it adds up gradients in no fixed order. On a CPU in bfloat16 it takes twice to four times as
    long as plain products do for so few tokens, nearly all of it backwards.
    """
    if device == "cpu" and half and length <= TILE:
        return [SDPBackend.MATH]
    flash = TILE // 4 < length <= TILE and torch.backends.cuda.flash_sdp_enabled()
    efficient = torch.backends.cuda.mem_efficient_sdp_enabled()
    wanted = {SDPBackend.FLASH_ATTENTION: flash, SDPBackend.EFFICIENT_ATTENTION: efficient}
    return [*(backend for backend, is_wanted in wanted.items() if is_wanted), SDPBackend.MATH]


class _Drop(Vmapped):
    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, p: float) -> tuple[Tensor, int]:
        return torch.native_dropout(_stacked(x, dims[0], info.batch_size), p, True)[0], 0


class _Norm(Vmapped):
    @staticmethod
    def vmap(
        info: Any,
        dims: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        dtype: torch.dtype,
        half: torch.dtype | None,
    ) -> Any:
        from .layer_norm import layer_norm

        x, weight, bias = (_stacked(t, d, info.batch_size) for t, d in zip((x, weight, bias), dims))
        made = layer_norm(x, weight, bias, eps, dtype, half)
        return made, 0 if half is None else (0, 0)
