"""Random numbers inside a vmapped function: a generator of its own for each copy and step."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def step_seed(seed: int, step: int) -> int:
    """The seed of the random numbers that a copy draws in a step, counted from 1."""
    # 32 bits, all mixed: torch's generator on the CPU looks at the lowest 32 only.
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}".encode()).digest()[:4], "big")


class Draws(TorchFunctionMode):
    """Inside a vmapped function, draw from a generator for each copy and step.

    vmap's own `randomness="different"` takes all numbers from one generator, so that a copy's would
    depend on its neighbours. A random function not named here makes vmap raise.
    """

    def __init__(self, seeds: list[int], step: int, copy: Tensor) -> None:
        super().__init__()
        self.seeds, self.step, self.copy = seeds, step, copy

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout):
            return self.dropout(*args, **kwargs)
        if func in (torch.rand_like, torch.randn_like):
            return self.draw(_FILL[func], args[0].shape, {"dtype": args[0].dtype, **kwargs})
        if func in (torch.rand, torch.randn) and "generator" not in kwargs:
            size = args[0] if args and isinstance(args[0], Sequence) else args
            return self.draw(_FILL[func], kwargs.pop("size", size), kwargs)
        return func(*args, **kwargs)

    def dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0:
            return input
        like = {"dtype": input.dtype}
        kept = self.draw(("bernoulli_", 1 - p), input.shape, like) / max(1 - p, 1e-30)
        return input.mul_(kept) if inplace else input * kept

    def draw(self, fill: tuple, shape: Sequence[int], like: dict[str, Any]) -> Tensor:
        like = {**like, "device": self.copy.device}
        return _Draw.apply(self.copy, self.generators, fill, tuple(shape), like)

    @functools.cached_property
    def generators(self) -> list[torch.Generator]:  # made only where something is drawn
        where = self.copy.device
        return [torch.Generator(where).manual_seed(step_seed(s, self.step)) for s in self.seeds]


_FILL = {
    torch.rand: ("uniform_",),
    torch.rand_like: ("uniform_",),
    torch.randn: ("normal_",),
    torch.randn_like: ("normal_",),
}


class _Draw(torch.autograd.Function):
    """Fill one tensor per copy; `copy` is there to be vmapped over."""

    @staticmethod
    def forward(copy: Tensor, *_: Any) -> Tensor:
        raise NotImplementedError("random numbers per copy exist under vmap only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        copy: Tensor,
        generators: list,
        fill: tuple,
        shape: tuple,
        like: Any,
    ) -> tuple[Tensor, int]:
        name, *args = fill
        empty = [torch.empty(shape, **like) for _ in generators]
        drawn = [getattr(t, name)(*args, generator=g) for t, g in zip(empty, generators)]
        return torch.stack(drawn), 0
