"""Every row on theory of the digest's list of numerical checks, as properties in float64."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety.adapt.theory import Linear, draw

some = settings(max_examples=40, deadline=None)
TINY = 1e-10


@st.composite
def problems(draw_):
    """A problem of any small size, and a time of flow; everything else follows from a seed."""
    examples = draw_(st.integers(1, 4))
    linear = draw(
        torch.Generator().manual_seed(draw_(st.integers(0, 2**31))),
        examples=examples,
        features=examples + draw_(st.integers(1, 4)),
        outputs=draw_(st.integers(1, 3)),
        ridge=10 ** draw_(st.floats(-2, 0)),
    )
    return linear, 10 ** draw_(st.floats(-1, 1))


def cases(count, rounds=4):
    """`count` problems times `rounds`, as the digest counts them: t = 0, 1, 2, 3 of each."""
    g = torch.Generator().manual_seed(0)
    for _ in range(count // rounds):
        ridge, time = (10 ** float(torch.rand((), generator=g) * 2 - low) for low in (2, 1))
        linear = draw(g, ridge=ridge)
        yield from ((linear, t, time) for t in range(rounds))


# -- Lemma 1 ---------------------------------------------------------------------------------------


@some
@given(problems())
def test_lemma_1_is_the_ridge_solution_iterated(problem):
    linear, _ = problem
    w = linear.w0
    for t in range(6):
        assert torch.allclose(linear.start(t), w, rtol=0, atol=TINY)
        w = linear.distil(w)


def test_a_round_minimises_what_it_says():
    linear = draw(torch.Generator().manual_seed(3), ridge=0.3)
    new = linear.distil(linear.w0).requires_grad_()
    away = linear.design.T @ (new - linear.w0)  # of the outputs from the teacher's
    loss = away.square().sum() / linear.phi_DN.shape[1] + linear.ridge * new.square().sum()
    assert torch.autograd.grad(loss, new)[0].abs().max() < TINY


def test_the_order_of_w_is_that_of_the_outputs():
    linear = draw(torch.Generator().manual_seed(4), outputs=3)
    outputs = (linear.design.T @ linear.w0).view_as(linear.targets_PN)
    assert torch.allclose(outputs, linear.weights_PD @ linear.phi_DN)


@some
@given(problems())
def test_other_readings_of_the_exponent_agree_at_round_1_and_at_no_later_one(problem):
    linear, _ = problem
    ratio = linear.phi_DN.shape[1] * linear.ridge / linear.sigma.square()
    for t in (1, 2, 3):
        for wrong in (1 / (1 + ratio**t), 1 / (1 + ratio * t)):
            assert torch.allclose(wrong, linear.kept**t, rtol=1e-6, atol=0.0) == (t == 1)


@some
@given(problems())
def test_rounds_shrink_by_a_constant_factor_and_end_what_is_outside_the_span(problem):
    linear, _ = problem
    n, sigma = linear.phi_DN.shape[1], linear.sigma
    w = linear.w0
    for t in range(4):
        new = linear.distil(w)
        kept = linear.inside.T @ w * sigma**2 / (sigma**2 + n * linear.ridge)
        assert torch.allclose(linear.inside.T @ new, kept, rtol=1e-6, atol=1e-12)
        beyond = linear.axes[0][:, len(sigma) :].T @ new
        assert beyond.abs().max() < TINY and linear.b(t + 1) == 0
        w = new
    outside = (linear.axes[0][:, len(sigma) :].T @ linear.w0).square().sum()
    assert linear.b(0) == pytest.approx(float(outside)) and linear.b(0) > 0


# -- the flow (5) ----------------------------------------------------------------------------------


@some
@given(problems(), st.integers(0, 4))
def test_the_closed_form_is_the_flow(problem, t):
    linear, time = problem
    flowed = linear.flow(linear.start(t), time)
    assert torch.allclose(linear.tuned(t, time), flowed, rtol=0, atol=1e-8)


@pytest.mark.parametrize("t", [0, 2])
def test_the_flow_is_where_small_steps_of_gradient_descent_go(t):
    linear, time, steps = draw(torch.Generator().manual_seed(5)), 2.0, 1500
    w = linear.start(t)
    for _ in range(steps):
        w.requires_grad_()
        loss = (linear.design.T @ w - linear.targets_PN.flatten()).square().sum() / 2
        w = w.detach() - time / steps * torch.autograd.grad(loss, w)[0]
    assert torch.allclose(linear.tuned(t, time), w, atol=3e-3)
    assert not torch.allclose(linear.tuned(2 - t, time), w, atol=1e-2)  # of another start


def test_long_fine_tuning_fits_the_targets():
    linear = draw(torch.Generator().manual_seed(6))
    outputs = linear.design.T @ linear.tuned(1, time=1e6)
    assert torch.allclose(outputs, linear.targets_PN.flatten())


# -- Theorems 1 and 2 ------------------------------------------------------------------------------


@some
@given(problems())
def test_every_bound_falls_with_the_rounds(problem):
    linear, time = problem
    for t in range(5):
        fell = linear.psi_1(t, time) - linear.psi_1(t + 1, time)
        assert fell > 0
        for bound in (linear.zeta, linear.zeta_abs):
            assert bound(t, time) >= bound(t + 1, time)
            if fell > 1e-12 * linear.zeta_abs(t, time) ** 2:  # else it is lost in rounding
                assert bound(t, time) > bound(t + 1, time)


def test_the_printed_zeta_fails_in_half_of_2000_cases_and_the_safe_one_in_none():
    broken = {"zeta": 0, "zeta_abs": 0}
    for linear, t, time in cases(2000):
        norm = float(linear.tuned(t, time).norm())
        for name in broken:
            broken[name] += norm > getattr(linear, name)(t, time) * (1 + 1e-12)
    assert broken["zeta_abs"] == 0
    assert 900 < broken["zeta"] < 1100  # cross terms have either sign


@some
@given(problems(), st.integers(0, 4), st.integers(0, 2**31))
def test_no_start_is_further_than_psi_abs_and_the_opposite_one_attains_the_norms(problem, t, seed):
    linear, time = problem
    w = linear.tuned(t, time)
    other = torch.randn(len(w), dtype=w.dtype, generator=torch.Generator().manual_seed(seed))
    for initial in (other, -0.7 * w):
        most = linear.psi_abs(t, time, float(initial.norm()))
        assert float((initial - w).norm()) <= most * (1 + 1e-12)
    assert float((-0.7 * w - w).norm()) == pytest.approx(1.7 * float(w.norm()))


def test_the_printed_psi_is_exceeded_by_that_start():
    over = 0
    for linear, t, time in cases(400):
        w = linear.tuned(t, time)
        over += 2 * float(w.norm()) > linear.psi(t, time, float(w.norm())) * (1 + 1e-12)
    assert 150 < over < 250


@some
@given(problems())
def test_the_first_round_takes_most_with_and_without_a_part_outside(problem):
    linear, time = problem
    span = linear.inside @ linear.inside.T
    seen = Linear(
        linear.phi_DN,
        (span @ linear.w0).view_as(linear.weights_PD),
        linear.targets_PN,
        linear.ridge,
    )
    first = []
    for one in (linear, seen):
        values = [one.psi(t, time, initial=2.0) for t in range(6)]
        drops = [before - after for before, after in pairwise(values)]
        assert all(before >= after - TINY for before, after in pairwise(drops))
        first.append(drops[0])
    assert seen.b(0) < TINY and first[0] > first[1]


def test_the_exact_norm_may_rise():
    rises = 0
    for linear, t, time in cases(400):
        if t:
            rises += linear.tuned(t, time).norm() > linear.tuned(t - 1, time).norm() * (1 + 1e-9)
    assert rises > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights_PD": torch.ones(2, 5)}, "need weights"),
        ({"phi_DN": torch.ones(4, 4)}, "more features than examples"),
        ({"phi_DN": torch.ones(8, 4)}, "linearly independent"),
        ({"ridge": 0.0}, "ridge must be positive"),
    ],
)
def test_what_the_theory_does_not_cover_is_refused(change, said):
    good = draw(torch.Generator().manual_seed(0))
    parts = {name: getattr(good, name) for name in ("phi_DN", "weights_PD", "targets_PN", "ridge")}
    parts = {**parts, **change}
    if parts["phi_DN"].shape[0] == 4:
        parts["weights_PD"] = torch.ones(2, 4)
    with pytest.raises(ValueError, match=said):
        Linear(**parts)
