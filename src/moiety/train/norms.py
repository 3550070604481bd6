"""Batch norm of all copies at once.

vmap makes one batch norm of those of S copies, but scales and shifts its result afterwards, and
takes the gradients of scale and shift apart: passes over all activations, which is what a small
network costs on a GPU. Here they are part of the one batch norm: its channels are those of all
copies.

Convolutions of many channels leave their results so that this takes no copy (`channels_last`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from .layers import Layers, _Convolve, _one, _stacked

FEWEST = 3  # channels of an input, from which on channels side by side are better


class Norms(Layers):
    """`Layers`, and inside a vmapped function batch norm of all copies at once, on any device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is F.batch_norm:
            return self.norm(*args, **(kwargs or {}))
        if func is Tensor.view and not (kwargs or isinstance(args[1], torch.dtype)):
            func = Tensor.reshape  # what is a view of usual images may not be one of these
        return super().__torch_function__(func, types, args, kwargs)

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
        out, channels, size = weight.shape[:3]
        last = size == 3 and channels >= FEWEST and out % 4 == 0  # of whole vectors
        return _Convolve.apply(input, weight, bias, _one(padding), last)

    def norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """`F.batch_norm`; with statistics, scale and shift, as modules usually have them, ours."""
        parts = input, running_mean, running_var, weight, bias
        if any(part is None for part in parts):
            return F.batch_norm(*parts, training, momentum, eps)
        return _Norm.apply(*parts, training, momentum, eps)


class _Norm(Function):
    """What vmap sees; plain batch norm is what runs."""

    @staticmethod
    def forward(*_: Any) -> Tensor:
        raise NotImplementedError("the layers of many copies exist under vmap only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        raise NotImplementedError("the layers of many copies exist under vmap only")

    @staticmethod
    def vmap(
        info: Any,
        dims: Any,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        weight: Tensor,
        bias: Tensor,
        training: bool,
        momentum: float,
        eps: float,
    ) -> tuple[Tensor, int]:
        copies, places = info.batch_size, iter(dims)
        x = _many(x, next(places), copies)
        # Views, since the statistics are updated in place.
        mean, var = (_many(t, next(places), copies).view(-1) for t in (mean, var))
        weight, bias = (_many(t, next(places), copies).flatten() for t in (weight, bias))
        wide = x.transpose(0, 1).flatten(1, 2)  # [B, S C, …]
        y = F.batch_norm(wide, mean, var, weight, bias, training, momentum, eps)
        return y.unflatten(1, (copies, -1)), 1


def _many(t: Tensor, dim: int | None, copies: int) -> Tensor:
    many = _stacked(t, dim, copies)
    assert many is not None
    return many
