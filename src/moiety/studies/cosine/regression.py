"""Regression by a mixture of experts: its gates, experts, parameters, and a law of true ones.

    g(x) = Σ_i softmax_i(<c_i, u> + b0_i) h(x, eta_i)
    with c_i = b1_i / (‖b1_i‖ + τ1), u = x / (‖x‖ + τ2); the linear gate has c = b1 and u = x

Digest 5, §2.1. Only differences c_i − c_j and b0_i − b0_j count, so the last atom is the reference:
its b0 is 0, and its b1 is 0, or where length means nothing (τ1 = 0) the first unit vector e1. Axes:
k atoms, d dimensions, n points, p parameters of an expert, any leading axes. Everything is float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Expert = Literal["tanh", "relu", "linear"]  # a tanh(w·x + c), a relu(w·x + c), w·x + c
Convention = Literal["free", "reference", "direction"]
REACH = 3.0  # inputs are uniform on [-3, 3]^d
NOISE = 0.1  # standard deviation


@dataclass(frozen=True)
class Gate:
    """How an atom scores an input: by a cosine, one with perturbed norms, or a plain product."""

    kind: Literal["vanilla", "perturbed", "linear"]
    tau_1: float = 0.0  # added to the norms of gate vectors
    tau_2: float = 0.0  # added to the norms of inputs

    def __post_init__(self) -> None:
        if self.kind not in ("vanilla", "perturbed", "linear"):
            raise ValueError(f'a gate is "vanilla", "perturbed" or "linear", not {self.kind!r}')
        if min(self.tau_1, self.tau_2) < 0:
            raise ValueError(f"tau_1 and tau_2 must not be negative: {self.tau_1}, {self.tau_2}")
        if (self.kind == "perturbed") != (self.tau_1 + self.tau_2 > 0):
            raise ValueError(f"a positive tau_1 or tau_2 is what perturbs; a {self.kind} gate got "
                             f"{self.tau_1} and {self.tau_2}")  # fmt: skip

    @property
    def sees_norms(self) -> bool:
        """Whether the length of a gate vector changes anything; if so the reference is b1 = 0."""
        return self.kind == "linear" or self.tau_1 > 0

    def vectors(self, b1: Tensor) -> Tensor:
        """c, of the shape of b1."""
        return b1 if self.kind == "linear" else shrink(b1, self.tau_1)

    def inputs(self, x: Tensor) -> Tensor:
        """u, of the shape of x."""
        return x if self.kind == "linear" else shrink(x, self.tau_2)

    def back(self, c: Tensor) -> Tensor:
        """b1 whose vectors are c: of length τ1 ‖c‖ / (1 − ‖c‖), infinite from ‖c‖ = 1 on.

        Where length means nothing, the unit vector of that direction.
        """
        if self.kind == "linear":
            return c
        if not self.sees_norms:
            return shrink(c, 0.0)
        return self.tau_1 * c / (1 - c.norm(dim=-1, keepdim=True)).clamp(min=0)

    def reference(self, like: Tensor) -> Tensor:
        """b1 `[..., d]` of the last atom, for gate vectors `[..., d]`."""
        last = torch.zeros_like(like)
        if not self.sees_norms:
            last[..., 0] = 1.0
        return last


def shrink(v: Tensor, tau: float) -> Tensor:
    """v / (‖v‖ + τ) along the last axis; 0 at v = 0."""
    norm = v.norm(dim=-1, keepdim=True) + tau
    return v / norm.masked_fill(norm == 0, 1.0)


@dataclass(frozen=True)
class Atoms:
    """Parameters of mixtures: gate vectors, biases, and experts, tanh and ReLU as (a, w, c)."""

    b1: Tensor  # [..., k, d]
    b0: Tensor  # [..., k]
    eta: Tensor  # [..., k, p]

    @property
    def k(self) -> int:
        return self.b1.shape[-2]

    @property
    def dim(self) -> int:
        return self.b1.shape[-1]

    def each(self, change: Callable[[Tensor], Tensor]) -> Atoms:
        """The same change to all three, such as `lambda t: t[0]` or `lambda t: t.cuda()`."""
        return Atoms(change(self.b1), change(self.b0), change(self.eta))

    def table(self) -> Tensor:
        """`[..., k, d + 1 + p]`: a row (b1, b0, eta) for each atom."""
        return torch.cat([self.b1, self.b0[..., None], self.eta], -1)

    @staticmethod
    def of_table(table: Tensor, dim: int) -> Atoms:
        return Atoms(table[..., :dim], table[..., dim], table[..., dim + 1 :])


def width(expert: Expert, dim: int) -> int:
    """How many parameters an expert has."""
    if expert not in get_args(Expert):
        raise ValueError(f"an expert is one of {', '.join(get_args(Expert))}, not {expert!r}")
    return dim + 1 if expert == "linear" else dim + 2


def free_count(k: int, dim: int, expert: Expert) -> int:
    """P, how many parameters are free beside a reference."""
    return (k - 1) * (dim + 1) + k * width(expert, dim)


def flat(atoms: Atoms) -> Tensor:
    """theta `[..., P]`: atom by atom (b1, b0, eta), of the last one eta alone."""
    return _without_reference(atoms.table().flatten(-2), atoms.k, atoms.dim)


def unflat(theta: Tensor, k: int, dim: int, gate: Gate, mode: str = "raw") -> Atoms:
    """Atoms of theta, with the reference of the gate last.

    In the mode "direction", for gates that do not see norms, gate vectors get the norm 1.
    """
    cut = theta.shape[-1] - (theta.shape[-1] + dim + 1) // k + dim + 1  # where the last eta begins
    rest = theta[..., :cut]
    last = torch.cat([gate.reference(theta[..., :dim]), theta.new_zeros(*theta.shape[:-1], 1)], -1)
    table = torch.cat([rest, last, theta[..., cut:]], -1)
    atoms = Atoms.of_table(table.unflatten(-1, (k, -1)), dim)
    if mode == "raw":
        return atoms
    if mode != "direction" or gate.sees_norms:
        raise ValueError(f'unflat takes mode="raw" for a gate that sees norms, not {mode!r}')
    return Atoms(shrink(atoms.b1, 0.0), atoms.b0, atoms.eta)


def _without_reference(full: Tensor, k: int, dim: int) -> Tensor:
    """Drop b1 and b0 of the last atom from the last axis."""
    cut = full.shape[-1] - full.shape[-1] // k
    return torch.cat([full[..., :cut], full[..., cut + dim + 1 :]], -1)


# -- the function and its derivative ---------------------------------------------------------------


def scores(atoms: Atoms, x: Tensor, gate: Gate) -> Tensor:
    """`[..., k, n]`: what the gate takes the softmax of, for x `[..., n, d]`."""
    return gate.vectors(atoms.b1) @ gate.inputs(x).mT + atoms.b0[..., None]


def outputs(eta: Tensor, x: Tensor, expert: Expert) -> Tensor:
    """`[..., k, n]`: h of each expert."""
    if expert == "linear":
        return eta[..., :-1] @ x.mT + eta[..., -1:]
    z = eta[..., 1:-1] @ x.mT + eta[..., -1:]
    return eta[..., :1] * (z.tanh() if expert == "tanh" else z.relu())


def predict(atoms: Atoms, x: Tensor, gate: Gate, expert: Expert) -> Tensor:
    """g `[..., n]` of the points x `[..., n, d]`; leading axes of atoms and x broadcast."""
    return (scores(atoms, x, gate).softmax(-2) * outputs(atoms.eta, x, expert)).sum(-2)


def jacobian(atoms: Atoms, x: Tensor, gate: Gate, expert: Expert) -> tuple[Tensor, Tensor]:
    """g `[..., n]` and its derivatives `[..., k (d + 1 + p), n]`, in the order of `table`."""
    s, h = scores(atoms, x, gate), outputs(atoms.eta, x, expert)
    weight = s.softmax(-2)
    g = (weight * h).sum(-2)
    by_score = weight * (h - g[..., None, :])
    u = gate.inputs(x).mT[..., None, :, :]
    if gate.kind != "linear":  # ds/db1 = (u − (s − b0) b1/‖b1‖) / (‖b1‖ + τ1)
        norm = atoms.b1.norm(dim=-1)[..., None, None]
        cosine = (s - atoms.b0[..., None])[..., None, :]
        u = (u - shrink(atoms.b1, 0.0)[..., None] * cosine) / (norm + gate.tau_1)
    by_b1 = by_score[..., None, :] * u
    by_eta = weight[..., None, :] * _by_eta(atoms.eta, x, expert)
    parts = [by_b1, by_score[..., None, :], by_eta]
    return g, torch.cat(parts, -2).flatten(-3, -2)


def _by_eta(eta: Tensor, x: Tensor, expert: Expert) -> Tensor:
    """dh/deta `[..., k, p, n]`."""
    points = x.mT[..., None, :, :]
    ones = torch.ones_like(points[..., :1, :])
    inner = torch.cat([points, ones], -2)  # dz / d(w, c)
    if expert == "linear":
        return inner.expand(*eta.shape[:-1], -1, -1)
    z = eta[..., 1:-1] @ x.mT + eta[..., -1:]
    f = z.tanh() if expert == "tanh" else z.relu()
    slope = 1 - f.square() if expert == "tanh" else (z > 0).to(z.dtype)
    return torch.cat([f[..., None, :], (eta[..., :1] * slope)[..., None, :] * inner], -2)


def free_jacobian(atoms: Atoms, x: Tensor, gate: Gate, expert: Expert) -> tuple[Tensor, Tensor]:
    """g `[..., n]` and its derivatives `[..., P, n]` by theta."""
    g, full = jacobian(atoms, x, gate, expert)
    return g, _without_reference(full.mT, atoms.k, atoms.dim).mT


# -- true mixtures and data ------------------------------------------------------------------------


@dataclass(frozen=True)
class Law:
    """From where true mixtures are drawn, and how far apart their atoms lie (`law`)."""

    b1: tuple[float, float] = (1.0, 2.0)  # norm; the direction is uniform
    b0: tuple[float, float] = (-0.5, 0.5)
    a: tuple[float, float] = (1.0, 2.0)  # of either sign for ReLU; tanh is odd, so positive
    w: tuple[float, float] = (0.5, 1.5)  # norm; the direction is uniform
    c: tuple[float, float] = (-1.0, 1.0)
    gates_apart: float = 0.5  # least ‖c_i − c_j‖
    experts_apart: float = 0.7  # least root mean square of h_i − h_j over inputs


def law(
    problems: int,
    k: int,
    dim: int,
    gate: Gate,
    expert: Expert,
    generator: torch.Generator,
    words: Law = Law(),  # noqa: B008, it is frozen
) -> tuple[Atoms, int]:
    """Draw true atoms with leading axis `problems`, and count the draws that were rejected."""
    kept: list[Tensor] = []
    rejected = 0
    while len(kept) < problems:
        atoms = _draw(k, dim, gate, expert, generator, words)
        if _separated(atoms, gate, expert, generator, words):
            kept.append(atoms.table())
        elif (rejected := rejected + 1) > 1000 * problems:
            raise ValueError(f"1000 of 1001 draws lie too close together; {words} asks too much")
    return Atoms.of_table(torch.stack(kept), dim), rejected


def _draw(
    k: int, dim: int, gate: Gate, expert: Expert, generator: torch.Generator, words: Law
) -> Atoms:
    def uniform(ends: tuple[float, float]) -> Tensor:
        low, high = ends
        return low + (high - low) * torch.rand(k, 1, generator=generator, dtype=torch.float64)

    def direction() -> Tensor:
        return shrink(torch.randn(k, dim, generator=generator, dtype=torch.float64), 0.0)

    b1, b0 = uniform(words.b1) * direction(), uniform(words.b0).squeeze(-1)
    b1[-1], b0[-1] = gate.reference(b1[-1]), 0.0
    a, w, c = uniform(words.a), uniform(words.w) * direction(), uniform(words.c)
    if expert == "relu":
        a = a * uniform((-1.0, 1.0)).sign()
    return Atoms(b1, b0, torch.cat([w, c] if expert == "linear" else [a, w, c], -1))


def _separated(
    atoms: Atoms, gate: Gate, expert: Expert, generator: torch.Generator, words: Law
) -> bool:
    x = inputs(1000, atoms.dim, generator)
    h = outputs(atoms.eta, x, expert) / math.sqrt(len(x))
    apart = torch.nn.functional.pdist
    far = apart(gate.vectors(atoms.b1)).min() >= words.gates_apart
    return bool(far and apart(h).min() >= words.experts_apart)


def inputs(n: int, dim: int, generator: torch.Generator, *problems: int) -> Tensor:
    """x `[*problems, n, d]`, uniform on [-3, 3]^d."""
    drawn = torch.rand(*problems, n, dim, generator=generator, dtype=torch.float64)
    return REACH * (2 * drawn - 1)


def sample(
    atoms: Atoms,
    n: int,
    gate: Gate,
    expert: Expert,
    generator: torch.Generator,
    noise: float = NOISE,
) -> tuple[Tensor, Tensor]:
    """Draw x `[..., n, d]` and y `[..., n]`, own points for each mixture."""
    x = inputs(n, atoms.dim, generator, *atoms.b0.shape[:-1])
    y = predict(atoms, x, gate, expert)
    return x, y + noise * torch.randn(y.shape, generator=generator, dtype=torch.float64)
