"""The derivatives of a mixture on a GPU, by one kernel: they are written once, and nothing else is.

Term by term, `regression.free_jacobian` reads and writes memory some ten times for each derivative,
by dozens of launches. `rows` gives the same numbers, and the residuals beside them.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .regression import Expert, Gate

BLOCK = 256  # points of a program
PIECE = 2048  # points whose products are added by one part of the GPU


@triton.jit
def _score(theta, u, n, here, tau, N, i: tl.constexpr, K: tl.constexpr, DIM: tl.constexpr,
           ROW: tl.constexpr, LINEAR: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """Of atom i, without its b0; and ‖b1‖ and what the product is divided by."""
    s = tl.zeros_like(tl.load(u + n, here, 0.0))
    norm = tl.load(tau) * 0
    if i < K - 1:
        for j in tl.static_range(DIM):
            b = tl.load(theta + i * ROW + j)
            s += b * tl.load(u + j * N + n, here, 0.0)
            norm += b * b
        norm = tl.sqrt(norm)
    elif UNIT:
        s += tl.load(u + n, here, 0.0)
    size = norm + tl.load(tau)
    size = tl.where(size == 0, size + 1, size)
    if i < K - 1 and not LINEAR:
        s = s / size
    return s, norm, size


@triton.jit
def _output(theta, x, n, here, N, i: tl.constexpr, K: tl.constexpr, DIM: tl.constexpr,
            ROW: tl.constexpr, EXPERT: tl.constexpr):  # fmt: skip
    """h of atom i, its derivative by a (tanh, ReLU), and by what tanh or ReLU is taken of."""
    eta = theta + i * ROW
    if i < K - 1:
        eta += DIM + 1
    if EXPERT != "linear":
        eta += 1  # behind a
    z = tl.zeros_like(tl.load(x + n, here, 0.0)) + tl.load(eta + DIM)
    for j in tl.static_range(DIM):
        z += tl.load(eta + j) * tl.load(x + j * N + n, here, 0.0)
    h, f, slope = z, z, z * 0 + 1
    if EXPERT == "tanh":
        f = 1 - 2 / (tl.exp(2 * tl.minimum(z, 50.0)) + 1)
        h = tl.load(eta - 1) * f
        slope = tl.load(eta - 1) * (1 - f * f)
    if EXPERT == "relu":
        f = tl.where(z > 0, z, 0.0)
        h = tl.load(eta - 1) * f
        slope = tl.load(eta - 1) * tl.where(z > 0, slope, 0.0)
    return h, f, slope


@triton.jit(do_not_specialize=["N"])
def _rows(theta, which, x, u, y, tau, out, N, P: tl.constexpr, K: tl.constexpr, DIM: tl.constexpr,
          ROW: tl.constexpr, EXPERT: tl.constexpr, LINEAR: tl.constexpr, UNIT: tl.constexpr,
          BLOCK: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """Derivatives, then the residual, of BLOCK points of one descent."""
    first, s = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64)
    n = first + tl.arange(0, BLOCK)
    here = n < N
    problem = tl.load(which + s)
    theta += s * P
    x, u, y = x + problem * DIM * N, u + problem * DIM * N, y + problem * N
    pieces = (N + PIECE - 1) // PIECE
    out += (s * pieces + first // PIECE) * (P + 1) * PIECE + n % PIECE

    top = tl.zeros_like(tl.load(y + n, here, 0.0))  # the score of the last atom, if that is 0
    for i in tl.static_range(K):
        score, _, _ = _score(theta, u, n, here, tau, N, i, K, DIM, ROW, LINEAR, UNIT)
        if i < K - 1:
            score += tl.load(theta + i * ROW + DIM)
        top = tl.maximum(top, score)
    total, g = tl.zeros_like(top), tl.zeros_like(top)
    for i in tl.static_range(K):
        score, _, _ = _score(theta, u, n, here, tau, N, i, K, DIM, ROW, LINEAR, UNIT)
        if i < K - 1:
            score += tl.load(theta + i * ROW + DIM)
        h, _, _ = _output(theta, x, n, here, N, i, K, DIM, ROW, EXPERT)
        mass = tl.exp(score - top)
        total += mass
        g += mass * h
    g = g / total
    for i in tl.static_range(K):
        score, norm, size = _score(theta, u, n, here, tau, N, i, K, DIM, ROW, LINEAR, UNIT)
        cosine = score
        row = out + i * ROW * PIECE
        if i < K - 1:
            score += tl.load(theta + i * ROW + DIM)
        h, f, slope = _output(theta, x, n, here, N, i, K, DIM, ROW, EXPERT)
        weight = tl.where(here, tl.exp(score - top) / total, 0.0)
        if i < K - 1:
            by_score = weight * (h - g)
            for j in tl.static_range(DIM):
                by = tl.load(u + j * N + n, here, 0.0)
                if not LINEAR:  # ds/db1 = (u − cosine b1/‖b1‖) / (‖b1‖ + τ1)
                    b = tl.load(theta + i * ROW + j) / tl.where(norm == 0, norm + 1, norm)
                    by = (by - cosine * b) / size
                tl.store(row + j * PIECE, by_score * by)
            tl.store(row + DIM * PIECE, by_score)
            row += (DIM + 1) * PIECE
        if EXPERT != "linear":
            tl.store(row, weight * f)
            row += PIECE
        for j in tl.static_range(DIM):
            tl.store(row + j * PIECE, weight * slope * tl.load(x + j * N + n, here, 0.0))
        tl.store(row + DIM * PIECE, weight * slope)
    tl.store(out + P * PIECE, tl.where(here, g - tl.load(y + n, here, 0.0), 0.0))


def rows(
    theta: Tensor, which: Tensor, x: Tensor, u: Tensor, y: Tensor, tau: Tensor, gate: Gate,
    expert: Expert, k: int,
) -> Tensor:  # fmt: skip
    """`[S, pieces, P + 1, PIECE]`: derivatives `[P]` and residual of each point; 0 past the last.

    theta `[S, P]`; which `[S]` numbers the problem of each; x and u = gate.inputs(x) `[B, d, n]`,
    y `[B, n]`; tau: tau_1 as a tensor, since a number would become float32.
    """
    count, size = theta.shape
    dim, n = x.shape[1:]
    pieces = triton.cdiv(n, PIECE)
    theta, out = theta.contiguous(), theta.new_empty(count, pieces, size + 1, PIECE)
    row = (size + dim + 1) // k
    _rows[pieces * PIECE // BLOCK, count](
        theta, which, x, u, y, tau, out, n, size, k, dim, row, expert, gate.kind == "linear",
        not gate.sees_norms, BLOCK, PIECE,
    )  # fmt: skip
    return out
