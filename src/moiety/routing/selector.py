"""The parts of DSelect-k: the smooth-step, the single-expert selector, and its entropy.

Hazimeh et al. 2021, sections 2.3 and 2.5. Axes: M binary digits, C = 2^M codes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def smooth_step(t: Tensor, width: Tensor | float) -> Tensor:
    """S_b(t): 0 up to −b/2, 1 from b/2, between them −(2/b³) t³ + (3/(2b)) t + 1/2.

    Written as v² (3 − 2v) with v = t/b + 1/2, whose value and slope at the ends are exact, and
    which is positive wherever t > −b/2.
    """
    v = (t / width + 0.5).clamp(0.0, 1.0)
    return v * v * (3.0 - 2.0 * v)


def digits(z: Tensor, width: Tensor | float) -> tuple[Tensor, Tensor]:
    """How far each digit is one, and how far zero: S(z) and 1 − S(z) = S(−z), both without loss."""
    return smooth_step(z, width), smooth_step(-z, width)


def selector(one_M: Tensor, zero_M: Tensor) -> Tensor:
    """r `[..., C]`, equation (4): of each code, the product over its digits; lowest digit first.

    Doubled digit by digit, so that the largest tensor is the result itself.
    """
    r_C = one_M.new_ones(*one_M.shape[:-1], 1)
    for one, zero in zip(one_M.unbind(-1), zero_M.unbind(-1)):
        r_C = torch.cat([r_C * zero[..., None], r_C * one[..., None]], -1)
    return r_C


def entropy_terms(p: Tensor) -> Tensor:
    """−p log p with 0 log 0 = 0, and gradient 0 there.

    `torch.special.entr` has an infinite slope at 0, which the dead slope of a plateau turns to NaN.
    """
    return -p * torch.where(p > 0, p, 1.0).log()


def code_order(size: int, seed: int | None) -> Tensor:
    """`[2^size]` codes: the experts' in the order of their ids, then those of nobody."""
    if seed is None:
        return torch.arange(2**size)
    # Drawn on the CPU, so that a seed means the same codes on every device.
    generator = torch.Generator("cpu").manual_seed(seed)
    order = torch.randperm(2**size, generator=generator, device="cpu")
    return order.to(torch.get_default_device())


def is_plateau(z_KM: Tensor, width: Tensor | float) -> Tensor:
    """`[...]` bool: every digit of every selector is exactly 0 or 1."""
    one_KM, zero_KM = digits(z_KM, width)
    return ((one_KM == 0) | (zero_KM == 0)).flatten(-2).all(-1)
