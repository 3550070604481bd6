"""Batch norm of all copies at once.

vmap makes one batch norm of those of S copies, but scales and shifts its result afterwards, and
takes the gradients of scale and shift apart: passes over all activations, which is what a small
network costs on a GPU. Here they are part of the one batch norm: its channels are those of all
copies.

Convolutions of many channels leave their results so that this takes no copy (`channels_last`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from . import layers
from .layers import _stacked

FEWEST = 3  # channels of an input, from which on channels side by side are better


class Norms(layers.Layers):
    """`Layers`, and inside a vmapped function batch norm of all copies at once, on any device.

    On a GPU convolutions of many channels leave them side by side. What is then not a view any more
    is a copy: a model that writes into a convolution's result by way of a view writes into that.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self.norm(*args, **kwargs)
        if func in (Tensor.view, Tensor.view_as) and layers._is_here(args[0]):
            return self.view(func, *args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def last(self, weight: Tensor) -> bool:
        out, channels, size = weight.shape[:3]
        return size == 3 and channels >= FEWEST and out % 4 == 0  # of whole vectors

    def view(self, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As asked, or a copy where only usual images would have such a view."""
        try:
            return func(input, *args, **kwargs)
        except RuntimeError:
            shape = args[0].shape if func is Tensor.view_as else kwargs.get("size", args)
            return input.reshape(*shape)

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


class _Norm(layers.Vmapped):
    """What vmap sees; plain batch norm is what runs."""

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
