"""MARS: after each step, every matrix goes back into a ball around its initial weights.

Gouk et al. 2021 (arXiv 2002.08253). The distance of a matrix W from U is its largest row sum

    max_j sum_i |W_ji - U_ji|

and a row that is further away than `radius` is moved towards its row of U until it is not, by
scaling the difference, as the authors' code does.

    ball = Mars(encoder.parameters(), radius=1.0)     # around the weights as they are now
    optimizer.step(); ball.project()

What has one axis (biases, norms) is free. Fresh heads have no weights to stay near: leave them out.
A radius of infinity changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

MOST = 2**22  # numbers that are projected at once


class Mars:
    """The balls of some matrices."""

    def __init__(self, params: Iterable[Tensor], radius: float = 1.0) -> None:
        if not radius > 0:
            raise ValueError(f"radius must be positive, got {radius}")
        matrices = [p for p in params if p.dim() > 1 and p.requires_grad]
        self.radius = radius
        self.initial: dict[Tensor, Tensor] = {p: p.detach().clone() for p in matrices}

    @torch.no_grad()
    def project(self) -> None:
        """Move what is outside its ball to the edge of it."""
        if math.isinf(self.radius):
            return
        for some in alike(self.initial):
            each = [rows(p) for p in some]
            # Many matrices at once: a small model has more of them than a GPU has work in one.
            start, now = torch.cat([rows(self.initial[p]) for p in some]), torch.cat(each)
            moved = now - start
            sums = torch.linalg.vector_norm(moved, 1, dim=1, keepdim=True)
            scaled = torch.addcmul(start, moved, self.radius / sums)
            # Selected, so that a row inside keeps its bits, and one that never moved is not 0 / 0.
            kept = torch.where(sums > self.radius, scaled, now)
            torch._foreach_copy_(each, kept.split([len(part) for part in each]))


def row_sum(difference: Tensor) -> Tensor:
    """max_j sum_i |W_ji - U_ji| of one matrix."""
    return rows(difference).abs().sum(1).max()


def rows(weight: Tensor) -> Tensor:
    """The rows of a weight: one for each output of a linear layer or convolution, for each token
    or place of an embedding, for each output of each expert, and for each number of a vector.
    """
    if weight.dim() < 2:
        return weight.reshape(-1, 1)
    return weight.flatten(1) if weight.dim() > 3 else weight.reshape(-1, weight.shape[-1])


def alike(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Matrices whose rows have one width, dtype and device, some at a time."""
    kinds: dict[Any, list[Tensor]] = {}
    for p in params:
        kinds.setdefault((rows(p).shape[1], p.dtype, p.device), []).append(p)
    for same in kinds.values():
        some: list[Tensor] = []
        for p in same:
            if some and sum(map(Tensor.numel, some)) + p.numel() > MOST:
                yield some
                some = []
            some.append(p)
        yield some
