"""The static baselines of DSelect-k: top-k, softmax, softmax selectors and the Gumbel gate."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety.routing import build_router, describe
from moiety.routing.registry import find

STATIC = [
    "dselect-k-static",
    "gumbel-static",
    "softmax-selectors-static",
    "softmax-static",
    "top-k-static",
]
quick = settings(max_examples=40, deadline=None)


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def build(name, experts=5, **options):
    torch.manual_seed(0)
    return build_router(name, dim=4, experts=experts, **options).double()


def tokens(count=3):
    generator = torch.Generator().manual_seed(1)  # not the one that a router draws from
    return torch.randn(count, 4, dtype=torch.float64, generator=generator)


def fill(parameter, *values):
    with torch.no_grad():
        parameter.copy_(f64(*values))


def np_softmax(a, axis=0):
    e = np.exp(a - a.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


# -- what all static gates keep -------------------------------------------------------------------


@pytest.mark.parametrize("name", STATIC)
def test_one_row_for_all_tokens_whatever_they_are(name):
    assert find(name).static
    assert find(name).causal
    router = build(name).eval()
    a, b = router(tokens()), router(-7 * tokens())
    assert a.by == "all"
    assert a.index.shape[0] == a.weight.shape[0] == 1
    assert torch.equal(a.weight, b.weight)
    assert a.dense().shape == (3, 5)
    assert torch.equal(a.dense()[0], a.dense()[2])
    assert router(tokens(0)).dense().shape == (0, 5)
    total = a.weight.sum().item()
    if router.weights_sum == "one":
        assert total == pytest.approx(1)
    assert total <= 1 + 1e-12


@pytest.mark.parametrize("name", STATIC)
def test_float64_in_float64_out(name):
    router = build_router(name, dim=4, experts=5)
    for dtype in (torch.float32, torch.float64):
        r = router(tokens().to(dtype))
        terms = [r.weight, r.gate, r.probs, *r.penalties.values()]
        assert {t.dtype for t in terms} == {dtype}


@pytest.mark.parametrize("name", STATIC)
def test_compiles_as_one_graph(name):
    plain, whole = build(name), build(name)
    torch.compiler.reset()  # its cache of earlier routers counts against the recompile limit
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    for router in (plain, whole):
        router.train(name != "gumbel-static")
    a, b = plain(tokens()), compiled(tokens())
    torch.testing.assert_close((a.weight, a.penalties), (b.weight, b.penalties))
    whole.train()
    compiled(tokens()).weight.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in whole.parameters())


@pytest.mark.parametrize("name", STATIC)
def test_padding_is_kept_out(name):
    router = build(name).eval()
    mask = torch.tensor([True, False, True])
    r = router(tokens(), mask)
    assert r.dense()[1].eq(0).all()
    assert r.dense()[0].any()
    torch.testing.assert_close(r.penalties, router(tokens()).penalties)


@pytest.mark.parametrize("name", STATIC)
def test_facts_agree_with_the_decision(name):
    router = build(name).eval()
    found, r = router.diagnostics(), router(tokens())
    np.testing.assert_allclose(found["weights"], r.dense()[0].detach())
    assert found["selected"] == r.choice()[0].nonzero().flatten().tolist()
    assert found["count"] == len(found["selected"])


@pytest.mark.parametrize("name", STATIC)
def test_documented(name):
    told = describe(name)
    assert told.paper
    assert told.equation
    assert told.summary.endswith(".")
    assert all(option.rule.alt is not None for option in told.options.values())


@pytest.mark.parametrize("name", [*STATIC, "dselect-k"])
def test_every_option_changes_something(name):
    for option in describe(name).options.values():
        given = option.rule.given
        assert trace(name, **given) != trace(name, **given, **{option.name: option.rule.alt})


def trace(name, **options):
    """All that can be seen of a router in three training calls and one in eval."""
    router = build(name, **options)
    seen = [(key, value.tolist()) for key, value in router.state_dict().items()]
    for training in (True, True, True, False):
        torch.manual_seed(2)
        r = router.train(training)(tokens())
        fields = (r.index, r.weight, r.active, r.probs, r.scores, *r.penalties.values())
        seen += [None if f is None else f.tolist() for f in fields]
    return seen


# -- top-k ----------------------------------------------------------------------------------------


@quick
@given(st.lists(st.integers(-20, 20), min_size=5, max_size=5, unique=True), st.integers(1, 5))
def test_top_k_is_the_softmax_of_the_k_largest(values, k):
    router = build("top-k-static", k=k)
    logits = np.array(values) / 4
    fill(router.weight, *logits)
    kept = np.argsort(-logits)[:k]
    wanted = np.zeros(5)
    wanted[kept] = np_softmax(logits[kept])
    r = router(tokens())
    assert r.index.shape == (1, k)
    assert r.index[0].tolist() == kept.tolist()
    np.testing.assert_allclose(r.dense()[0].detach(), wanted, atol=1e-12)


def test_top_k_needs_as_many_experts_and_n_parameters():
    with pytest.raises(ValueError, match="k = 6 experts"):
        build("top-k-static", k=6)
    assert [p.numel() for p in build("top-k-static").parameters()] == [5]


# -- softmax --------------------------------------------------------------------------------------


def test_softmax_is_a_softmax():
    router = build("softmax-static")
    fill(router.weight, 0.0, 1.0, -2.0, 0.5, 3.0)
    wanted = np_softmax(np.array([0.0, 1.0, -2.0, 0.5, 3.0]))
    np.testing.assert_allclose(router(tokens()).dense()[1].detach(), wanted)


@pytest.mark.parametrize("name", ["softmax-static", "softmax-selectors-static"])
def test_a_grown_expert_shares_its_parents_weight(name):
    router = build(name)
    before = router(tokens()).dense()[0].detach()
    for parents in ([3, 1], [3]):  # twice, so that shifts add up
        rows = router.split(parents)["weight"]
    after = router(tokens()).dense()[0].detach()
    assert rows == [*range(7), 3]
    assert router.experts == 8
    family = [0, 1, 2, 3, 4, 3, 1, 3]
    together = torch.zeros(5, dtype=torch.float64).index_add(0, torch.tensor(family), after)
    torch.testing.assert_close(together, before)
    torch.testing.assert_close(after[5], before[3] / 2)
    torch.testing.assert_close(after[7], before[3] / 4)


# -- softmax selectors ----------------------------------------------------------------------------


def test_selectors_equal_the_formula():
    router = build("softmax-selectors-static", k=3, temperature=0.3)
    gamma, alpha = router.weight.detach().numpy(), router.alpha.detach().numpy()
    p = np_softmax(gamma / 0.3)
    r = router(tokens())
    np.testing.assert_allclose(r.weight[0].detach(), p @ np_softmax(alpha), atol=1e-12)
    assert r.penalties["entropy"].item() == pytest.approx(-(p * np.log(p)).sum(), abs=1e-12)
    assert r.active is None
    assert r.index[0].tolist() == list(range(5))


def test_entropy_makes_selectors_one_hot():
    router = build("softmax-selectors-static")
    optimizer = torch.optim.SGD(router.parameters(), lr=5.0)
    for _ in range(300):
        optimizer.zero_grad()
        router(tokens()).penalties["entropy"].backward()
        optimizer.step()
    assert router(tokens()).penalties["entropy"] < 0.05
    assert router.default_balance() == {"entropy": 0.01}


def test_annealing_makes_selectors_one_hot():
    router = build(
        "softmax-selectors-static",
        mode="anneal",
        temperature=1.0,
        temperature_end=1e-8,
        anneal_steps=4,
    )
    gamma, alpha = router.weight.detach().numpy(), np_softmax(router.alpha.detach().numpy())
    for temperature in (1.0, 1e-2, 1e-4, 1e-6, 1e-8, 1e-8):
        r = router(tokens())
        wanted = np_softmax(gamma / temperature) @ alpha
        np.testing.assert_allclose(r.weight[0].detach(), wanted, atol=1e-9)
    assert r.penalties["entropy"].item() == pytest.approx(0)
    assert router.default_balance() == {}


def test_eval_keeps_the_present_temperature():
    router = build("softmax-selectors-static", mode="anneal", anneal_steps=16)
    router(tokens())
    router.eval()
    gamma, alpha = router.weight.detach().numpy(), np_softmax(router.alpha.detach().numpy())
    for _ in range(2):
        weight = router(tokens()).weight[0].detach()
        np.testing.assert_allclose(weight, np_softmax(gamma / 0.1) @ alpha, atol=1e-9)
    assert router.calls == 1


def test_the_last_temperature_is_the_papers_by_default_and_finite():
    router = build_router(
        "softmax-selectors-static", dim=4, experts=5, mode="anneal", anneal_steps=1
    )
    for _ in range(2):
        r = router(tokens().float())
    (r.weight.square().sum() + r.penalties["entropy"]).backward()
    assert router.temperature_end == 1e-16
    assert torch.isfinite(router.weight.grad).all()
    assert (r.weight > 0).sum() <= 2


def test_annealing_options_without_annealing_raise():
    with pytest.raises(ValueError, match="anneal_steps = 5 has no effect without mode"):
        build("softmax-selectors-static", anneal_steps=5)


# -- gumbel ---------------------------------------------------------------------------------------


def test_gumbel_training_draws_bernoulli():
    router = build("gumbel-static", temperature=0.5)
    p = np.array([0.05, 0.3, 0.5, 0.8, 0.99])
    fill(router.weight, *np.log(p / (1 - p)))
    share = router.alpha.softmax(0).detach()
    torch.manual_seed(3)
    drawn = torch.stack([router(tokens(1)).weight[0].detach() / share for _ in range(4000)])
    assert set(drawn.round(decimals=12).unique().tolist()) == {0.0, 1.0}
    np.testing.assert_allclose(drawn.mean(0), p, atol=4 * 0.5 / math.sqrt(4000))
    pairs = np.corrcoef(drawn.T)
    assert np.abs(pairs - np.eye(5)).max() < 0.1  # a coin for each expert
    r = router(tokens())
    np.testing.assert_allclose(r.probs[0].detach(), share.numpy() * p)


def test_gumbel_gradient_is_that_of_the_binary_concrete():
    router = build("gumbel-static", temperature=0.7)
    fill(router.weight, -1.0, -0.5, 0.0, 0.5, 1.0)
    torch.manual_seed(4)
    r = router(tokens())
    torch.manual_seed(4)
    u = torch.rand(5, dtype=torch.float64)
    soft = torch.sigmoid((router.weight.detach() + u.log() - (1 - u).log()) / 0.7)
    value = f64(1.0, -2.0, 3.0, 4.0, -5.0)
    (r.weight[0] * value).sum().backward()
    share = router.alpha.softmax(0).detach()
    torch.testing.assert_close(router.weight.grad, value * share * soft * (1 - soft) / 0.7)
    off = r.weight[0] == 0
    assert off.any()
    assert (router.weight.grad[off] != 0).all()
    assert r.active is None  # so an expert with U = 0 is computed


def test_gumbel_eval_keeps_more_likely_than_not_and_never_draws():
    router = build("gumbel-static").eval()
    fill(router.weight, -1.0, 0.0, 1e-9, 0.5, 3.0)
    x, state = tokens(), torch.get_rng_state()
    a, b = router(x), router(x)
    assert torch.equal(a.weight, b.weight)
    assert a.active[0].tolist() == [False, False, True, True, True]
    assert a.load().tolist() == [0, 0, 3, 3, 3]
    kept = router.alpha.softmax(0) * f64(0, 0, 1, 1, 1)
    torch.testing.assert_close(a.dense()[0], kept)  # not renormalised
    assert a.weight.sum() < 0.7
    assert torch.equal(torch.get_rng_state(), state)
    assert router.stochastic


def test_gumbel_sparsity_is_bounded_in_gradient_and_lowers_p():
    router = build("gumbel-static")
    fill(router.weight, -2000.0, -1.0, 0.0, 1.0, 200.0)  # σ(−2000) is 0 in float64
    found = router(tokens()).penalties["sparsity"]
    found.backward()
    p = torch.sigmoid(router.weight.detach())
    assert found.item() == pytest.approx(-2000 + p[1:].log().sum().item())
    torch.testing.assert_close(router.weight.grad, 1 - p)
    assert router.default_balance() == {"sparsity": 1e-3}
    torch.optim.SGD([router.weight], lr=1.0).step()
    assert (torch.sigmoid(router.weight)[1:4] < p[1:4]).all()


def test_gumbel_starts_with_everybody():
    router = build("gumbel-static", start=0.7)
    torch.testing.assert_close(router.weight.sigmoid(), torch.full((5,), 0.7, dtype=torch.float64))
    assert router.eval()(tokens()).active.all()
