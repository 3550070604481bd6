"""What holds for each of the token-by-token routers here: shapes, types, compilation, noise."""

from __future__ import annotations

import pytest
import torch

from moiety.routing import build_router, describe

CASES = [
    ("noisy-top-k", {}),
    ("noisy-top-k", {"noise": "learned"}),
    ("switch", {}),
    ("switch", {"overflow": "priority"}),
    ("expert-choice", {}),
    ("sigmoid-balanced", {}),
    ("cosine", {}),
    ("cosine", {"k": None, "project": 4}),
    ("perturbed-cosine", {"noise": "random"}),
    ("tree", {}),
    ("tree", {"k": 2}),
    ("hash", {"k": 2}),
    ("random", {"k": 2}),
]
NAMES = sorted({name for name, _ in CASES})
each = pytest.mark.parametrize(("name", "options"), CASES)


def router(name, options, experts=4):
    torch.manual_seed(0)
    return build_router(name, dim=8, experts=experts, **options)


@each
def test_compiled_whole_it_decides_the_same(name, options):
    torch._dynamo.reset()
    r = router(name, options)

    def decide(x, mask, group):
        routing = r(x, mask, None, group)
        return routing.index, routing.weight, routing.active, routing.probs

    # "eager" still traces: a break in the graph or a look at data on the host raises.
    compiled = torch.compile(decide, fullgraph=True, dynamic=True, backend="eager")
    for tokens in (12, 7):
        x, mask = torch.randn(tokens, 8), torch.arange(tokens) % 3 > 0
        torch.manual_seed(1)
        want = decide(x, mask, 5)
        torch.manual_seed(1)
        torch.testing.assert_close(compiled(x, mask, 5), want)


@each
@pytest.mark.parametrize("training", [True, False])
def test_double_in_double_out(name, options, training):
    r = router(name, options).train(training)
    routing = r(torch.randn(9, 8, dtype=torch.float64))
    for field in ("weight", "scores", "probs", "gate", "threshold"):
        value = getattr(routing, field)
        assert value is None or value.dtype == torch.float64, field
    assert r(torch.randn(9, 8, dtype=torch.bfloat16)).weight.dtype == torch.float32


@each
@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("masked", [True, False])
def test_few_tokens(name, options, tokens, masked):
    r = router(name, options)
    x = torch.randn(tokens, 8)
    for training in (True, False):
        routing = r.train(training)(x, torch.zeros(tokens, dtype=torch.bool) if masked else None)
        assert routing.dense().shape == (tokens, 4)
        routing.plan()
        if masked:
            assert routing.load().sum() == 0
        else:
            assert (routing.dense().sum(1) <= 1 + 1e-6).all()


@pytest.mark.parametrize("name", NAMES)
def test_one_expert(name):
    options = {"k": 1} if "k" in describe(name).options else {}
    r = router(name, options, experts=1)
    for training in (True, False):
        torch.testing.assert_close(r.train(training)(torch.randn(3, 8)).dense(), torch.ones(3, 1))


@pytest.mark.parametrize("name", [n for n in NAMES if "k" in describe(n).options])
def test_too_large_a_k(name):
    with pytest.raises(ValueError, match=r"k = 5 experts a token, but there are only 4"):
        router(name, {"k": 5})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [n for n in NAMES if n != "random"])
def test_bad_tokens_raise(name, bad):
    x = torch.randn(5, 8)
    x[2] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        router(name, {})(x)


# `random` scores nothing; without gates there are no ties either.
@pytest.mark.parametrize("name", ["noisy-top-k", "switch", "sigmoid-balanced", "cosine", "tree"])
def test_ties_go_to_the_lower_id(name):
    options = {"k": 2} if "k" in describe(name).options else {}
    r = router(name, options).eval()
    with torch.no_grad():
        for parameter in r.parameters():
            parameter.zero_()
    routing = r(torch.randn(6, 8))
    want = list(range(routing.index.shape[1]))
    assert routing.index.tolist() == [want] * 6


@each
def test_eval_repeats_itself(name, options):
    r = router(name, options).eval()
    x = torch.randn(9, 8)
    assert torch.equal(r(x).dense(), r(x).dense())


@each
def test_training_noise_is_declared(name, options):
    r = router(name, options)
    x = torch.randn(40, 8)
    assert torch.equal(r(x).dense(), r(x).dense()) == (not r.stochastic)


@each
def test_causal_routers_look_only_back(name, options):
    r = router(name, options).eval()
    x = torch.randn(40, 8)
    changed = torch.cat([x[:20], -3 * x[20:]])
    same = torch.equal(r(x).dense()[:20], r(changed).dense()[:20])
    assert same == r.causal
