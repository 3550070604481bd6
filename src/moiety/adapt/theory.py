"""Why self-distillation regularises: the linear model of paper 3, its lemma and its two theorems.

Lee et al. 2023 (arXiv 2210.02871), section 4: f(x) = W phi(x), first distilled t times with a ridge
penalty, then fine-tuned by gradient flow for a time T.

    linear = Linear(phi, weights, targets, ridge=0.1)     # [D, N], [P, D], [P, N]; float64
    linear.start(2)                                       # w after two rounds, Lemma 1
    linear.tuned(2, time=1.0)                             # w after fine-tuning, (5)
    linear.zeta_abs(2, time=1.0)                          # at least the norm of that, always
    linear.zeta(2, time=1.0)                              # as printed (6): not a bound

Weights are vectors w = vec(W^T) of length D P. Lemma 1 has the exponent under which it is true; our
copy of the paper flattens it. The printed zeta leaves the cross terms 2 q c e (1 - e) out, which
may be positive: it decreases with t and it is no bound; `zeta_abs` is both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Linear:
    """One data set, the weights that further pre-training left, and the penalty of a round."""

    phi_DN: Tensor  # features of the examples, in columns; more features than examples
    weights_PD: Tensor  # W of w_{0,0}
    targets_PN: Tensor  # what fine-tuning fits
    ridge: float  # lambda

    def __post_init__(self) -> None:
        (d, n), (p, width) = self.phi_DN.shape, self.weights_PD.shape
        if (width, tuple(self.targets_PN.shape)) != (d, (p, n)):
            raise ValueError(
                f"features [{d}, {n}] need weights [P, {d}] and targets [P, {n}], got {[p, width]} "
                f"and {list(self.targets_PN.shape)}"
            )
        if d <= n:
            raise ValueError(f"the theory needs more features than examples, got {d} and {n}")
        if not self.ridge > 0:
            raise ValueError(f"ridge must be positive, got {self.ridge}")
        if torch.linalg.matrix_rank(self.phi_DN) < n:
            raise ValueError(f"the features of {n} examples must be linearly independent")

    # -- the parts of the formulas ---------------------------------------------------------------

    @cached_property
    def design(self) -> Tensor:
        """`[DP, NP]`: I_P ⊗ phi, whose transpose turns w into all outputs on all examples."""
        eye = torch.eye(len(self.weights_PD), dtype=self.phi_DN.dtype)
        return torch.kron(eye, self.phi_DN.contiguous())

    @cached_property
    def axes(self) -> tuple[Tensor, Tensor]:
        """u_i in columns `[DP, DP]`, those of the span of the data first, and sigma_i `[NP]`."""
        u, sigma, _ = torch.linalg.svd(self.design, full_matrices=True)
        return u, sigma

    @property
    def sigma(self) -> Tensor:
        return self.axes[1]

    @property
    def inside(self) -> Tensor:
        """`[DP, NP]`: the axes that span the data."""
        return self.axes[0][:, : len(self.sigma)]

    @cached_property
    def w0(self) -> Tensor:
        """vec(W^T), what further pre-training left: w_{0,0}."""
        return self.weights_PD.flatten()

    @cached_property
    def q(self) -> Tensor:
        """`[NP]`: u_i' v*, where v* fits the targets exactly."""
        return self.inside.T @ (torch.linalg.pinv(self.design.T) @ self.targets_PN.flatten())

    @property
    def kept(self) -> Tensor:
        """`[NP]`: by how much a round multiplies a coefficient: 1 / (1 + n lambda / sigma²)."""
        return 1 / (1 + self.phi_DN.shape[1] * self.ridge / self.sigma.square())

    def c(self, t: int) -> Tensor:
        """`[NP]`: u_i' w_{t,0} inside the span, which is alpha_{i,t} ytilde_i of Lemma 1."""
        return self.kept**t * (self.inside.T @ self.w0)

    @cached_property
    def outside(self) -> Tensor:
        """v = (I - U U') w_{0,0}: what no example sees, and no round but the 0th has."""
        return self.w0 - self.inside @ (self.inside.T @ self.w0)

    def b(self, t: int) -> float:
        """1{t = 0} B: what of the squared norm lies outside the span; the first round ends it."""
        return float(self.outside.square().sum()) if t == 0 else 0.0

    def left(self, time: float) -> Tensor:
        """`[NP]`: e_i = exp(-sigma_i² T), what fine-tuning leaves of the start."""
        return torch.exp(-self.sigma.square() * time)

    # -- weights ---------------------------------------------------------------------------------

    def distil(self, w: Tensor) -> Tensor:
        """One round as it is defined: the ridge solution with the outputs of w as targets."""
        n, gram = self.phi_DN.shape[1], self.design @ self.design.T
        eye = torch.eye(len(gram), dtype=gram.dtype)
        return torch.linalg.solve(gram + n * self.ridge * eye, gram @ w)

    def start(self, t: int) -> Tensor:
        """w_{t,0} in closed form (Lemma 1)."""
        w = self.inside @ self.c(t)
        return w + self.outside if t == 0 else w

    def tuned(self, t: int, time: float) -> Tensor:
        """w_{t,T} in closed form (5)."""
        e = self.left(time)
        w = self.inside @ (self.q * (1 - e) + self.c(t) * e)
        return w + self.outside if t == 0 else w

    def flow(self, w: Tensor, time: float) -> Tensor:
        """Fine-tuning as it is defined: dw/dtau = -grad L(w), by the exponential of its matrix."""
        gram, pull = self.design @ self.design.T, self.design @ self.targets_PN.flatten()
        whole = torch.zeros(len(w) + 1, len(w) + 1, dtype=w.dtype)  # of (w, 1), which is linear
        whole[:-1, :-1], whole[:-1, -1] = -gram * time, pull * time
        return (torch.linalg.matrix_exp(whole) @ torch.cat([w, w.new_ones(1)]))[:-1]

    # -- bounds ----------------------------------------------------------------------------------

    def g1(self, time: float) -> float:
        """What fine-tuning adds whatever the start: sum q² (1 - e)²."""
        return float((self.q * (1 - self.left(time))).square().sum())

    def psi_1(self, t: int, time: float) -> float:
        """What is left of the start inside the span: sum c² e²."""
        return float((self.c(t) * self.left(time)).square().sum())

    def zeta(self, t: int, time: float) -> float:
        """The printed bound on the norm of `tuned` (6). It falls with t, and it may be too low."""
        return (self.g1(time) + self.psi_1(t, time) + self.b(t)) ** 0.5

    def zeta_abs(self, t: int, time: float) -> float:
        """A bound that holds: the parts of one axis are added before they are squared."""
        e = self.left(time)
        added = self.q.abs() * (1 - e) + self.c(t).abs() * e
        return (float(added.square().sum()) + self.b(t)) ** 0.5

    def psi(self, t: int, time: float, initial: float = 0.0) -> float:
        """Theorem 2: the distance from initial weights of norm `initial`, with the printed zeta."""
        return self.zeta(t, time) + initial

    def psi_abs(self, t: int, time: float, initial: float = 0.0) -> float:
        """The same with the bound that holds."""
        return self.zeta_abs(t, time) + initial


def draw(
    generator: torch.Generator,
    *,
    features: int = 8,
    examples: int = 4,
    outputs: int = 2,
    ridge: float = 0.1,
    inside: bool = False,
) -> Linear:
    """A problem of Gaussian numbers in float64; `inside`: weights without a part that no row sees.

    Features have norm about 1, so that `ridge` and times of flow mean the same at every size.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    phi = normal(features, examples) / features**0.5
    weights, targets = normal(outputs, features), normal(outputs, examples)
    if inside:
        basis = torch.linalg.qr(phi).Q
        weights = weights @ basis @ basis.T
    return Linear(phi, weights, targets, ridge)
