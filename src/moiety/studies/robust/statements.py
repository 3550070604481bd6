"""The statements that `robust/theory` checks: each on one data set or mixture, drawn in float64.

check, settings = CHECKS["linear"], {"data": "same rows", "claimed": "zero", "sign": -1}
check(torch.Generator().manual_seed(0), settings)["breach"]         # 0 where it is true
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ...lab.study import Settings
from ...robust.theory import (
    Parts,
    Theorem1,
    equal_norms,
    mix,
    router_term,
    theorem1,
    turned,
    two_experts_term,
)

ROUNDING = 1e-6  # relative: what breaks a statement by less does not break it
DIM, POINTS, AWAY = 6, 50, 0.1  # of a mixture; the lead of the best expert at points off all ties

Facts = dict[str, float]  # of one draw: "breach", relative, 0 where the statement is true, and more
Check = Callable[[Generator, Settings], Facts]


# -- smooth mixtures -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixture:
    """Experts b_i + a_i tanh(<v_i, x>) behind softmax(S x), and points to ask it at."""

    rows_ED: Tensor
    v_ED: Tensor
    a_E: Tensor
    b_E: Tensor
    x_TD: Tensor

    @classmethod
    def draw(cls, g: Generator, experts: int) -> Mixture:
        shapes = (experts, DIM), (experts, DIM), (experts,), (experts,), (POINTS, DIM)
        rows, v, a, b, x = (torch.randn(s, dtype=torch.float64, generator=g) for s in shapes)
        return cls(rows, v, a, 3 * b, x)

    def scores(self, x: Tensor) -> Tensor:
        return x @ self.rows_ED.T

    def answers(self, x: Tensor) -> Tensor:
        return self.b_E + self.a_E * torch.tanh(x @ self.v_ED.T)

    def slope(self, x: Tensor) -> Tensor:
        """`[T]`: the norm of the gradient, by autograd."""
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(mix(self.scores(x), self.answers(x)).sum(), x)
        return gradient.norm(dim=1)

    def router_term(self, x: Tensor) -> Tensor:
        return router_term(self.scores(x).softmax(1), self.answers(x), self.rows_ED)


def lemma_1(g: Generator, settings: Settings) -> Facts:
    """The slope is at most sum_i p_i L_i + the router's term, at every point."""
    mixture = Mixture.draw(g, settings["experts"])
    x = mixture.x_TD
    lipschitz_E = mixture.a_E.abs() * mixture.v_ED.norm(dim=1)
    bound = mixture.scores(x).softmax(1) @ lipschitz_E
    if settings["router"]:
        bound = bound + mixture.router_term(x)
    return {"breach": float((mixture.slope(x) / bound - 1).max().clamp(min=0))}


def two_experts(g: Generator, settings: Settings) -> Facts:
    """The router's term is p (1 - p) |f_1 - f_2| ||s_1 - s_2||: anywhere, at p = 1/2, far out."""
    mixture = Mixture.draw(g, 2)
    x, across = mixture.x_TD, mixture.rows_ED[0] - mixture.rows_ED[1]
    if settings["where"] == "boundary":
        x = x - (x @ across / across.square().sum())[:, None] * across
    if settings["where"] == "far":
        x = 1000 * x
    answers = mixture.answers(x)
    p_T = mixture.scores(x).softmax(1)[:, 0]
    said, found = two_experts_term(p_T, answers, mixture.rows_ED), mixture.router_term(x)
    most = (answers[:, 0] - answers[:, 1]).abs() * across.norm()
    if settings["where"] == "boundary":
        said = most / 4
    return {
        "breach": float(((found - said).abs() / most).max()),
        "router": float((found / most).mean()),
    }


def limit(g: Generator, settings: Settings) -> Facts:
    """Off all ties, softmax(S x / t) comes as near to the sparse mixture as the lead says."""
    mixture, t = Mixture.draw(g, 4), settings["temperature"]
    scores, answers = mixture.scores(mixture.x_TD), mixture.answers(mixture.x_TD)
    best = scores.topk(2).values
    lead = best[:, 0] - best[:, 1]
    apart = answers.amax(1) - answers.amin(1)
    gap = (mix(scores, answers, t) - mix(scores, answers, 0)).abs() / apart
    most = 3 * torch.exp(-lead / t)
    off = lead > AWAY
    return {"breach": float((gap - most).max().clamp(min=0)), "gap": float(gap[off].mean())}


# -- linear experts --------------------------------------------------------------------------------


def linear(g: Generator, settings: Settings) -> Facts:
    """One of the statements on linear experts, on data of its kind."""
    found = theorem1(DATA[settings["data"]](g, settings))
    unit = math.hypot(*found.experts)
    breach = CLAIMED[settings["claimed"]](found) / unit
    return {
        "breach": max(breach, 0.0),
        "gain": found.gain,
        "unit": found.gain / math.sqrt(len(found.experts)),
        "bound": found.bound / found.dense if found.dense > ROUNDING * unit else 0.0,
        "eps 1": found.eps_1,
        "eps 2": found.eps_2,
    }


def planes(g: Generator, settings: Settings) -> Parts:
    """Parts in planes, turned by an angle in degrees towards one that they share."""
    return turned(settings["experts"], rows=16, angle=math.radians(settings["angle"]), generator=g)


def any_angle(g: Generator, settings: Settings) -> Parts:
    """From nearly orthogonal to the same, evenly in the logarithm."""
    angle = math.pi / 2 * 10 ** (-4 * float(torch.rand((), generator=g)))
    return turned(settings["experts"], rows=16, angle=angle, generator=g)


def same_rows(g: Generator, settings: Settings) -> Parts:
    """Two parts with the same rows, and the values times `sign` in the second."""
    ((x, y),) = turned(1, generator=g)
    return [(x, y), (x, settings["sign"] * y)]


DATA: dict[str, Callable[[Generator, Settings], Parts]] = {
    "subspaces": planes,
    "equal norms": lambda g, settings: equal_norms(planes(g, settings)),
    "any angle": any_angle,
    "same rows": same_rows,
}

# By how much a statement is broken, in units of the norms; below zero: it is true.
CLAIMED: dict[str, Callable[[Theorem1], float]] = {
    "pythagoras": lambda f: abs(f.dense - math.hypot(*f.experts)),
    "at most the largest": lambda f: f.dense - max(f.experts),
    "zero": lambda f: f.dense,
    "equal": lambda f: max(abs(f.dense - w) for w in f.experts),
    "theorem 1": lambda f: f.bound - f.dense,
    "corollary": lambda f: math.hypot(*f.experts) - f.dense,
}


CHECKS: dict[str, Check] = {
    "lemma 1": lemma_1,
    "two experts": two_experts,
    "limit": limit,
    "linear": linear,
}
