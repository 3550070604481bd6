"""Schedules that run on a router's own count of training calls, kept in its buffer `calls`.

The count stays on the device, so that no schedule makes a GPU wait for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Router, recomputing


def step_of(router: Router) -> Tensor:
    """Count this call if it is a training call; return how many came before it.

    The count rises before it is read, so that a forward repeated inside a backward (gradient
    checkpointing), which must not count, sees the number that the first one saw.
    """
    calls: Tensor = router.calls  # type: ignore[assignment]
    if not router.training:
        return calls
    if not recomputing():
        calls.add_(1)
    return calls - 1


def ramp(step: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Rise linearly from 0 at the first call to 1 after `steps` calls."""
    return (step.to(dtype) / steps).clamp(max=1)


def geometric(start: float, end: float, progress: Tensor) -> Tensor:
    """Go from `start` at progress 0 to `end` at 1, evenly on a log scale."""
    return start * (end / start) ** progress


def refuse_unused(router: str, needs: str, **options: object) -> None:
    """Raise on an option that was set and would be ignored."""
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"{router}: {option} = {value!r} has no effect without {needs}")
