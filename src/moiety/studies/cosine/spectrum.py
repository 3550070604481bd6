"""Which directions data show: eigenvalues of the Gauss–Newton matrix of a mixture."""

from __future__ import annotations

import torch
from torch import Tensor

from .regression import Atoms, Convention, Expert, Gate, jacobian


def gauss_newton(
    atoms: Atoms, x: Tensor, gate: Gate, expert: Expert, convention: Convention = "reference"
) -> Tensor:
    """Eigenvalues, smallest first, of the Gauss–Newton matrix; 0 is a direction that no data show.

    free        all b1 and all b0 but the last
    reference   those of `flat`
    direction   the same without the lengths of gate vectors, for gates that do not see them
    """
    _, slopes = jacobian(atoms, x, gate, expert)
    size = slopes.shape[-2] // atoms.k
    last = slopes.shape[-2] - size  # where the last atom begins
    bias = last + atoms.dim
    if convention == "free":
        slopes = torch.cat([slopes[..., :bias, :], slopes[..., bias + 1 :, :]], -2)
    else:
        slopes = torch.cat([slopes[..., :last, :], slopes[..., bias + 1 :, :]], -2)
    if convention == "direction":
        slopes = across(atoms, slopes.shape[-2]) @ slopes
    # Singular values keep small ones that squares would lose among rounding.
    return torch.linalg.svdvals(slopes / slopes.shape[-1] ** 0.5).square().flip(-1)


def across(atoms: Atoms, size: int) -> Tensor:
    """`[..., P − k + 1, P]`: rows that span all changes of theta but those along a gate vector."""
    along = atoms.b1.new_zeros(*atoms.b0.shape[:-1], atoms.k - 1, size)
    row = atoms.table().shape[-1]
    for i in range(atoms.k - 1):
        along[..., i, i * row : i * row + atoms.dim] = atoms.b1[..., i, :]
    return torch.linalg.svd(along, full_matrices=True).Vh[..., atoms.k - 1 :, :]
