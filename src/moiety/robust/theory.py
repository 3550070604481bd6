"""When experts have a smaller Lipschitz constant than one dense model: the theory of paper 1.

Puigcerver et al. 2022 (arXiv 2210.10253), sections 3 and 4: linear experts, each fitted by least
squares to its own part of the data, against one linear model of all of it. The Lipschitz constant
of x -> <w, x> is ||w||.

    found = theorem1([(x1, y1), (x2, y2)])       # rows of each part and their values
    found.dense, found.experts                   # ||w*|| and ||w_i*||
    found.bound                                  # at most found.dense: Theorem 1

Signs and definitions are those under which the statements are true; our copy of the paper prints
some of them wrong. Work in float64: a pseudo-inverse cuts at the rounding of its type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Parts = Sequence[tuple[Tensor, Tensor]]  # of each expert: rows [n, D] and their values [n]


# -- a smooth mixture of experts -------------------------------------------------------------------


def mix(scores_TE: Tensor, answers_TE: Tensor, temperature: float = 1.0) -> Tensor:
    """`[T]`: experts mixed by softmax(scores / temperature) (2); at 0 the best one answers (1).

    Of equally good ones the first answers, where the paper draws one.
    """
    if temperature < 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if temperature == 0:
        return answers_TE.gather(1, scores_TE.argmax(1, keepdim=True)).squeeze(1)
    return ((scores_TE / temperature).softmax(1) * answers_TE).sum(1)


def router_term(p_TE: Tensor, answers_TE: Tensor, rows_ED: Tensor) -> Tensor:
    """`[T]`: ||sum_i p_i f_i (s_i - sbar)||, what the router adds in Lemma 1 (7).

    p = softmax(S x), answers f_i(x), rows s_i of S; sbar = sum_j p_j s_j.
    """
    centred_TED = rows_ED - (p_TE @ rows_ED)[:, None]
    return torch.einsum("te,te,ted->td", p_TE, answers_TE, centred_TED).norm(dim=1)


def two_experts_term(p_T: Tensor, answers_T2: Tensor, rows_2D: Tensor) -> Tensor:
    """`[T]`: the same for two experts, p (1 - p) |f_1 - f_2| ||s_1 - s_2||; p of the first.

    So the router only hurts where two experts weigh alike and disagree.
    """
    apart = (answers_T2[:, 0] - answers_T2[:, 1]).abs()
    return p_T * (1 - p_T) * apart * (rows_2D[0] - rows_2D[1]).norm()


# -- linear experts with fixed routing -------------------------------------------------------------


@dataclass(frozen=True)
class Theorem1:
    """Both sides of Theorem 1 for one data set."""

    dense: float  # ||w*||, of the model of all the data
    experts: list[float]  # ||w_i*||
    eps_1: float  # Definition 1: how far the subspaces are from their parts
    eps_2: float  # Definition 2: how much of one part another's expert sees
    bound: float  # at most `dense`

    @property
    def gain(self) -> float:
        """How many times the constant of the dense model is that of the worst expert."""
        return self.dense / max(self.experts)


def least_squares(x: Tensor, y: Tensor) -> Tensor:
    """`[D]`: the smallest w among those with the least ||x w - y|| (8)."""
    return torch.linalg.pinv(x) @ y


def join(parts: Parts) -> tuple[Tensor, Tensor]:
    """All rows of all parts, and their values."""
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def theorem1(parts: Parts) -> Theorem1:
    """||w*||² >= sum_i [||w_i*|| - eps_1 ||X'y|| - eps_2 sum_{j != i} ||X_j' y_j||]_+²."""
    x, y = join(parts)
    eps_1, eps_2 = _eps_1(parts), _eps_2(parts)
    pulls = [float((x_i.T @ y_i).norm()) for x_i, y_i in parts]
    experts = [float(least_squares(x_i, y_i).norm()) for x_i, y_i in parts]
    lost = eps_1 * float((x.T @ y).norm())
    left = [w - lost - eps_2 * (sum(pulls) - own) for w, own in zip(experts, pulls)]
    return Theorem1(
        dense=float(least_squares(x, y).norm()),
        experts=experts,
        eps_1=eps_1,
        eps_2=eps_2,
        bound=math.hypot(*(max(value, 0.0) for value in left)),
    )


def subspaces(parts: Parts) -> list[Tensor]:
    """`[D, r_i]` for each part: the eigenvectors of X'X that lie in its span more than in others'.

    Where parts share an eigenvalue its eigenvectors are not unique: then a part's own directions
    may be given mixed, eps_1 is larger than it need be, and Theorem 1 holds all the same.
    """
    x, _ = join(parts)
    vectors = _row_basis(x)  # right singular vectors of X are eigenvectors of X'X
    inside = torch.stack([(_row_basis(x_i).T @ vectors).norm(dim=0) for x_i, _ in parts])
    owner = inside.argmax(0)
    return [vectors[:, owner == i] for i in range(len(parts))]


def _eps_1(parts: Parts) -> float:
    """max_i ||U_i U_i' (X'X)^+ - (X_i'X_i)^+||, spectral norms."""
    whole = _inverse_gram(join(parts)[0])
    pairs = zip(subspaces(parts), parts)
    return max(_norm(u @ u.T @ whole - _inverse_gram(x_i)) for u, (x_i, _) in pairs)


def _eps_2(parts: Parts) -> float:
    """The least eps with ||(X_i'X_i)^+ z|| <= eps ||z|| for all z in the span of another part."""
    inverses = [_inverse_gram(x_i) for x_i, _ in parts]
    bases = [_row_basis(x_j) for x_j, _ in parts]
    crossed = [
        _norm(inverse @ basis)
        for i, inverse in enumerate(inverses)
        for j, basis in enumerate(bases)
        if i != j
    ]
    return max(crossed, default=0.0)


def _inverse_gram(x: Tensor) -> Tensor:
    """(x'x)^+, without squaring the condition of x."""
    inverse = torch.linalg.pinv(x)
    return inverse @ inverse.T


def _row_basis(x: Tensor) -> Tensor:
    """`[D, r]`: an orthonormal basis of the span of the rows."""
    _, size, vectors = torch.linalg.svd(x, full_matrices=False)
    least = size.max() * max(x.shape) * torch.finfo(x.dtype).eps  # as `pinv` cuts
    return vectors[size > least].T


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, ord=2))


# -- data to try it on -----------------------------------------------------------------------------


def turned(
    experts: int,
    *,
    rank: int = 2,
    rows: int = 8,
    angle: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Parts in subspaces of dimension `rank`, each turned by `angle` towards one they share.

    0: the subspaces are orthogonal; pi/2: they are all the same one. Values are noise.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    axes = torch.linalg.qr(normal((experts + 1) * rank, (experts + 1) * rank)).Q
    *own, shared = axes.split(rank, dim=1)
    bases = [math.cos(angle) * basis + math.sin(angle) * shared for basis in own]
    return [(normal(rows, rank) @ basis.T, normal(rows)) for basis in bases]


def equal_norms(parts: Parts) -> list[tuple[Tensor, Tensor]]:
    """The same rows with values scaled so that every expert has ||w_i*|| = 1."""
    return [(x, y / least_squares(x, y).norm()) for x, y in parts]
