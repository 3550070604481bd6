"""Least squares for many mixtures at once: Levenberg–Marquardt from random starts, in a box.

    found = fit(x, y, k=3, gate=gate, expert="tanh", restarts=64, generator=generator)
    found.atoms, found.loss, found.solved

All starts of all problems are descended together, in float64, on at most `search_points` points
each; the best few of every problem are then polished on all of its points. The truth never comes
in, unless as `start`, which is a diagnostic and to be labelled as one. Axes: B problems, S descents
(starts of problems), n points, P free parameters (`regression.flat`).
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .regression import (
    Atoms,
    Expert,
    Gate,
    flat,
    free_count,
    free_jacobian,
    unflat,
    width,
)

LARGEST_STEP = 4.0  # of any parameter: further out the quadratic model says nothing
EXACT = 1e-24  # of the mean square of y: what rounding leaves of a noiseless fit
AGREE = 1e-6  # of the loss: two restarts ended in the same place
KERNEL = bool(importlib.util.find_spec("triton"))  # it comes with torch for GPUs
REST = 4  # steps on a GPU from one look at which descents have ended to the next: each look waits


@dataclass(frozen=True)
class Box:
    """The compact set of the estimator: each coordinate lies within ± these.

    Over-specified fits run away without it. The law of true mixtures lies well inside.
    """

    b1: float = 10.0
    b0: float = 6.0
    a: float = 6.0
    w: float = 6.0
    c: float = 6.0

    def ends(self, k: int, dim: int, expert: Expert) -> Tensor:
        """`[P]`, the largest value of each free parameter."""
        eta = [] if expert == "linear" else [self.a]
        row = torch.tensor([self.b1] * dim + [self.b0, *eta] + [self.w] * dim + [self.c])
        return flat(Atoms.of_table(row.double().expand(k, -1), dim))


@dataclass(frozen=True)
class Fit:
    """What was found for each problem; every field has the leading axis B."""

    atoms: Atoms
    theta: Tensor  # [B, P], the same as a vector
    loss: Tensor  # mean squared residual
    touched: Tensor  # bool: a parameter lies on the box
    projected_gradient: Tensor  # largest entry, those that push out of the box left out
    gap: Tensor  # in loss, to the second best of the polished; infinite where there is one
    optimisation_error: Tensor  # what the second half of the polishing took off the loss
    solved: Tensor  # bool: the residual is that of the noise, and two restarts agree on it


@dataclass(frozen=True)
class Problem:
    """Points and values of B problems, and the form of the mixture to be fitted."""

    x: Tensor  # [B, n, d]
    y: Tensor  # [B, n]
    k: int
    gate: Gate
    expert: Expert
    ends: Tensor  # [P]

    def first(self, n: int) -> Problem:
        """The same with the first n points alone."""
        parts = self.k, self.gate, self.expert, self.ends
        return Problem(self.x[:, :n], self.y[:, :n], *parts)

    def normal(self, theta: Tensor, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss `[S]`, half its gradient `[S, P]` and Gauss–Newton matrix `[S, P, P]`.

        `which` `[S]` numbers the problem of each row. In pieces, so that derivatives fit in memory
        (a GPU) or in the cache (a CPU).
        """
        quick = self.x.is_cuda and KERNEL
        room = 2**27 if quick else 2**25 if self.x.is_cuda else 2**19
        points = min(self.x.shape[1], room // len(self.ends))
        rows = max(1, room // (len(self.ends) * points))
        found = [
            self._quick_piece(theta[i : i + rows], which[i : i + rows])
            if quick
            else self._piece(theta[i : i + rows], which[i : i + rows], points)
            for i in range(0, len(theta), rows)
        ]
        if len(found) == 1:
            return found[0]
        loss, gradient, matrix = (torch.cat(parts) for parts in zip(*found))
        return loss, gradient, matrix

    def _quick_piece(self, theta: Tensor, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All three by one product: the residual is one more row beside the derivatives."""
        from .kernel import rows  # Triton, which a CPU need not have

        found = rows(theta, which, *self.columns, self.gate, self.expert, self.k)
        square = (found @ found.mT).sum(1) / self.x.shape[1]
        return square[:, -1, -1], square[:, :-1, -1], square[:, :-1, :-1]

    @functools.cached_property
    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x and u `[B, d, n]`, y, and tau_1, as the kernel reads them."""
        x, u = self.x.mT.contiguous(), self.gate.inputs(self.x).mT.contiguous()
        return x, u, self.y.contiguous(), self.y.new_tensor(self.gate.tau_1)

    def _piece(self, theta: Tensor, which: Tensor, points: int) -> tuple[Tensor, Tensor, Tensor]:
        n, dim = self.x.shape[1:]
        atoms = unflat(theta, self.k, dim, self.gate)
        loss: Tensor | float = 0.0
        gradient: Tensor | float = 0.0
        matrix: Tensor | float = 0.0
        for i in range(0, n, points):
            x, y = self.x[:, i : i + points][which], self.y[:, i : i + points][which]
            g, slopes = free_jacobian(atoms, x, self.gate, self.expert)
            loss = loss + (g - y).square().sum(-1) / n
            gradient = gradient + (slopes @ (g - y)[..., None]).squeeze(-1) / n
            matrix = matrix + slopes @ slopes.mT / n
        return loss, gradient, matrix  # type: ignore[return-value]


def fit(
    x: Tensor,
    y: Tensor,
    k: int,
    gate: Gate,
    expert: Expert,
    *,
    generator: torch.Generator,
    restarts: int = 16,
    box: Box = Box(),  # noqa: B008, it is frozen
    iterations: int = 200,
    search_points: int = 2000,
    polish: int = 2,
    noise: float = 0.0,
    start: Tensor | None = None,
) -> Fit:
    """Fit k atoms to x `[B, n, d]` and y `[B, n]`, by `iterations` of search and twice of polish.

    noise   its standard deviation, by which alone `solved` is judged
    start   `[B, r, P]` in place of random starts
    """
    check(x, y, k, expert, start)
    ends = box.ends(k, x.shape[-1], expert).to(x)
    problem = Problem(x, y, k, gate, expert, ends)
    if start is None:
        start = starts(len(x), restarts, k, x.shape[-1], expert, generator).to(x)
    start = start.clamp(-ends, ends)
    if start.shape[1] > polish:
        theta, loss = descend(problem.first(search_points), start, iterations)
        best = loss.topk(polish, largest=False).indices
        start = theta.gather(1, best[..., None].expand(-1, -1, len(ends)))
    once, before = descend(problem, start, iterations)
    theta, loss = descend(problem, once, iterations)
    return judge(problem, theta, loss, before, noise)


def check(x: Tensor, y: Tensor, k: int, expert: Expert, start: Tensor | None) -> None:
    """Refuse data that do not fit together."""
    if x.ndim != 3 or y.shape != x.shape[:2] or x.dtype != torch.float64 or y.dtype != x.dtype:
        raise ValueError(
            f"give x as float64 [B, n, d] and y as float64 [B, n], not {x.dtype} {tuple(x.shape)} "
            f"and {y.dtype} {tuple(y.shape)}"
        )
    size = free_count(k, x.shape[-1], expert)
    if start is not None and (start.ndim != 3 or start.shape[::2] != (len(x), size)):
        raise ValueError(f"give start as [{len(x)}, r, {size}], not {tuple(start.shape)}")


def starts(
    problems: int, restarts: int, k: int, dim: int, expert: Expert, generator: torch.Generator
) -> Tensor:
    """Random theta `[B, R, P]`: gate vectors and w normal, a normal around 1, b0, c uniform."""
    table = torch.randn(
        problems, restarts, k, dim + 1 + width(expert, dim), generator=generator
    ).double()
    even = 2 * torch.rand(problems, restarts, k, 2, generator=generator).double() - 1
    table[..., :dim] *= 1.5 * dim**-0.5
    table[..., dim] = even[..., 0]
    if expert != "linear":
        table[..., dim + 1] += 1
    table[..., -1 - dim : -1] *= dim**-0.5
    table[..., -1] = 2 * even[..., 1]
    return flat(Atoms.of_table(table, dim))


@dataclass
class Descents:
    """Where descents are; every field has the leading axis S."""

    number: Tensor  # its place among all
    which: Tensor  # its problem
    theta: Tensor
    loss: Tensor
    gradient: Tensor
    matrix: Tensor
    scale: Tensor  # Marquardt's: the largest diagonal so far
    damping: Tensor
    growth: Tensor  # Nielsen's: what the damping is multiplied by at the next failure
    done: Tensor

    def keep(self, rows: Tensor) -> Descents:
        """Those with these numbers."""
        return Descents(*(getattr(self, field.name)[rows] for field in fields(self)))


def begin(problem: Problem, start: Tensor) -> tuple[Descents, Tensor]:
    """Descents at their starts `[B, r, P]`, and the loss `[B]` that counts as none."""
    number = torch.arange(start[..., 0].numel(), device=start.device)
    which, theta = number // start.shape[1], start.flatten(0, 1).contiguous()
    loss, gradient, matrix = problem.normal(theta, which)
    one, scale = torch.ones_like(loss), matrix.diagonal(dim1=-2, dim2=-1)
    floor = 1e-30 * problem.y.square().mean(-1)
    done = loss <= floor[which]
    place = number, which, theta, loss, gradient, matrix
    return Descents(*place, scale, 1e-2 * one, 2 * one, done), floor


def descend(problem: Problem, start: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Levenberg–Marquardt from every start `[B, r, P]`; return theta and loss `[B, r]`.

    Marquardt's scale, Nielsen's damping. A descent leaves when its loss no longer falls.
    """
    now, floor = begin(problem, start)
    theta, loss = now.theta.clone(), now.loss.clone()
    for i in range(iterations):
        if i % (REST if start.is_cuda else 1) == 0:
            live = (~now.done).nonzero().squeeze(-1)
            if len(live) < len(now.done):
                theta[now.number], loss[now.number] = now.theta, now.loss
                now = now.keep(live)
            if not len(live):
                break
        advance(problem, now, floor)
    theta[now.number], loss[now.number] = now.theta, now.loss
    return theta.view_as(start), loss.view(start.shape[:2])


def advance(problem: Problem, now: Descents, floor: Tensor) -> None:
    """One step of all descents that have not ended; no value of it is waited for."""
    now.scale = now.scale.maximum(now.matrix.diagonal(dim1=-2, dim2=-1))
    diagonal = now.damping[:, None] * now.scale
    trial = step(now.theta, now.gradient, now.matrix, diagonal, problem.ends)
    loss, gradient, matrix = problem.normal(trial, now.which)
    better = (loss < now.loss) & ~now.done
    creeps = (now.loss - loss <= 1e-14 * now.loss) | (loss <= floor[now.which])
    worse = now.damping * now.growth
    now.done = now.done | torch.where(better, creeps, worse > 1e8)
    now.damping = torch.where(better, (now.damping / 3).clamp(min=1e-14), worse)
    now.growth = torch.where(better, 2.0, 2 * now.growth)
    now.loss = torch.where(better, loss, now.loss)
    now.theta = torch.where(better[:, None], trial, now.theta)
    now.gradient = torch.where(better[:, None], gradient, now.gradient)
    now.matrix = torch.where(better[:, None, None], matrix, now.matrix)


def step(theta: Tensor, gradient: Tensor, matrix: Tensor, diagonal: Tensor, ends: Tensor) -> Tensor:
    """theta after one damped step, of bounded size and inside the box.

    Parameters that lie on the box and would leave it stay where they are.
    """
    free = (~pushing_out(theta, gradient, ends)).to(theta)
    system = matrix * free[:, :, None] * free[:, None, :]
    system = system + torch.diag_embed(diagonal + 1e-16 + (1 - free))
    factor, failed = torch.linalg.cholesky_ex(system)
    change = -torch.cholesky_solve((gradient * free)[..., None], factor).squeeze(-1)
    change = change.masked_fill(failed[:, None] > 0, 0.0)  # no step: more damping comes next
    largest = change.abs().amax(-1, keepdim=True).clamp(min=LARGEST_STEP)
    return (theta + change * (LARGEST_STEP / largest)).clamp(-ends, ends)


def pushing_out(theta: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    """Which parameters lie on the box with the loss falling outwards."""
    return (theta.abs() >= ends) & (theta * gradient < 0)


def judge(problem: Problem, theta: Tensor, loss: Tensor, before: Tensor, noise: float) -> Fit:
    """The best of the polished theta `[B, r, P]`, and how far it can be trusted."""
    best = loss.argmin(1)
    rows = torch.arange(len(loss), device=loss.device)
    least, theta_best = loss[rows, best], theta[rows, best]
    _, gradient, _ = problem.normal(theta_best, rows)
    out = pushing_out(theta_best, gradient, problem.ends)
    gap = torch.full_like(least, torch.inf)
    if loss.shape[1] > 1:
        gap = loss.topk(2, largest=False).values.diff(dim=1).squeeze(1)
    exact = EXACT * problem.y.square().mean(-1)
    n = problem.x.shape[1]
    residual = least <= exact + noise**2 * (1 + 5 * (2 / n) ** 0.5)  # five standard deviations
    return Fit(
        atoms=unflat(theta_best, problem.k, problem.x.shape[-1], problem.gate),
        theta=theta_best,
        loss=least,
        touched=(theta_best.abs() >= problem.ends).any(-1),
        projected_gradient=(2 * gradient).masked_fill(out, 0.0).abs().amax(-1),
        gap=gap,
        optimisation_error=before[rows, best] - least,
        solved=residual & (gap <= exact + AGREE * least),
    )
