"""hash and random: nothing learned, even weights, seeds."""

from __future__ import annotations

import pytest
import torch

from moiety.routing import build_router

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(64)


def router(name, **options):
    return build_router(name, **({"dim": 8, "experts": 8} | options))


@pytest.mark.parametrize("name", ["hash", "random"])
def test_nothing_learned_and_even_weights(name):
    r = router(name, k=3)
    assert not list(r.parameters())
    routing = r(X)
    assert routing.probs is None
    assert torch.equal(routing.weight, torch.full((64, 3), 1 / 3))
    for row in routing.index.tolist():
        assert len(set(row)) == 3
        assert set(row) <= set(range(8))
    assert r(X.double()).weight.dtype == torch.float64


def test_the_same_id_goes_to_the_same_experts_whatever_the_token():
    r = router("hash", k=2)
    ids = torch.tensor([5, 9, 5, 70000, -100, 5])
    a, b = r(X[:6], ids=ids), r(X[6:12], ids=ids)
    assert torch.equal(a.index, b.index)
    assert torch.equal(a.index[0], a.index[2])
    assert torch.equal(a.index, router("hash", k=2)(X[:6], ids=ids.int()).index)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("experts", [1, 3, 8, 64])
def test_consecutive_ids_are_spread_exactly(experts, k):
    k = min(k, experts)
    r = router("hash", experts=experts, k=k)
    ids = torch.arange(experts * 50)
    assert r(torch.zeros(len(ids), 8), ids=ids).load().tolist() == [50 * k] * experts


def test_a_regular_sample_of_ids_is_spread_too():
    # Every eighth id has the same place in its block: only the mixing can spread them.
    ids = torch.arange(0, 8 * 4000, 8)
    load = router("hash")(torch.zeros(4000, 8), ids=ids).load()
    assert load.min() > 420  # 500 ± 4 standard deviations of 21
    assert load.max() < 580


def test_seeds_give_other_hashes():
    a, b = (router("hash", seed=s)(X, ids=IDS).index for s in (0, 1))
    assert 0.02 < (a == b).float().mean() < 0.4
    a, b = (router("hash", seed=s)(X).index for s in (0, 1))
    assert not torch.equal(a, b)


def test_without_ids_the_direction_decides():
    r = router("hash")
    assert torch.equal(r(X).index, r(3 * X).index)
    assert torch.equal(r(X).index, router("hash")(X).index)
    assert len(r(X).index.unique()) == 8
    assert not torch.equal(r(X).index, r(X, ids=IDS).index)
    assert "projection" in r.state_dict()


def test_hash_is_the_same_in_training_and_eval():
    r = router("hash")
    assert torch.equal(r.train()(X).index, r.eval()(X).index)


def test_ids_must_be_whole():
    with pytest.raises(ValueError, match="whole numbers"):
        router("hash")(X, ids=IDS.float())


def test_random_draws_anew_in_training():
    r = router("random", k=2)
    torch.manual_seed(0)
    a, b = r(X).index, r(X).index
    assert not torch.equal(a, b)
    torch.manual_seed(0)
    assert torch.equal(r(X).index, a)
    load = r(X.repeat(100, 1)).load()  # 1600 each, standard deviation 35
    assert load.min() > 1440
    assert load.max() < 1760


def test_random_in_eval_is_a_function_of_position_and_seed():
    r = router("random", k=2).eval()
    a = r(X).index
    assert torch.equal(a, r(-X).index)
    assert torch.equal(a[:10], r(X[:10]).index)
    assert not torch.equal(a, router("random", k=2, seed=1).eval()(X).index)
    load = r(X.repeat(100, 1)).load()
    assert load.min() > 1440
    assert load.max() < 1760
    assert r.causal
