"""DSelect-k against its paper: propositions, a second implementation in numpy, and each option."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from moiety.routing import build_router
from moiety.routing.dselect_k import selected
from moiety.routing.selector import entropy_terms, selector, smooth_step

quick = settings(max_examples=60, deadline=None)
widths = st.floats(0.1, 20.0)
finite = st.floats(-30.0, 30.0)
BOTH = ["dselect-k", "dselect-k-static"]


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def build(name="dselect-k-static", experts=8, dim=6, **options):
    torch.manual_seed(0)
    return build_router(name, dim=dim, experts=experts, **options).double()


def tokens(count=7, dim=6, seed=1):
    return torch.randn(
        count, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def spread(router, scale=0.6, seed=2):
    """Leave the near-uniform start: some digits on a plateau, some between."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in router.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(scale * noise)
    return router


def set_codes(router, codes, alpha=None):
    """Put a static router's selectors exactly on these codes."""
    bits = [[(code >> j) & 1 for j in range(router.digits)] for code in codes]
    with torch.no_grad():
        router.z.copy_((torch.tensor(bits, dtype=torch.float64) - 0.5) * 2 * router.width)
        if alpha is not None:
            router.alpha.copy_(torch.tensor(alpha, dtype=torch.float64))
    return router


# -- the same in numpy, straight from the formulas ------------------------------------------------


def np_step(t, b):
    cubic = -2 / b**3 * t**3 + 3 / (2 * b) * t + 0.5
    return np.where(t <= -b / 2, 0.0, np.where(t >= b / 2, 1.0, cubic))


def np_selector(z, b, codes):
    s = np_step(z, b)
    factors = [
        np.prod([s[j] if (c >> j) & 1 else 1 - s[j] for j in range(len(z))], initial=1.0)
        for c in codes
    ]
    return np.array(factors)


def np_entropy(p):
    p = p[p > 0]
    return -(p * np.log(p)).sum()


def np_gate(alpha, z, b, n):
    """Gate, entropy, mass on orphans and the code's reciprocal of one token."""
    m = z.shape[-1]
    share = np.exp(alpha - alpha.max())
    share /= share.sum()
    r = np.stack([np_selector(row, b, range(n)) for row in z])
    orphan = [np_selector(row, b, range(n, 2**m)).sum() for row in z]
    with np.errstate(divide="ignore"):
        return share @ r, sum(map(np_entropy, r)), sum(orphan), (1 / r.sum(1)).sum()


def np_logits(router, x):
    p = {name: t.detach().numpy() for name, t in router.named_parameters()}
    if router.static:
        return p["alpha"][None], p["z"][None]
    x = x.numpy()
    z = x @ p["z_weight"].T + p["z_bias"]
    return x @ p["alpha_weight"].T + p["alpha_bias"], z.reshape(len(x), router.k, router.digits)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("experts", [3, 4, 5, 8, 16, 100])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_equals_the_formulas(name, experts, k):
    x = tokens(3)
    close = {"rtol": 1e-10, "atol": 1e-10}
    # With b = 3 some digits are on a plateau; with 30 none is, and the reciprocal stays finite.
    for width, reach in ((3.0, "paper"), (30.0, "code")):
        router = spread(build(name, experts, k=k, width=width, reach=reach))
        r = router(x)
        rows = [np_gate(alpha, z, width, experts) for alpha, z in zip(*np_logits(router, x))]
        gate, entropy, *reached = (np.array(column) for column in zip(*rows))
        np.testing.assert_allclose(r.gate.detach(), gate, **close)
        np.testing.assert_allclose(r.dense().detach(), np.broadcast_to(gate, (3, experts)), **close)
        np.testing.assert_allclose(r.penalties["entropy"].item(), entropy.sum(), **close)
        expected = reached[reach == "code"].mean()
        np.testing.assert_allclose(r.penalties["reachability"].item(), expected, **close)


# -- smooth-step ----------------------------------------------------------------------------------


@quick
@given(finite, widths)
def test_smooth_step_is_the_papers_cubic(t, b):
    torch.testing.assert_close(
        smooth_step(f64(t), b), torch.from_numpy(np_step(np.array([t]), b)), rtol=0, atol=1e-12
    )


@quick
@given(finite, widths)
def test_smooth_step_is_symmetric(t, b):
    whole = smooth_step(f64(t), b) + smooth_step(f64(-t), b)
    torch.testing.assert_close(whole, f64(1.0), rtol=0, atol=1e-12)


@quick
@given(widths, st.floats(0.0, 10.0), st.sampled_from([torch.float32, torch.float64]))
def test_plateaus_are_exact_and_dead(b, beyond, dtype):
    b = float(torch.tensor(b, dtype=dtype))
    t = torch.tensor([-b / 2 - beyond, b / 2 + beyond], dtype=dtype, requires_grad=True)
    s = smooth_step(t, b)
    s.sum().backward()
    assert s.tolist() == [0.0, 1.0]
    assert t.grad.tolist() == [0.0, 0.0]


@quick
@given(widths, st.floats(-0.499, 0.499))
def test_smooth_step_has_the_papers_slope_and_is_c1(b, u):
    t = f64(u * b, -b / 2 + 1e-7 * b, b / 2 - 1e-7 * b).requires_grad_()
    smooth_step(t, b).sum().backward()
    assert t.grad[0].item() == pytest.approx(3 / (2 * b) - 6 * (u * b) ** 2 / b**3, abs=1e-9)
    assert (t.grad[1:] > 0).all()  # inside, so alive,
    assert (t.grad[1:] * b < 1e-5).all()  # and on its way to the plateau's slope of zero


def test_smooth_step_never_leaves_the_unit_interval_in_fp32():
    near = torch.linspace(0.4999, 0.5001, 20001)
    s = smooth_step(torch.cat([near, -near]), 1.0)
    assert s.min() == 0
    assert s.max() == 1
    assert (smooth_step(-near, 1.0)[near < 0.5] > 0).all()


# -- selector -------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [0, 1, 2, 3, 5])
def test_binary_digits_select_their_code(m):
    z = torch.tensor(list(itertools.product([0.0, 1.0], repeat=m))).reshape(2**m, m)
    r = selector(z, 1 - z)
    place = (z * 2 ** torch.arange(m)).sum(1).long()
    assert torch.equal(r, torch.eye(2**m)[place])


def test_selector_of_four_is_equation_3():
    r = selector(f64(0.3, 0.9), f64(0.7, 0.1))
    torch.testing.assert_close(r, f64(0.7 * 0.1, 0.3 * 0.1, 0.7 * 0.9, 0.3 * 0.9))


@quick
@given(st.integers(0, 6), widths, st.integers(0, 10**6))
def test_proposition_2_selectors_and_gates_are_distributions(m, b, seed):
    router = spread(build(experts=2**m, k=3, width=b), scale=b, seed=seed)
    weight = router(tokens(1)).weight
    assert (weight >= 0).all()
    assert weight.sum().item() == pytest.approx(1, abs=1e-12)
    assert router.weights_sum == "one"


@quick
@given(st.integers(1, 6), st.data())
def test_proposition_1_every_sparse_weight_is_a_gate(k, data):
    n = data.draw(st.sampled_from([3, 8, 16]))
    s = data.draw(st.integers(1, min(k, n)))
    at = data.draw(st.permutations(range(n)))[:s]
    mass = np.array(data.draw(st.lists(st.floats(0.05, 1), min_size=s, max_size=s)))
    wanted = np.zeros(n)
    wanted[at] = mass / mass.sum()
    at = sorted(at, reverse=True)
    # The last k − s + 1 selectors share the last expert.
    codes = [at[min(i, s - 1)] for i in range(k)]
    alpha = [
        math.log(wanted[code] / (k - s + 1 if i >= s - 1 else 1)) for i, code in enumerate(codes)
    ]
    router = set_codes(build(experts=n, k=k), codes, alpha)
    np.testing.assert_allclose(router(tokens(1)).weight[0].detach(), wanted, atol=1e-12)


@quick
@given(st.integers(0, 5), st.integers(0, 10**6))
def test_entropy_of_a_selector_is_that_of_its_digits(m, seed):
    router = spread(build(experts=2**m, k=2), seed=seed)
    s = smooth_step(router.z, 1.0)
    digits = entropy_terms(s).sum() + entropy_terms(1 - s).sum()
    torch.testing.assert_close(router(tokens(5)).penalties["entropy"], digits)


def test_entropy_has_a_finite_gradient_at_exact_zeros():
    p = torch.tensor([0.0, 1.0, 0.5], requires_grad=True)
    h = entropy_terms(p)
    h.sum().backward()
    assert h[0] == 0
    assert h[1] == 0
    torch.testing.assert_close(p.grad, torch.tensor([0.0, -1.0, math.log(2) - 1]))
    router = set_codes(build(experts=5, k=2, reach="code"), [7, 1])  # 7 has no expert
    r = router(tokens())
    penalties = r.penalties
    (r.weight.square().sum() + sum(penalties.values())).backward()
    assert torch.isfinite(penalties["reachability"])
    assert all(torch.isfinite(p.grad).all() for p in router.parameters())


# -- what a gate selects --------------------------------------------------------------------------


@quick
@given(st.integers(2, 33), st.data())
def test_a_binary_gate_selects_at_most_k_and_skips_the_rest(n, data):
    k = data.draw(st.integers(1, 5))
    codes = data.draw(st.lists(st.integers(0, n - 1), min_size=k, max_size=k))
    router = set_codes(build(experts=n, k=k), codes)
    r = router(tokens(3))
    assert r.active[0].nonzero().flatten().tolist() == sorted(set(codes))
    assert selected(r).tolist() == [len(set(codes))] * 3
    facts = router.diagnostics()
    assert facts["is_binary"]
    assert facts["selected"] == sorted(set(codes))
    assert facts["count"] == len(set(codes)) <= k
    np.testing.assert_allclose(facts["weights"], r.dense()[0].detach())


def test_an_underflowing_softmax_leaves_an_expert_active():
    router = set_codes(build(experts=4, k=2), [0, 3], alpha=[0.0, -1e4])
    r = router(tokens(1))
    assert r.weight[0, 3] == 0
    assert r.active[0].tolist() == [True, False, False, True]


def test_active_follows_the_plateaus_token_by_token():
    router = spread(build("dselect-k", 8, k=2), scale=0.5)
    x = tokens(50)
    r = router(x)
    _, z = np_logits(router, x)
    alive = np.stack([[np_selector(row, 1.0, range(8)) > 0 for row in t] for t in z]).any(1)
    assert np.array_equal(r.active.numpy(), alive)
    assert 0 < r.active.sum() < r.active.numel()
    assert torch.equal(selected(r), r.active.sum(1))
    binary = (np.abs(z) >= 0.5).all((1, 2))
    assert np.array_equal(router.is_binary(x).numpy(), binary)
    with torch.no_grad():
        router.z_weight.mul_(1e3)
    assert router.is_binary(x).float().mean() > 0.9
    assert selected(router(x[router.is_binary(x)])).max() <= 2


def test_a_new_gate_is_not_binary_and_uses_all():
    router = build(experts=8)
    assert not router.is_binary()
    assert router.diagnostics()["selected"] == list(range(8))


def test_a_digit_on_a_plateau_never_learns_again():
    router = build(experts=4, k=1)
    with torch.no_grad():
        router.z.copy_(f64(0.5, 0.1)[None])
    r = router(tokens())
    (r.weight * f64(1.0, 2.0, 3.0, 5.0)).sum().backward()
    assert router.z.grad[0, 0] == 0
    assert router.z.grad[0, 1] != 0


def test_number_of_parameters():
    count = lambda router: sum(p.numel() for p in router.parameters())  # noqa: E731
    assert count(build(experts=16, k=3)) == 3 + 3 * 4
    assert count(build("dselect-k", experts=16, k=3, dim=10)) == 3 * 10 + 3 * 4 * 10 + 3 + 12
    assert count(build(experts=100, k=2)) == 2 + 2 * 7


def test_start_is_that_of_the_papers_code():
    router = build("dselect-k", experts=16, k=8, dim=50, width=10.0)
    for z in (router.z_weight, router.z_bias):
        assert 0.08 < z.abs().max() <= 0.1
    for alpha in (router.alpha_weight, router.alpha_bias):
        assert 0.03 < alpha.abs().max() <= 0.05
    router = build(experts=2**20, k=8, width=0.5)
    assert 0.004 < router.z.abs().max() <= 0.005


@pytest.mark.parametrize("name", BOTH)
def test_one_expert_and_more_selectors_than_experts(name):
    r = build(name, experts=1, k=3)(tokens(4))
    torch.testing.assert_close(r.dense(), torch.ones(4, 1, dtype=torch.float64))
    assert r.penalties["entropy"] == 0
    r = build(name, experts=3, k=5)(tokens(4))
    assert r.dense().shape == (4, 3)
    r = build(name, experts=4)(tokens(0))
    assert r.dense().shape == (0, 4)
    assert all(torch.isfinite(p) for p in r.penalties.values())


def test_gate_is_continuous_where_top_k_jumps():
    ours, theirs = set_codes(build(experts=8, k=2), [1, 6]), build("top-k-static", 8, k=2)
    largest = {"ours": 0.0, "top-k": 0.0}
    last = {}
    for value in np.linspace(-0.7, 0.7, 1401):
        with torch.no_grad():
            ours.z[0, 1] = value
            theirs.weight.copy_(f64(0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.0))
            theirs.weight[7] = value
        for key, router in (("ours", ours), ("top-k", theirs)):
            gate = router(tokens(1)).dense()[0].detach()
            largest[key] = max(largest[key], (gate - last.get(key, gate)).abs().max().item())
            last[key] = gate
    assert largest["ours"] < 2e-3  # slope at most 3/2, steps of 1e-3
    assert largest["top-k"] > 0.4


# -- penalties ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reach", ["paper", "code"])
def test_reachability_moves_mass_to_the_experts(reach):
    router = build(experts=5, k=3, reach=reach)
    optimizer = torch.optim.SGD(router.parameters(), lr=0.05)
    before = router(tokens(1)).weight.sum().item()
    assert before < 0.7
    for _ in range(200):
        optimizer.zero_grad()
        router(tokens(1)).penalties["reachability"].backward()
        optimizer.step()
    assert router(tokens(1)).weight.sum().item() > 0.999
    assert router.weights_sum == "at most one"
    assert router(tokens(1)).penalties["reachability"].item() == pytest.approx(
        3.0 if reach == "code" else 0.0, abs=0.01
    )


@pytest.mark.parametrize("name", BOTH)
def test_reachability_of_a_power_of_two_is_constant(name):
    assert build(name, experts=8)(tokens()).penalties["reachability"] == 0
    found = spread(build(name, experts=8, k=3, reach="code"))(tokens()).penalties["reachability"]
    assert found.item() == pytest.approx(3)


def test_default_balance():
    assert build(experts=8).default_balance() == {"entropy": 1e-6}
    assert build("dselect-k", experts=9).default_balance() == {"entropy": 1e-6, "reachability": 1.0}


@pytest.mark.parametrize("entropy", ["sum", "mean"])
def test_padding_does_not_count(entropy):
    router = spread(build("dselect-k", experts=5, entropy=entropy, slots=2, k=3))
    x = tokens(9)
    mask = torch.arange(9) % 3 > 0
    padded, plain = router(x, mask), router(x[mask])
    torch.testing.assert_close(padded.penalties, plain.penalties)
    torch.testing.assert_close(padded.lost, plain.lost)
    everything = router(x)
    assert everything.penalties["entropy"] != plain.penalties["entropy"]
    assert not padded.active[~mask].any()


def test_entropy_sum_is_mean_times_tokens():
    by_sum, by_mean = (spread(build("dselect-k", entropy=e)) for e in ("sum", "mean"))
    total, mean = (r(tokens(7)).penalties["entropy"] for r in (by_sum, by_mean))
    torch.testing.assert_close(total, 7 * mean)


# -- schedules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_entropy_ramp(name):
    router, plain = build(name, entropy_steps=4), build(name)
    full = plain(tokens()).penalties["entropy"]
    seen = [(router(tokens()).penalties["entropy"] / full).item() for _ in range(6)]
    assert seen == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1])


def test_evaluation_does_not_count_and_sees_the_present_step():
    router = build(entropy_steps=4)
    router(tokens())
    router.eval()
    seen = [router(tokens()).penalties["entropy"].item() for _ in range(3)]
    assert router.calls == 1
    full = build()(tokens()).penalties["entropy"].item()
    assert seen == pytest.approx([full / 4] * 3)


@pytest.mark.parametrize("name", BOTH)
def test_annealing_reaches_its_end_and_makes_the_gate_binary(name):
    router = build(name, width=2.0, width_end=1e-9, width_steps=8)
    x = tokens()
    seen = []
    for _ in range(9):
        seen.append(float(router.width_at(router.calls, torch.float64)))
        r = router(x)
    np.testing.assert_allclose(seen, np.geomspace(2.0, 1e-9, 9))
    binary = router.is_binary() if router.static else router.is_binary(x).all()
    assert binary
    assert selected(r).max() <= router.k
    assert set(selected(build(name, width=2.0)(x)).tolist()) == {8}


def test_annealing_ends_at_a_hundredth_unless_told():
    router = build(width=3.0, width_steps=1)
    router(tokens())
    assert router.diagnostics()["width"] == pytest.approx(0.03)


def test_a_recomputed_forward_neither_counts_nor_sees_another_width():
    x = tokens()
    plain, repeated = (build("dselect-k", width_steps=3, entropy_steps=3) for _ in range(2))

    def loss(router, x):
        r = router(x)
        return (r.weight.square().sum() + r.penalties["entropy"])[None]

    for _ in range(3):
        loss(plain, x).sum().backward()
        checkpoint(loss, repeated, x, use_reentrant=False).sum().backward()
    assert repeated.calls == plain.calls == 3
    torch.testing.assert_close(repeated.z_weight.grad, plain.z_weight.grad)


# -- the other options ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_slots_keep_the_largest_and_tell_what_is_lost(name):
    full = spread(build(name, k=3), scale=0.2)
    cut = spread(build(name, k=3, slots=3), scale=0.2)
    x = tokens()
    gate, r = full(x).dense().detach(), cut(x)
    kept = gate.topk(3, dim=1).values
    assert r.index.shape == ((1, 3) if cut.static else (7, 3))
    torch.testing.assert_close(r.dense().detach().topk(3).values, kept)
    assert r.lost.item() == pytest.approx(1 - (kept.sum() / gate.sum()).item())
    assert r.lost > 0.05
    assert cut.weights_sum == "at most one"
    assert full(x).lost is None


def test_slots_that_suffice_lose_nothing():
    router = set_codes(build(experts=8, k=2, slots=3), [6, 3])
    r = router(tokens())
    assert r.lost == 0
    assert r.active.sum() == 2
    assert r.dense()[0].nonzero().flatten().tolist() == [3, 6]
    assert build(experts=8, slots=8).weights_sum == "one"
    with pytest.raises(ValueError, match="slots = 9"):
        build(experts=8, slots=9)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("experts", [5, 16])
def test_random_codes_permute_the_natural_ones(name, experts):
    codes = 8 if experts == 5 else 16
    natural = spread(build(name, codes))
    drawn = [spread(build(name, experts, codes="random", seed=seed)) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0].code, drawn[1].code)
    assert not torch.equal(drawn[0].code, drawn[2].code)
    for router in drawn:
        assert sorted(router.code.tolist()) == list(range(codes))
        own = router.code[:experts]
        assert own.tolist() != list(range(experts))
        r, all_codes = router(tokens()), natural(tokens()).gate
        torch.testing.assert_close(r.gate, all_codes[:, own])
    default = build(name, experts, codes="random")
    assert torch.equal(default.code, drawn[0].code)


def test_random_codes_leave_the_orphans_to_reachability():
    router = spread(build(experts=5, codes="random", seed=3, k=2))
    r = router(tokens(1))
    share = router.alpha.softmax(0)
    orphan = spread(build(experts=8, k=2))(tokens(1)).gate[0, router.code[5:]].sum()
    torch.testing.assert_close(r.gate.sum() + orphan, share.sum())
    even = set_codes(router, [int(router.code[5]), int(router.code[0])])
    assert even(tokens(1)).penalties["reachability"] == 1


def test_an_option_that_would_be_ignored_raises():
    with pytest.raises(ValueError, match=r"width_end = 0\.1 has no effect without width_steps"):
        build(width_end=0.1)
    with pytest.raises(ValueError, match="seed = 3 has no effect without codes"):
        build("dselect-k", seed=3)
    with pytest.raises(ValueError, match="no option 'entropy'"):
        build("dselect-k-static", entropy="mean")


# -- machinery ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_gradients_away_from_the_kinks(name):
    router = spread(build(name, experts=5, k=2, dim=3, reach="code", width=4.0), scale=0.3)
    x = tokens(3, dim=3).requires_grad_()
    names, values = zip(*router.named_parameters())

    def run(x, *values):
        r = torch.func.functional_call(router, dict(zip(names, values)), (x,))
        return r.weight, r.penalties["entropy"], r.penalties["reachability"]

    inputs = [v.detach().clone().requires_grad_() for v in values]
    assert torch.autograd.gradcheck(run, (x, *inputs))


@pytest.mark.parametrize("name", BOTH)
def test_float64_in_float64_out(name):
    router = build_router(name, dim=6, experts=8)
    for dtype in (torch.float32, torch.float64):
        r = router(tokens().to(dtype))
        assert r.weight.dtype == r.penalties["entropy"].dtype == dtype
    assert router.bfloat16()(tokens().bfloat16()).weight.dtype == torch.float32
    if router.static:
        assert router.diagnostics()["count"] == 8


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("slots", [None, 2])
def test_compiles_as_one_graph(name, slots):
    options = {"experts": 5, "width_steps": 3, "entropy_steps": 3, "slots": slots}
    plain, whole = build(name, **options), build(name, **options)
    torch.compiler.reset()  # its cache of earlier routers counts against the recompile limit
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        a, b = plain(tokens()), compiled(tokens())
        torch.testing.assert_close((a.weight, a.penalties), (b.weight, b.penalties))
        assert torch.equal(a.active, b.active)
    assert whole.calls == 3


def test_bad_values_are_named():
    with pytest.raises(ValueError, match="k must be a whole number, at least 1"):
        build(k=0)
    with pytest.raises(ValueError, match="reach must be one of"):
        build(reach="nowhere")
    router = build()
    with torch.no_grad():
        router.z[0, 0] = math.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        router(tokens())
