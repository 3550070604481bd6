"""Random numbers inside a vmapped function: of its own for each copy and step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
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
    """Inside a vmapped function, draw numbers of its own for each copy.

    vmap's own `randomness="different"` takes all numbers from one generator, so that a copy's would
    depend on its neighbours. A random function not named here makes vmap raise.
    """

    def __init__(self, copy: Tensor) -> None:
        super().__init__()
        self.copy = copy  # the number of the copy, vmapped over

    def many(self, kind: str, p: float, shape: tuple[int, ...], like: dict[str, Any]) -> Tensor:
        """`[S, *shape]`: "uniform", "normal", (one with probability p, else zero) "bernoulli", or
        "random": whole numbers from 0 to below p.
        """
        raise NotImplementedError

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout):
            return self.dropout(*args, **kwargs)
        if func in (torch.rand_like, torch.randn_like):
            return self.draw(_KIND[func], args[0].shape, {"dtype": args[0].dtype, **kwargs})
        if func in (torch.rand, torch.randn) and "generator" not in kwargs:
            size = args[0] if args and isinstance(args[0], Sequence) else args
            return self.draw(_KIND[func], kwargs.pop("size", size), kwargs)
        if func is torch.randint and "generator" not in kwargs:
            return self.whole(*args, **kwargs)
        return func(*args, **kwargs)

    def whole(self, *args: Any, size: Sequence[int] | None = None, **kwargs: Any) -> Tensor:
        """`torch.randint`, called with (high, size) or (low, high, size)."""
        bounds = [arg for arg in args if not isinstance(arg, Sequence)]
        low, high = ([0, *bounds] if len(bounds) == 1 else bounds)[:2]
        like = {"dtype": torch.long, **kwargs}
        return low + self.draw("random", args[-1] if size is None else size, like, high - low)

    def dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0:
            return input
        like = {"dtype": input.dtype}
        kept = self.draw("bernoulli", input.shape, like, 1 - p) / max(1 - p, 1e-30)
        return input.mul_(kept) if inplace else input * kept

    def draw(self, kind: str, shape: Sequence[int], like: dict[str, Any], p: float = 0.0) -> Tensor:
        like = {**like, "device": self.copy.device}
        return _Draw.apply(self.copy, self.many, kind, p, tuple(shape), like)


_KIND = {
    torch.rand: "uniform",
    torch.rand_like: "uniform",
    torch.randn: "normal",
    torch.randn_like: "normal",
}


class ByGenerator(Draws):
    """From torch's generator with the `step_seed` of each copy, as the plain loop draws."""

    def __init__(self, seeds: list[int], step: int, copy: Tensor) -> None:
        super().__init__(copy)
        made = (torch.Generator(copy.device).manual_seed(step_seed(s, step)) for s in seeds)
        self.generators, self.made = made, list[torch.Generator]()

    def many(self, kind: str, p: float, shape: tuple[int, ...], like: dict[str, Any]) -> Tensor:
        self.made = self.made or list(self.generators)  # made only where something is drawn
        empty = [torch.empty(shape, **like) for _ in self.made]
        args = {"bernoulli": (p,), "random": (0, p)}.get(kind, ())
        fill = [getattr(t, f"{kind}_") for t in empty]
        return torch.stack([f(*args, generator=g) for f, g in zip(fill, self.made)])


class ByCounter(Draws):
    """On a GPU, by counting: the seed of the copy is the key of a Philox generator, and the step,
    the number of the draw in it and the place of a number are its counter.

    The step is read on the device, so that a captured step draws anew whenever it is replayed.
    """

    def __init__(self, seed_S: Tensor, step: Tensor, copy: Tensor) -> None:
        super().__init__(copy)
        self.seed_S, self.step, self.draws = seed_S, step, 0

    def many(self, kind: str, p: float, shape: tuple[int, ...], like: dict[str, Any]) -> Tensor:
        from . import kernels

        self.draws += 1
        name = "uniform" if kind == "random" else kind
        drawn = kernels.draw(self.seed_S, self.step, self.draws, name, float(p), shape)
        if kind == "random":  # rounding may bring the largest to p itself
            drawn = (drawn * p).floor().clamp(max=p - 1)
        return drawn.to(like.get("dtype") or torch.get_default_dtype())


class _Draw(torch.autograd.Function):
    """Draw for all copies at once; `copy` is there to be vmapped over."""

    @staticmethod
    def forward(copy: Tensor, *_: Any) -> Tensor:
        raise NotImplementedError("random numbers per copy exist under vmap only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, copy: Tensor, many: Callable[..., Tensor], *what: Any
    ) -> tuple[Tensor, int]:
        return many(*what), 0
