"""tree: leaves sum to one, paths, growth."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety.routing import build_router
from moiety.routing.tree import balanced

X = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))


def router(experts=5, **options):
    torch.manual_seed(0)
    return build_router("tree", dim=5, experts=experts, **options)


@pytest.mark.parametrize("experts", [1, 2, 3, 4, 5, 7, 8, 13])
def test_leaves_sum_to_one_and_the_tree_is_balanced(experts):
    routing = router(experts)(X)
    torch.testing.assert_close(routing.dense().sum(1), torch.ones(9))
    assert (routing.dense() > 0).all()
    depth = balanced(experts).abs().sum(1)
    assert depth.max() - depth.min() <= 1
    assert balanced(experts).shape == (experts, experts - 1)


def test_a_leaf_is_the_product_of_its_path():
    # Three leaves: node 0 parts {0, 1} from {2}, node 1 parts 0 from 1.
    r = router(3)
    with torch.no_grad():
        r.bias.copy_(torch.tensor([0.3, -0.2]))
    a, b = torch.sigmoid(X @ r.weight.t() + r.bias).unbind(1)
    want = torch.stack([a * b, a * (1 - b), 1 - a], 1)
    routing = r(X)
    torch.testing.assert_close(routing.dense(), want)
    torch.testing.assert_close(routing.scores, want.log())


def test_far_from_zero_it_stays_finite():
    r = router(8)
    x = (1e4 * X).requires_grad_()
    routing = r(x)
    assert (routing.scores < -1000).any()  # the product would be zero, and its log infinite
    torch.testing.assert_close(routing.dense().sum(1), torch.ones(9))
    routing.scores.sum().backward()
    assert x.grad.isfinite().all()


def test_k_chooses_the_likeliest_leaves():
    soft = router()(X)
    hard = router(k=2)(X)
    assert torch.equal(hard.index, soft.dense().topk(2).indices)
    torch.testing.assert_close(hard.weight.sum(1), torch.ones(9))
    free = router(k=2, renormalise=False)
    torch.testing.assert_close(free(X).weight, soft.dense().topk(2).values)
    assert (free.weights_sum, router(k=2).weights_sum) == ("at most one", "one")
    assert (router().dense, free.dense) == (True, False)


def test_a_sparse_tree_leaves_growth_to_families():
    r = router(k=2)
    assert r.split([0]) is None
    assert r.experts == 5


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.lists(st.integers(0, 10**6), min_size=1, max_size=4), st.data())
def test_any_number_of_splits_keeps_the_mass(experts, seeds, data):
    r = router(experts)
    for seed in seeds:
        torch.manual_seed(seed)
        parents = data.draw(
            st.lists(st.integers(0, r.experts - 1), min_size=1, max_size=3, unique=True)
        )
        old = r.experts
        before = r(X).dense()
        rows = r.split(parents)
        assert rows["weight"] == rows["bias"] == [*range(old - 1), *[-1] * len(parents)]
        after = r(X).dense()
        assert after.shape == (9, old + len(parents))
        pair = after[:, :old].clone()
        pair[:, parents] += after[:, old:]
        torch.testing.assert_close(pair, before)
        assert r.weight.shape[0] == r.bias.shape[0] == r.sign.shape[1] == r.experts - 1


def test_a_split_is_about_even_but_differs_between_tokens():
    r = router()
    r.split([2])
    share = r(X).dense()[:, 5] / (r(X).dense()[:, 2] + r(X).dense()[:, 5])
    assert (share - 0.5).abs().max() < 0.05
    assert share.std() > 1e-4


def test_old_rows_stay_and_gradient_reaches_new_ones():
    r = router()
    weight = r.weight.detach().clone()
    r.split([1])
    assert torch.equal(r.weight[:4], weight)
    r(X).dense()[:, 1].sum().backward()
    assert r.weight.grad[4].abs().sum() > 0


def test_the_structure_is_saved():
    r, other = router(), router()
    r.split([0])
    other.split([4])
    assert not torch.equal(r(X).dense(), other(X).dense())
    other.load_state_dict(r.state_dict())
    assert torch.equal(r(X).dense(), other(X).dense())
    assert "sign" in r.state_dict()
