"""Count the cost of a computation: FLOPs and parameters.

FLOPs are those of matrix products and convolutions, two for a multiply-add, as torch counts them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from .modes import at_rest


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> int:
    """FLOPs of a grouped product; rows past the last offset are not computed."""
    if a.dim() == 2 and b.dim() == 3:
        rows = a.shape[0] if offs is None else int(offs[-1])
        return 2 * rows * b.shape[1] * b.shape[2]
    if a.dim() == 2 and b.dim() == 2:  # ragged inner axis: one outer product a row
        rows = a.shape[1] if offs is None else int(offs[-1])
        return 2 * a.shape[0] * rows * b.shape[1]
    return 2 * a.shape[:-1].numel() * a.shape[-1] * b.shape[-1]


def _by_expert(a: Tensor, b: Tensor, ends: Tensor, **_: Any) -> int:
    other = b.shape[1:].numel() if b.dim() == 3 else a.shape[1] * b.shape[1]
    return 2 * int(ends[-1]) * other


def _attention(q: tuple, k: tuple, v: tuple, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """FLOPs of fused attention; a query head meets every key, whoever else shares that key."""
    batch, heads, queries, width = q
    return 2 * batch * heads * queries * k[2] * (width + v[3])


def _attention_backward(
    g: tuple, q: tuple, k: tuple, v: tuple, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    """The scores again, then the gradients of values, weights, queries and keys."""
    batch, heads, queries, width = q
    return 2 * batch * heads * queries * k[2] * (3 * width + 2 * v[3])


# torch 2.11 refuses grouped queries, and no torch counts the fused attention of a CPU.
ATTENTION = [
    f"_scaled_dot_product_{kind}"
    for kind in (
        "efficient_attention",
        "flash_attention",
        "cudnn_attention",
        "flash_attention_for_cpu",
    )
]


for _formula in (_grouped_mm, _by_expert):
    setattr(_formula, "_get_raw", True)  # noqa: B010  # the counter then gives it offsets, too


def flops(run: Callable[[], object]) -> float:
    """FLOPs of everything that `run` does, backward included."""
    formulas: dict[object, Callable[..., int]] = {}
    if torch.ops.aten._grouped_mm not in flop_registry:
        formulas[torch.ops.aten._grouped_mm] = _grouped_mm
    for name in ("product_by_expert", "outer_by_expert"):
        if hasattr(torch.ops.moiety, name):
            formulas[getattr(torch.ops.moiety, name)] = _by_expert
    for op in ATTENTION:
        formulas[getattr(torch.ops.aten, op)] = _attention
        formulas[getattr(torch.ops.aten, f"{op}_backward")] = _attention_backward
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        run()
    return float(counter.get_total_flops())


def forward_flops(run: Callable[[], object], *modules: nn.Module) -> float:
    """FLOPs of a forward pass in eval mode without gradients; the modules' modes are restored."""
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(at_rest(module))
        return flops(run)


def parameters(module: nn.Module, trainable: bool = False) -> int:
    """The number of parameters, or of those that are trained."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trainable)
