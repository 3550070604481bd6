"""How much the experts of two tasks have in common.

jaccard({0, 1}, {1, 2})                     # 1/3
within, between = jaccard_by_group(selected, groups)
random_jaccard(experts=32, k=4)             # 0.0750: what a random gate reaches on average
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import combinations
from math import comb
from statistics import fmean

import torch
from torch import Tensor


def jaccard(a: Iterable[int], b: Iterable[int]) -> float:
    """|A ∩ B| / |A ∪ B|; of two empty sets 1, since they are the same."""
    a, b = set(a), set(b)
    return len(a & b) / len(a | b) if a | b else 1.0


def jaccard_by_group(
    selected: Sequence[Collection[int]], groups: Sequence[Hashable]
) -> tuple[float | None, float | None]:
    """The mean over pairs of tasks of the same group, and over pairs of different groups.

    None where there is no such pair.
    """
    if len(selected) != len(groups):
        raise ValueError(f"there are {len(selected)} tasks, but the groups of {len(groups)}")
    within: list[float] = []
    between: list[float] = []
    for i, j in combinations(range(len(selected)), 2):
        value = jaccard(selected[i], selected[j])
        (within if groups[i] == groups[j] else between).append(value)
    return (fmean(within) if within else None, fmean(between) if between else None)


def random_jaccard(experts: int, k: int) -> float:
    """The expected Jaccard index of two random choices of k of the experts, exactly."""
    if not 1 <= k <= experts:
        raise ValueError(f"k must lie in 1 … {experts}, got {k!r}")
    total = comb(experts, k)
    shares = (comb(k, s) * comb(experts - k, k - s) / total * s / (2 * k - s) for s in range(k + 1))
    return sum(shares)


def cosine_matrix(gates_GE: Tensor) -> list[list[float]]:
    """The cosine of every pair of gates; 0 with a gate that has no weight at all."""
    unit_GE = torch.nn.functional.normalize(gates_GE.double(), dim=1)
    return (unit_GE @ unit_GE.T).clamp(-1.0, 1.0).tolist()
