"""cosine and perturbed-cosine: the identities of digest 5, section 8, and the options."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety.routing import build_router
from moiety.routing.cosine import shrink

SEEDS = st.integers(0, 10**6)
TAUS = st.sampled_from([1e-3, 0.1, 0.5, 1.0, 3.0])
SCALES = st.sampled_from([1e-12, 1e-3, 1.0, 7.0, 1e12])
BOTH = ["cosine", "perturbed-cosine"]
quick = settings(max_examples=12, deadline=None, derandomize=True)


def router(name="cosine", dim=5, experts=4, **options):
    torch.manual_seed(0)
    return build_router(name, dim=dim, experts=experts, **options).double()


def drawn(seed, name="cosine", **options):
    """A router and tokens with random embeddings and biases."""
    r = router(name, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        r.embedding.copy_(torch.randn(r.embedding.shape, generator=generator))
        if r.bias is not None:
            r.bias.copy_(torch.randn(r.bias.shape, generator=generator))
    return r, torch.randn(6, 5, generator=generator, dtype=torch.float64)


def radial(r, x):
    """`[T, E]`: <b, ds/db>, the derivative of each score along its own embedding."""

    def scores(embedding):
        return torch.func.functional_call(r, {"embedding": embedding}, (x,)).scores

    b = r.embedding.detach()
    return torch.func.jvp(scores, (b,), (b,))[1]


# -- section 8 -------------------------------------------------------------------------------------


@quick
@given(SEEDS, SCALES)
def test_euler_identity(seed, scale):
    r, x = drawn(seed)
    assert radial(r, scale * x).abs().max() < 1e-12


@quick
@given(SEEDS, TAUS, TAUS)
def test_perturbed_radial_derivative(seed, tau_1, tau_2):
    r, x = drawn(seed, "perturbed-cosine", tau_1=tau_1, tau_2=tau_2, b0=False)
    norm = r.embedding.norm(dim=1)
    want = r.scores(x) * tau_1 / (norm + tau_1)
    torch.testing.assert_close(radial(r, x), want)
    assert want.abs().max() > 1e-5


@quick
@given(SEEDS, TAUS)
def test_tau_2_alone_leaves_the_radial_derivative_at_zero(seed, tau_2):
    r, x = drawn(seed, "perturbed-cosine", tau_1=0.0, tau_2=tau_2)
    assert radial(r, x).abs().max() < 1e-12


@quick
@given(SEEDS, SCALES)
def test_scale_invariance(seed, scale):
    r, x = drawn(seed)
    p, _ = drawn(seed, "perturbed-cosine")
    plain, perturbed = r(x).gate, p(x).gate
    with torch.no_grad():
        r.embedding *= scale
        p.embedding *= scale
    torch.testing.assert_close(r(x).gate, plain)
    torch.testing.assert_close(r(scale * x).gate, plain)
    if scale != 1:
        assert (p(x).gate - perturbed).abs().max() > 1e-3


@quick
@given(SEEDS)
def test_limits(seed):
    plain, x = drawn(seed)
    tiny, _ = drawn(seed, "perturbed-cosine", tau_1=1e-12, tau_2=1e-12)
    none, _ = drawn(seed, "perturbed-cosine", tau_1=0.0, tau_2=0.0)
    huge, _ = drawn(seed, "perturbed-cosine", tau_1=1e9, tau_2=1e9)
    torch.testing.assert_close(tiny(x).gate, plain(x).gate)
    torch.testing.assert_close(none(x).gate, plain(x).gate)
    torch.testing.assert_close(huge(x).gate, huge.bias.softmax(0).expand(6, -1))


@quick
@given(SEEDS, TAUS, SCALES)
def test_score_range(seed, tau, scale):
    r, x = drawn(seed, "perturbed-cosine", tau_1=tau, tau_2=tau)
    assert ((r.scores(scale * x) - r.bias).abs() < 1).all()
    v, _ = drawn(seed)
    assert ((v.scores(scale * x) - v.bias).abs() <= 1 + 1e-12).all()


@pytest.mark.parametrize("options", [{}, {"project": 3}])
@pytest.mark.parametrize("name", BOTH)
def test_finite_at_zero(name, options):
    r = router(name, **options)
    with torch.no_grad():
        r.embedding[1] = 0.0
    x = torch.randn(3, 5, dtype=torch.float64)
    x[0] = 0.0
    x.requires_grad_()
    scores = r.scores(x if r.projection is None else x @ r.projection.t())
    assert (scores[0] == 0).all()
    assert (scores[:, 1] == 0).all()
    assert (scores[1:, 0] != 0).all()
    scores.square().sum().backward()
    scores = r.scores(x if r.projection is None else x @ r.projection.t())
    scores.sum().backward()
    assert x.grad.isfinite().all()
    assert r.embedding.grad.isfinite().all()


def test_zero_with_a_perturbation_has_its_true_gradient():
    v = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    jacobian = torch.autograd.functional.jacobian(lambda v: shrink(v, 0.25), v)
    torch.testing.assert_close(jacobian[0, :, 0], 4 * torch.eye(3, dtype=torch.float64))
    v = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: shrink(v, 0.25), v)
    assert torch.autograd.gradcheck(lambda v: shrink(v, 0.0), v)


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e20, 1e30])
def test_directions_survive_any_size_in_single_precision(size):
    r = router().float().eval()
    x = torch.randn(6, 5)
    torch.testing.assert_close(r(size * x).gate, r(x).gate)


# -- the formula and its options -------------------------------------------------------------------


def test_norms_are_per_expert_and_per_token():
    # e = (3, 4) and (0, 2), u = (1, 0): norms 5, 2 and 1.
    r = router("perturbed-cosine", dim=2, experts=2, tau_1=1.0, tau_2=0.5, temperature=0.5)
    with torch.no_grad():
        r.embedding.copy_(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
        r.bias.copy_(torch.tensor([0.0, 0.25]))
    x = torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    # 3 / ((5 + 1)(1 + 0.5)) · 2 = 2/3;   0 + 0.25
    # 12 / ((5 + 1)(3 + 0.5)) · 2 = 8/7;  6 / ((2 + 1)(3 + 0.5)) · 2 + 0.25 = 8/7 + 0.25
    want = torch.tensor([[2 / 3, 0.25], [8 / 7, 8 / 7 + 0.25]], dtype=torch.float64)
    torch.testing.assert_close(r(x).scores, want)


@pytest.mark.parametrize("name", BOTH)
def test_top_k_and_dense(name):
    x = torch.randn(7, 5)
    sparse, free, dense = (router(name, **o) for o in ({}, {"renormalise": False}, {"k": None}))
    assert sparse(x).index.shape == (7, 2)
    torch.testing.assert_close(sparse(x).weight.sum(1), torch.ones(7).double())
    assert (free(x).weight.sum(1) < 0.999).all()
    assert (free.weights_sum, sparse.weights_sum) == ("at most one", "one")
    torch.testing.assert_close(dense(x).dense(), sparse(x).gate)
    assert (dense.dense, sparse.dense) == (True, False)
    assert router(name, k=3)(x).index.shape == (7, 3)


@pytest.mark.parametrize("name", BOTH)
def test_projection(name):
    r = router(name, project=2)
    assert r.projection.shape == (2, 5)
    assert r.embedding.shape == (4, 2)
    x = torch.randn(7, 5, dtype=torch.float64)
    torch.testing.assert_close(r(x).scores, r.scores(x @ r.projection.t()))
    r(x).dense().square().sum().backward()
    assert r.projection.grad.abs().sum() > 0
    assert router(name).projection is None


@pytest.mark.parametrize("name", BOTH)
def test_temperature(name):
    x = torch.randn(7, 5, dtype=torch.float64)
    fixed, cold = router(name), router(name, temperature=0.25)
    torch.testing.assert_close(cold(x).scores, 4 * fixed(x).scores)
    assert "log_scale" not in dict(fixed.named_parameters())
    learned = router(name, learn_temperature=True)
    torch.testing.assert_close(learned(x).scores, fixed(x).scores)
    learned(x).dense().square().sum().backward()
    assert learned.log_scale.grad != 0
    with torch.no_grad():
        learned.log_scale.fill_(20.0)
    torch.testing.assert_close(learned(x).scores, 100 * fixed(x).scores)


@pytest.mark.parametrize("name", BOTH)
def test_bias(name):
    r = router(name)
    assert r.bias.tolist() == [0] * 4
    x = torch.randn(7, 5, dtype=torch.float64)
    before = r(x).scores
    with torch.no_grad():
        r.bias[2] = 3.0
    torch.testing.assert_close(r(x).scores[:, 2], before[:, 2] + 3)
    assert router(name, b0=False).bias is None


def test_start():
    wide, narrow = router(dim=8, experts=4), router(dim=2, experts=200)
    gram = wide.embedding @ wide.embedding.t()
    torch.testing.assert_close(gram, 0.32**2 * torch.eye(4).double(), rtol=1e-5, atol=1e-7)
    assert narrow.embedding.square().sum(1).mean().sqrt().item() == pytest.approx(0.32, rel=0.1)


@pytest.mark.parametrize(("which", "other"), [("tau_1", "tau_2"), ("tau_2", "tau_1")])
def test_each_tau_sits_on_its_own_norm(which, other):
    x = torch.randn(7, 5, dtype=torch.float64)
    r = router("perturbed-cosine", **{which: 0.7, other: 0.0})
    norm = r.embedding.norm(dim=1) if which == "tau_1" else x.norm(dim=1, keepdim=True)
    torch.testing.assert_close(r(x).scores, router()(x).scores * norm / (norm + 0.7))


def test_random_noise_is_in_training_only():
    r = router("perturbed-cosine", noise="random", tau_1=0.5, tau_2=0.5)
    constant = router("perturbed-cosine", tau_1=0.5, tau_2=0.5)
    assert r.stochastic
    assert not constant.stochastic
    x = torch.randn(7, 5, dtype=torch.float64)
    a, b = r(x), r(x)
    assert not torch.equal(a.gate, b.gate)
    assert torch.equal(a.scores, b.scores)  # noise-free for losses
    assert torch.equal(constant(x).gate, constant(x).gate)
    assert torch.equal(r.eval()(x).gate, constant(x).gate)


def test_random_tau_is_half_normal_around_each_norm():
    r = router("perturbed-cosine", noise="random", tau_1=0.5, tau_2=2.0)
    tau_1, tau_2 = r.taus(torch.zeros(4000, 5), random=True)
    assert tau_1.shape == (4, 1)
    assert tau_2.shape == (4000, 1)
    assert (tau_2 >= 0).all()
    assert tau_2.mean().item() == pytest.approx(2 * math.sqrt(2 / math.pi), rel=0.05)


# -- growth ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", BOTH)
def test_split_keeps_the_mass(name, bias):
    r = router(name, k=None, b0=bias)
    x = torch.randn(7, 5, dtype=torch.float64)
    before = r(x).dense()
    rows = r.split([1, 3])
    assert set(rows) == ({"embedding", "bias"} if bias else {"embedding"})
    assert rows["embedding"] == [0, 1, 2, 3, 1, 3]
    after = r(x).dense()
    assert after.shape == (7, 6)
    torch.testing.assert_close(after[:, [0, 2]], before[:, [0, 2]])
    torch.testing.assert_close(after[:, [1, 3]] + after[:, 4:], before[:, [1, 3]])
    r.split([4])
    again = r(x).dense()
    torch.testing.assert_close(again[:, 4] + again[:, 6], after[:, 4])
    torch.testing.assert_close(again.sum(1), torch.ones(7).double())


@pytest.mark.parametrize("name", BOTH)
def test_a_sparse_one_leaves_growth_to_families(name):
    r = router(name)
    assert r.split([0]) is None
    assert r.experts == 4
