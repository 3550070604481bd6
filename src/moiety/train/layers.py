"""Layers that vmap batches badly, done for all copies at once on a GPU.

Inside a vmapped function a convolution with weights of its own for each copy becomes a grouped
one, which is slow. `Layers` runs it, and max pooling, by kernels of our own where they apply
(float32 on a GPU with triton; square convolutions of stride 1; pooling without overlap), and
leaves all else to vmap.
"""

from __future__ import annotations

import copy
import importlib.util
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

LARGEST = 2**24  # elements of one copy's input: the kernels count places in 32 bits
HAVE_TRITON = importlib.util.find_spec("triton") is not None


class Layers(TorchFunctionMode):
    """Inside a vmapped function, run convolutions and pooling of all copies at once."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.conv2d, torch.conv2d) and _is_plain_convolution(*args, **kwargs):
            return self.convolve(*args, **kwargs)
        if func in (F.max_pool2d, torch.max_pool2d) and _is_plain_pooling(*args, **kwargs):
            return self.pool(*args, **kwargs)
        return func(*args, **kwargs)

    def convolve(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        return _Convolve.apply(input, weight, bias, _one(padding), self.last(weight))

    def last(self, weight: Tensor) -> bool:
        """Whether the channels of all copies shall lie side by side afterwards."""
        return False

    def pool(self, input: Tensor, kernel_size: Any, *_: Any, **__: Any) -> Tensor:
        return _Pool.apply(input, _one(kernel_size))


def pool_first(model: nn.Module) -> nn.Module:
    """A copy in which max pooling comes before the ReLU it followed, on a quarter of the numbers.

    Values and gradients are the same to the bit: ReLU keeps the order, and has no slope at 0.
    """
    model = copy.deepcopy(model)
    for part in model.modules():
        if type(part) is nn.Sequential:
            for i in range(len(part) - 1):
                if type(part[i]) is nn.ReLU and type(part[i + 1]) is nn.MaxPool2d:
                    part[i], part[i + 1] = part[i + 1], part[i]
    return model


def _is_plain_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> bool:
    out, channels, height, width = weight.shape
    edge = _one(padding)
    plain = _one(stride) == 1 and _one(dilation) == 1 and groups == 1 and height == width
    fits = input.dim() == 4 and isinstance(edge, int) and edge < height
    # Backwards, the channels are those of the result.
    return plain and fits and out <= 128 and channels <= 256 and _runs_here(input)


def _is_plain_pooling(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> bool:
    size = _one(kernel_size)
    apart = stride is None or stride == [] or _one(stride) == size
    plain = _one(padding) == 0 and _one(dilation) == 1 and not (ceil_mode or return_indices)
    return isinstance(size, int) and size <= 15 and apart and plain and _runs_here(input)


def _runs_here(x: Tensor) -> bool:
    return _is_here(x) and x.dtype == torch.float32 and x.numel() < LARGEST


def _is_here(x: Tensor) -> bool:
    return HAVE_TRITON and x.is_cuda


def _one(value: Any) -> Any:
    """A number given once or for both axes; None if the axes differ, and words as they are."""
    if isinstance(value, (tuple, list)):
        same = len({_one(v) for v in value}) == 1
        return _one(value[0]) if same else None
    return value


class Vmapped(torch.autograd.Function):
    """What vmap sees; the plain operation in its rule is what runs."""

    @staticmethod
    def forward(*_: Any) -> Tensor:
        raise NotImplementedError("the layers of many copies exist under vmap only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        raise NotImplementedError("the layers of many copies exist under vmap only")


class _Convolve(Vmapped):
    """What vmap sees; `_StackedConvolve` is what runs."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, last: bool) -> Tensor:
        return F.conv2d(x, weight, bias, padding=padding)

    @staticmethod
    def vmap(
        info: Any,
        dims: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        padding: int,
        last: bool,
    ) -> tuple[Tensor, int]:
        many = [_stacked(t, d, info.batch_size) for t, d in zip((x, weight, bias), dims)]
        return _StackedConvolve.apply(*many, padding, last), 0


class _Pool(Vmapped):
    @staticmethod
    def forward(x: Tensor, size: int) -> Tensor:
        return F.max_pool2d(x, size)

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, size: int) -> tuple[Tensor, int]:
        return _StackedPool.apply(_stacked(x, dims[0], info.batch_size), size), 0


class _StackedConvolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SBCHW: Tensor,
        weight_SOCKK: Tensor,
        bias_SO: Tensor | None,
        padding: int,
        last: bool,
    ) -> Tensor:
        from . import channels_last, kernels

        ctx.save_for_backward(x_SBCHW, weight_SOCKK)
        ctx.padding, ctx.kernels = padding, channels_last if last else kernels
        return ctx.kernels.convolve(x_SBCHW, weight_SOCKK, bias_SO, padding)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        size, gx, gw, gb = weight.shape[-1], None, None, None
        if ctx.needs_input_grad[0]:
            # Each pixel is reached back through the weights turned round.
            turned = weight.flip(-2, -1).transpose(1, 2)
            gx = ctx.kernels.convolve(g, turned, None, size - 1 - ctx.padding)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            gw, gb = ctx.kernels.convolve_gradients(x, g, size, ctx.padding)
        return gx, gw, gb if ctx.needs_input_grad[2] else None, None, None


class _StackedPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        from . import kernels

        ctx.last = is_last(x)
        flat = _flat(x, ctx.last)
        y, choice = kernels.pool(flat, size)
        ctx.save_for_backward(choice)
        ctx.size, ctx.flat, ctx.shape = size, flat.shape, x.shape
        return _unflat(y, x.shape, ctx.last)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        from . import kernels

        gx = kernels.unpool(_flat(g, ctx.last), ctx.saved_tensors[0], ctx.size, ctx.flat)
        return _unflat(gx, ctx.shape, ctx.last), None


# -- where stacked images lie ----------------------------------------------------------------------


def is_last(x: Tensor) -> bool:
    """Whether stacked images lie as `to_last` has them."""
    return x.dim() == 5 and x.permute(1, 3, 4, 0, 2).is_contiguous()


def to_last(x_SBCHW: Tensor) -> Tensor:
    """The same as `[B, H, W, S, C]`, the channels of all copies side by side; a copy if need be."""
    return x_SBCHW.permute(1, 3, 4, 0, 2).contiguous()


def from_last(x_BHWSC: Tensor) -> Tensor:
    """Back from it, without a copy."""
    return x_BHWSC.permute(3, 0, 4, 1, 2)


def _flat(x: Tensor, last: bool) -> Tensor:
    """Images `[N, H, W, I]`, of I numbers a pixel, as pooling has them."""
    return to_last(x).flatten(3) if last else x.contiguous().flatten(0, -3)[..., None]


def _unflat(x_NHWI: Tensor, like: torch.Size, last: bool) -> Tensor:
    if last:
        return from_last(x_NHWI.unflatten(3, (like[0], like[2])))
    return x_NHWI.view(*like[:-2], *x_NHWI.shape[1:3])


@overload
def _stacked(t: Tensor, dim: int | None, copies: int) -> Tensor: ...
@overload
def _stacked(t: Tensor | None, dim: int | None, copies: int) -> Tensor | None: ...
def _stacked(t: Tensor | None, dim: int | None, copies: int) -> Tensor | None:
    """A tensor with the copies in front, whether or not vmap batched it."""
    if t is None:
        return None
    return t.movedim(dim, 0) if dim is not None else t.expand(copies, *t.shape)
