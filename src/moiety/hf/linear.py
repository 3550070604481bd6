"""Linear maps, whichever way round they keep their weight."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, Conv1D)) and module.weight.dim() == 2


def weight_of(linear: nn.Module) -> Tensor:
    """The weight as [out, in]."""
    return linear.weight.t() if isinstance(linear, Conv1D) else linear.weight  # type: ignore


def widths(linear: nn.Module) -> tuple[int, int]:
    """(in, out)."""
    if isinstance(linear, nn.Linear):  # a quantised weight may have another shape
        return linear.in_features, linear.out_features
    inputs, outputs = linear.weight.shape  # type: ignore
    return inputs, outputs
