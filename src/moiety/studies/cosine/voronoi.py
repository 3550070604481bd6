"""How far fitted atoms lie from the true ones: Voronoi cells, errors told apart, the two losses.

    cells = settle(fitted, truth, gate, expert)      # which fitted atoms stand for which true one
    found = errors(cells, truth, gate, expert)       # {"expert, single": [...], ...}

Digest 5, §2.3. Softmax sees only differences of gate vectors c and of biases, so both are compared
from the true reference on: the cell of the reference gets its mean c (by mass) and its mass. With
one fitted atom in that cell this is c_i − c_ref. The mean, and not one atom of two, because two
atoms that share a true one are each off by some n^(-1/4), and would carry that into all others.
A cell is nearest in (c, eta), up to the symmetry of the expert: the length of b1 means nothing to
the vanilla gate, so it must not decide which atom is near. Leading axes are those of the fits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .regression import Atoms, Expert, Gate, shrink

KINDS = ("single", "shared")  # cells of one fitted atom, and of several
PARTS = ("gate raw", "gate direction", "bias", "expert")


@dataclass(frozen=True)
class Cells:
    """Fitted atoms as seen from the true ones."""

    owner: Tensor  # [..., k] the true atom that each stands for
    mass: Tensor  # [..., k] exp(b0), where the cell of the reference has mass 1
    c: Tensor  # [..., k, d] gate vectors, from the true reference on
    b1: Tensor  # [..., k, d] those mapped back, no longer than the limit
    eta: Tensor  # [..., k, p] of the sign nearest to the owner's, or of the canonical scale
    moved: Tensor  # [...] whether the fit's reference stands for another atom than the true one
    count: Tensor  # [..., k*] fitted atoms in each cell

    @property
    def empty(self) -> Tensor:
        """`[...]`: whether some true atom has no fitted one."""
        return (self.count == 0).any(-1)


def settle(fitted: Atoms, truth: Atoms, gate: Gate, expert: Expert, limit: float = 1e3) -> Cells:
    """Find the labelling under which the fitted atoms lie nearest to the true ones.

    limit: the longest b1. A c of norm 1 or more, which differences can have, belongs to none.
    """
    c, goal = gate.vectors(fitted.b1), gate.vectors(truth.b1)
    apart, signs = compare_experts(fitted.eta, truth.eta, expert)
    share = fitted.b0.softmax(-1)
    seen = c[..., None, :, :] - c[..., :, None, :] + goal[..., None, -1:, :]  # one row a reference
    apart, share = apart[..., None, :, :], share[..., None, :]
    for _ in range(2):  # by one atom first, which tells the cell whose mean is then taken
        distance = square(seen[..., :, None, :] - goal[..., None, None, :, :]) + apart
        owner = distance.argmin(-1)
        seen = seen - _mean_of_reference(seen, share, owner, goal)
    distance = square(seen[..., :, None, :] - goal[..., None, None, :, :]) + apart
    # Both ways: a labelling that leaves a true atom alone is no good one, however near the rest.
    cost = (share * distance.amin(-1)).sum(-1) + distance.amin(-2).mean(-1)
    best = cost.argmin(-1)
    seen, owner = _pick(seen, best), _pick(distance, best).argmin(-1)
    return _cells(fitted, truth, gate, expert, limit, seen, owner, signs)


def _mean_of_reference(seen: Tensor, share: Tensor, owner: Tensor, goal: Tensor) -> Tensor:
    """By how much the mean c of the reference's cell is off; 0 where the cell is empty."""
    weight = share * (owner == goal.shape[-2] - 1)
    total = weight.sum(-1, keepdim=True)
    mean = (weight[..., None] * (seen - goal[..., None, -1:, :])).sum(-2)
    return (mean / total.masked_fill(total == 0, 1.0))[..., None, :]


def _pick(each: Tensor, best: Tensor) -> Tensor:
    """The row `best` `[...]` of `[..., k, *, *]`, one for each fit."""
    return each.take_along_dim(best[..., None, None, None], dim=-3).squeeze(-3)


def _cells(
    fitted: Atoms,
    truth: Atoms,
    gate: Gate,
    expert: Expert,
    limit: float,
    seen: Tensor,
    owner: Tensor,
    signs: Tensor,
) -> Cells:
    last = truth.k - 1
    count = torch.nn.functional.one_hot(owner, truth.k).sum(-2)
    at_home = torch.where(owner == last, fitted.b0, -torch.inf).logsumexp(-1, keepdim=True)
    at_home = torch.where(at_home.isfinite(), at_home, torch.zeros_like(at_home))
    sign = signs.take_along_dim(owner[..., None], -1)
    eta = canonical(fitted.eta, expert)
    return Cells(
        owner=owner,
        mass=(fitted.b0 - at_home).exp(),
        c=seen,
        b1=back(seen, fitted.b1, gate, limit),
        eta=eta * sign if expert == "tanh" else eta,
        moved=owner[..., -1] != last,
        count=count,
    )


def back(c: Tensor, fitted: Tensor, gate: Gate, limit: float) -> Tensor:
    """b1 of gate vectors, at most `limit` long; lengths that mean nothing are those of the fit."""
    if gate.kind == "linear":
        return c
    if not gate.sees_norms:
        return shrink(c, 0.0) * fitted.norm(dim=-1, keepdim=True)
    most = limit / (limit + gate.tau_1)
    norm = c.norm(dim=-1, keepdim=True)
    return gate.back(torch.where(norm > most, c * (most / norm.clamp(min=most)), c))


def relabel(fitted: Atoms, cells: Cells, gate: Gate, limit: float) -> Atoms:
    """The fitted atoms with the heaviest one of the true reference's cell as their reference.

    Where the gate cannot say this, the nearest that it can: a start to polish from.
    """
    home = cells.owner == cells.count.shape[-1] - 1
    first = torch.where(home, cells.mass, -torch.ones_like(cells.mass)).argmax(-1, keepdim=True)
    place = torch.arange(fitted.k, device=first.device).expand(cells.owner.shape)
    order = place.scatter(-1, first, fitted.k).argsort(-1)
    b1, b0, eta = (_at(t, order) for t in (fitted.b1, fitted.b0[..., None], fitted.eta))
    c = gate.vectors(b1)
    reference = gate.reference(b1[..., -1, :])
    b1 = back(c - c[..., -1:, :] + gate.vectors(reference)[..., None, :], b1, gate, limit)
    b1[..., -1, :] = reference
    return Atoms(b1, (b0 - b0[..., -1:, :]).squeeze(-1), eta)


def canonical(eta: Tensor, expert: Expert) -> Tensor:
    """ReLU experts with (w, c) of length 1 and the scale in a; others as they are."""
    if expert != "relu":
        return eta
    scale = eta[..., 1:].norm(dim=-1, keepdim=True)
    return torch.cat([eta[..., :1] * scale, eta[..., 1:] / scale.clamp(min=1e-300)], -1)


def compare_experts(fitted: Tensor, truth: Tensor, expert: Expert) -> tuple[Tensor, Tensor]:
    """Squared distances `[..., k, k*]` up to symmetry, and the sign that gives each."""
    mine, goal = (canonical(eta, expert) for eta in (fitted, truth))
    mine, goal = mine[..., :, None, :], goal[..., None, :, :]
    same = square(mine - goal)
    if expert != "tanh":  # w·x + c and a relu(w·x + c) have no sign to spare
        return same, torch.ones_like(same)
    turned = square(mine + goal)
    return torch.minimum(same, turned), torch.where(same <= turned, 1.0, -1.0).to(same.dtype)


def square(v: Tensor) -> Tensor:
    return v.square().sum(-1)


# -- errors and losses -----------------------------------------------------------------------------


def errors(cells: Cells, truth: Atoms, gate: Gate, expert: Expert) -> dict[str, Tensor]:
    """Errors `[...]` named "part, kind of cell"; NaN where there is no such cell, or one is empty.

    In a cell the root of the mean square by mass, over cells the root mean square. b1 and b0 of a
    reference that one atom stands for are right by definition and left out; so are directions of
    the reference, whose b1 may be 0. The bias is that of the whole cell.
    """
    goal = gate.vectors(truth.b1)
    raw = _over_cells(cells, square(cells.b1 - _at(truth.b1, cells.owner)))
    turn = square(shrink(cells.c, 0.0) - shrink(_at(goal, cells.owner), 0.0))
    home = torch.zeros_like(cells.count, dtype=torch.bool)
    home[..., -1] = True
    bias = (_mass(cells).log() - truth.b0).square()
    eta = _over_cells(cells, square(cells.eta - _at(canonical(truth.eta, expert), cells.owner)))
    single, shared = cells.count == 1, cells.count > 1
    values = {
        "gate raw": (raw, home & single),
        "gate direction": (_over_cells(cells, turn), home),
        "bias": (bias, home),
        "expert": (eta, torch.zeros_like(home)),
    }
    return {
        f"{part}, {kind}": _root_mean(value, mine & ~left_out & ~cells.empty[..., None])
        for part, (value, left_out) in values.items()
        for kind, mine in zip(KINDS, (single, shared), strict=True)
    }


def loss_1(cells: Cells, truth: Atoms, expert: Expert, r: float = 1.0) -> Tensor:
    """L_{1,r} `[...]`, the loss of the vanilla gate: one power for all cells."""
    gate_part, expert_part = _apart(cells, truth, expert)
    parts = cells.mass * (gate_part.pow(r) + expert_part.pow(r))
    return (_mass(cells) - truth.b0.exp()).abs().sum(-1) + parts.sum(-1)


def loss_2(cells: Cells, truth: Atoms, expert: Expert) -> Tensor:
    """L_2 `[...]`, that of the perturbed gate: power 1 in cells of one atom, 2 in shared ones."""
    gate_part, expert_part = _apart(cells, truth, expert)
    power = 1.0 + (cells.count.take_along_dim(cells.owner, -1) > 1).to(gate_part.dtype)
    parts = cells.mass * (gate_part.pow(power) + expert_part.pow(power))
    return (_mass(cells) - truth.b0.exp()).abs().sum(-1) + parts.sum(-1)


def _apart(cells: Cells, truth: Atoms, expert: Expert) -> tuple[Tensor, Tensor]:
    """Distances `[..., k]` of each fitted atom's b1 and eta from those of its owner."""
    goal = canonical(truth.eta, expert)
    gates = (cells.b1 - _at(truth.b1, cells.owner)).norm(dim=-1)
    return gates, (cells.eta - _at(goal, cells.owner)).norm(dim=-1)


def _at(goal: Tensor, owner: Tensor) -> Tensor:
    """Rows of `[..., k, d]` by number."""
    goal = goal.expand(*owner.shape[:-1], *goal.shape[-2:])
    return goal.take_along_dim(owner[..., None], -2)


def _mass(cells: Cells) -> Tensor:
    """`[..., k*]`: the mass of each cell."""
    return cells.mass.new_zeros(cells.count.shape).scatter_add(-1, cells.owner, cells.mass)


def _over_cells(cells: Cells, value: Tensor) -> Tensor:
    """`[..., k*]`: means by mass of `[..., k]`; 0 in an empty cell."""
    total = _mass(cells)
    summed = torch.zeros_like(total).scatter_add(-1, cells.owner, cells.mass * value)
    return summed / total.masked_fill(total == 0, 1.0)


def _root_mean(value: Tensor, chosen: Tensor) -> Tensor:
    """Over the chosen cells; NaN where there is none."""
    return torch.where(chosen, value, torch.zeros_like(value)).sum(-1).div(chosen.sum(-1)).sqrt()
