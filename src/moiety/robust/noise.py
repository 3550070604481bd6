"""`Noise`: random numbers that belong to an example, not to its batch.

Each number is a hash (splitmix64) of seed, stream, example and coordinate, so that neither the size
of a batch, nor who was dropped from it, nor the device changes what an example gets.

    noise = Noise(seed=0, ids=torch.arange(len(x)))
    noise.stream(restart).uniform(x.shape[1:])      # [B, ...] in [0, 1)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def check_seed(seed: int) -> None:
    """Raise unless it fits in the 64 bits that are hashed."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ValueError(f"seed must be a whole number from 0 to 2^63 - 1, got {seed!r}")


@dataclass(frozen=True, eq=False)
class Noise:
    """Draws for the examples with these ids; a stream for each restart, step or whatever."""

    seed: int
    ids: Tensor  # [B], on the device of the examples

    def stream(self, number: int) -> Noise:
        """Other draws for the same examples."""
        return replace(self, seed=_mixed_int(self.seed, number))

    def __getitem__(self, rows: Tensor | slice) -> Noise:
        return replace(self, ids=self.ids[rows])

    def uniform(self, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
        """`[B, *shape]` in [0, 1)."""
        size = math.prod(shape)
        place = torch.arange(size, device=self.ids.device)
        key = _mix(self.ids.long()[:, None] * _STEP + self.seed)
        bits = _mix(key + (place + 1) * _STEP)
        unit = _shift(bits, 11).double() * 2.0**-53
        return unit.view(-1, *shape).to(dtype)

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
        """`[B, *shape]` of a standard normal (Box and Muller)."""
        radius = (-2 * torch.log1p(-self.stream(1).uniform(shape))).sqrt()
        angle = 2 * math.pi * self.stream(2).uniform(shape)
        return (radius * angle.cos()).to(dtype)


def _shift(z: Tensor, by: int) -> Tensor:
    """Shift right without the sign, which `>>` of int64 would copy."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _FIRST
    z = (z ^ _shift(z, 27)) * _SECOND
    return z ^ _shift(z, 31)


def _mixed_int(seed: int, number: int) -> int:
    return int(_mix(torch.tensor(seed) + torch.tensor(number + 1) * _STEP))  # int64 wraps around
