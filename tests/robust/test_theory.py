"""Every row on theory of the digest's list of what can be checked, as properties in float64."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety import MoE
from moiety.robust.theory import (
    equal_norms,
    join,
    least_squares,
    mix,
    router_term,
    subspaces,
    theorem1,
    turned,
    two_experts_term,
)

seeds = st.integers(0, 2**31)
some = settings(max_examples=60, deadline=None)


def draw(seed):
    return torch.Generator().manual_seed(seed)


def normal(generator, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


class Tanh:
    """Experts b_i + a_i tanh(<v_i, x>) behind softmax(S x): |a_i| ||v_i|| bounds their slopes."""

    def __init__(self, seed, experts, dim=5):
        g = draw(seed)
        self.router, self.v = normal(g, experts, dim), normal(g, experts, dim)
        self.a, self.b = normal(g, experts), 3 * normal(g, experts)
        self.lipschitz = self.a.abs() * self.v.norm(dim=1)
        self.generator = g

    def points(self, n=50):
        return 2 * normal(self.generator, n, self.v.shape[1])

    def gate(self, x):
        return (x @ self.router.T).softmax(-1)

    def answers(self, x):
        return self.b + self.a * torch.tanh(x @ self.v.T)

    def __call__(self, x):
        return (self.gate(x) * self.answers(x)).sum(-1)

    def gradient(self, x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(self(x).sum(), x)[0]

    def router_term(self, x):
        return router_term(self.gate(x), self.answers(x), self.router)


# -- Lemma 1 -------------------------------------------------------------------------------------


@some
@given(seed=seeds, experts=st.integers(1, 6))
def test_lemma_1_bounds_the_gradient_at_every_point(seed, experts):
    model = Tanh(seed, experts)
    x = model.points()
    bound = model.gate(x) @ model.lipschitz + model.router_term(x)
    assert (model.gradient(x).norm(dim=1) <= bound * (1 + 1e-12)).all()


@some
@given(seed=seeds, experts=st.integers(1, 6))
def test_the_two_terms_are_the_two_parts_of_the_gradient(seed, experts):
    model = Tanh(seed, experts)
    x = model.points()
    p = model.gate(x)
    slopes = (model.a * (1 - torch.tanh(x @ model.v.T) ** 2))[..., None] * model.v
    of_experts = torch.einsum("te,ted->td", p, slopes)
    rest = model.gradient(x) - of_experts
    assert torch.allclose(rest.norm(dim=1), model.router_term(x), atol=1e-10)


def test_without_the_routers_term_the_bound_is_broken():
    model = Tanh(0, 4)
    x = model.points(500)
    broken = model.gradient(x).norm(dim=1) > model.gate(x) @ model.lipschitz
    assert broken.double().mean() > 0.02


@some
@given(seed=seeds)
def test_the_term_of_two_experts_is_p_times_one_minus_p(seed):
    model = Tanh(seed, 2)
    x = model.points()
    p, f = model.gate(x), model.answers(x)
    found = two_experts_term(p[:, 0], f, model.router)
    assert torch.allclose(found, model.router_term(x), rtol=1e-9, atol=1e-12)


@some
@given(seed=seeds)
def test_on_the_boundary_of_two_experts_the_term_is_a_quarter(seed):
    model = Tanh(seed, 2)
    across = model.router[0] - model.router[1]
    x = model.points()
    x = x - (x @ across / across.square().sum())[:, None] * across  # p = 1/2 there
    f = model.answers(x)
    quarter = (f[:, 0] - f[:, 1]).abs() * across.norm() / 4
    assert torch.allclose(model.router_term(x), quarter, rtol=1e-9)


@some
@given(seed=seeds, experts=st.integers(2, 6))
def test_far_out_the_routing_is_settled_and_the_term_vanishes(seed, experts):
    model = Tanh(seed, experts)
    x = model.points()
    two = (x @ model.router.T).topk(2).values
    x = x[two[:, 0] - two[:, 1] > 0.05]  # a point on a boundary stays on it
    assert (model.router_term(1e4 * x) < 1e-12).all()


# -- linear experts ------------------------------------------------------------------------------


@some
@given(seed=seeds, experts=st.integers(2, 5), rank=st.integers(1, 3))
def test_orthogonal_parts_add_up_by_pythagoras_so_experts_win(seed, experts, rank):
    parts = turned(experts, rank=rank, generator=draw(seed))
    own = [least_squares(*part) for part in parts]
    dense = least_squares(*join(parts))
    assert torch.allclose(dense, sum(own), atol=1e-9)
    assert float(dense.square().sum()) == pytest.approx(
        float(sum(w.square().sum() for w in own)), rel=1e-10
    )
    assert dense.norm() >= max(w.norm() for w in own) * (1 - 1e-12)  # the copy prints <=


@some
@given(seed=seeds, dim=st.integers(2, 6), rows=st.integers(1, 9))
def test_the_same_rows_with_opposite_values_leave_nothing_so_dense_wins(seed, dim, rows):
    g = draw(seed)
    x, y = normal(g, rows, dim), normal(g, rows)
    found = theorem1([(x, y), (x, -y)])
    assert found.dense < 1e-7 * min(found.experts)
    turned_over = theorem1([(x, y), (-x, y)])  # the other reading of the lost minus sign
    assert turned_over.dense < 1e-7 * min(found.experts)


@some
@given(seed=seeds, dim=st.integers(2, 6), rows=st.integers(1, 9))
def test_the_same_rows_with_the_same_values_give_three_equal_models(seed, dim, rows):
    g = draw(seed)
    x, y = normal(g, rows, dim), normal(g, rows)
    own, dense = least_squares(x, y), least_squares(*join([(x, y), (x, y)]))
    assert (dense - own).norm() < 1e-7 * own.norm()


@settings(max_examples=150, deadline=None)
@given(
    seed=seeds,
    experts=st.integers(1, 4),
    rank=st.integers(1, 3),
    rows=st.integers(1, 8),
    angle=st.one_of(st.just(0.0), st.floats(1e-8, math.pi / 2)),
)
def test_theorem_1_on_drawn_data(seed, experts, rank, rows, angle):
    parts = turned(experts, rank=rank, rows=rows, angle=angle, generator=draw(seed))
    found = theorem1(parts)
    assert found.dense >= found.bound - 1e-9 * max(found.experts)


@settings(max_examples=100, deadline=None)
@given(seed=seeds, noise=st.floats(-8, 0))
def test_theorem_1_on_parts_whose_rows_are_perturbed(seed, noise):
    """The digest's own trial: two parts of rank 4 in 8 dimensions, perturbed by 1e-8 to 1."""
    g = draw(seed)
    axes = torch.linalg.qr(normal(g, 8, 8)).Q
    parts = []
    for basis in axes.split(4, dim=1):
        mixed = basis + 10**noise * normal(g, 8, 4)
        parts.append((normal(g, 12, 4) @ mixed.T, normal(g, 12)))
    found = theorem1(parts)
    assert found.dense >= found.bound - 1e-9 * max(found.experts)


def test_theorem_1_says_something_where_subspaces_nearly_fit():
    bounds = [theorem1(turned(2, angle=1e-4, generator=draw(seed))) for seed in range(100)]
    assert sum(found.bound > 0.5 * found.dense for found in bounds) > 90


@some
@given(seed=seeds, experts=st.integers(2, 4))
def test_the_subspaces_are_orthonormal_and_fit_orthogonal_parts(seed, experts):
    parts = turned(experts, generator=draw(seed))
    bases = subspaces(parts)
    together = torch.cat(bases, 1)
    assert torch.allclose(together.T @ together, torch.eye(together.shape[1]).double(), atol=1e-9)
    for basis, (x, _) in zip(bases, parts):
        assert torch.allclose(x @ basis @ basis.T, x, atol=1e-6)


@pytest.mark.parametrize("experts", range(2, 17))
def test_with_equal_norms_the_gain_is_the_root_of_the_number_of_experts(experts):
    found = theorem1(equal_norms(turned(experts, generator=draw(experts))))
    assert found.experts == pytest.approx([1.0] * experts, rel=1e-9)
    assert found.gain == pytest.approx(math.sqrt(experts), rel=1e-9)
    assert found.eps_1 < 1e-7 and found.eps_2 < 1e-9
    assert found.bound == pytest.approx(found.dense, rel=1e-4)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_turning_subspaces_towards_each_other_spoils_the_bound(seed):
    angles = [0.0, 1e-3, 1e-2, 0.1, math.pi / 4]
    found = [theorem1(turned(2, angle=angle, generator=draw(seed))) for angle in angles]
    eps_2 = [f.eps_2 for f in found]
    assert eps_2 == sorted(eps_2)
    assert found[0].eps_1 < 1e-6 < found[-1].eps_1 and found[0].eps_2 < 1e-9
    share = [f.bound / f.dense for f in found]
    assert share[0] == pytest.approx(1, abs=1e-5) and share[-1] < 0.2
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(share))


def test_one_part_is_the_dense_model():
    found = theorem1(turned(1, generator=draw(0)))
    assert found.gain == pytest.approx(1) and found.bound == pytest.approx(found.dense)


# -- sparse as the limit of smooth ---------------------------------------------------------------


@some
@given(seed=seeds, experts=st.integers(2, 6), temperature=st.floats(1e-3, 1.0))
def test_a_colder_gate_comes_as_close_to_the_sparse_mixture_as_the_margin_says(
    seed, experts, temperature
):
    g = draw(seed)
    scores, answers = normal(g, 40, experts), normal(g, 40, experts)
    two = scores.topk(2).values
    gap = (mix(scores, answers, temperature) - mix(scores, answers, 0)).abs()
    apart = answers.max(1).values - answers.min(1).values
    most = apart * (experts - 1) * torch.exp(-(two[:, 0] - two[:, 1]) / temperature)
    assert (gap <= most + 1e-12).all()


def test_a_temperature_below_zero_is_refused():
    with pytest.raises(ValueError, match="temperature must be at least 0, got -1"):
        mix(torch.zeros(1, 2), torch.zeros(1, 2), -1)


def test_our_smooth_layer_becomes_our_sparse_one():
    smooth = MoE("softmax", 4, dim=6, hidden=8).double()
    sparse = MoE("top-k", smooth.experts, k=1).double()
    sparse.router.weight.data.copy_(smooth.router.weight)
    x = torch.randn(200, 6, dtype=torch.float64)
    two = (x @ smooth.router.weight.T).topk(2).values
    x = x[two[:, 0] - two[:, 1] > 0.1]
    gaps = []
    for temperature in (1.0, 0.1, 0.001):
        smooth.router.weight.data.copy_(sparse.router.weight / temperature)
        gaps.append((smooth(x) - sparse(x)).abs().max().item())
    assert gaps[0] > gaps[1] > gaps[2] and gaps[2] < 1e-12
