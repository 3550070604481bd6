"""expert-choice: experts take tokens; groups, padding, ties."""

from __future__ import annotations

import math

import pytest
import torch

from moiety.routing import build_router

X = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))


def router(experts=4, **options):
    torch.manual_seed(0)
    return build_router("expert-choice", dim=8, experts=experts, **options)


def plainly(probs, mask, factor, group):
    """`{(token, expert)}`: what a loop over groups and experts takes."""
    tokens, experts = probs.shape
    taken = set()
    for start in range(0, tokens, group):
        members = [t for t in range(start, min(start + group, tokens)) if mask[t]]
        slots = min(math.ceil(round(len(members) * factor / experts, 9)), len(members))
        for e in range(experts):
            best = sorted(members, key=lambda t: (-probs[t, e].item(), t))
            taken |= {(t, e) for t in best[:slots]}
    return taken


def taken(routing):
    return {tuple(pair) for pair in routing.choice().nonzero().tolist()}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("group", [None, 1, 6, 10, 50])
@pytest.mark.parametrize("factor", [0.3, 1.05, 2.0, 10.0])
def test_it_agrees_with_a_plain_loop(factor, group, masked):
    r = router(capacity_factor=factor)
    mask = torch.rand(20, generator=torch.Generator().manual_seed(1)) > 0.4
    mask = mask if masked else torch.ones_like(mask)
    routing = r(X, mask if masked else None, group=group)
    want = plainly(routing.probs, mask, factor, group or 20)
    assert taken(routing) == want
    assert routing.load().sum() == len(want)  # no token twice
    dense = routing.dense()
    torch.testing.assert_close(dense, torch.where(routing.choice(), routing.probs, 0.0))


def test_every_expert_works_equally_much():
    assert router(capacity_factor=2.0)(X).load().tolist() == [10] * 4
    assert router(capacity_factor=1.0)(X).load().tolist() == [5] * 4
    assert router(capacity_factor=1.0)(X, group=8).load().tolist() == [2 + 2 + 1] * 4


def test_shape_and_form():
    routing = router()(X, group=8)
    assert routing.by == "expert"
    assert routing.index.shape == (4, 3 * 4)
    assert ((routing.index >= 0) & (routing.index < 20)).all()


def test_capacity_never_exceeds_the_tokens():
    assert router(capacity_factor=50.0)(X).index.shape == (4, 20)
    assert router(experts=1)(X).index.shape == (1, 20)


def test_ties_go_to_the_earlier_token():
    routing = router(capacity_factor=1.0)(torch.ones(12, 8))
    assert routing.index.tolist() == [[0, 1, 2]] * 4


def test_padding_is_never_taken_and_gives_no_slots():
    mask = torch.arange(20) % 2 == 0
    routing = router()(100 * X, mask)
    assert not routing.choice()[~mask].any()
    assert routing.load().tolist() == [5] * 4  # ceil(10 · 2 / 4)
    padded = router()(torch.cat([100 * X, X]), torch.arange(40) >= 20)
    assert torch.equal(padded.dense()[20:], router()(X).dense())


def test_it_sees_later_tokens_and_says_so():
    r = router()
    assert not r.causal
    changed = X.clone()
    changed[10:] = -changed[10:]
    assert not torch.equal(r(X).choice()[:10], r(changed).choice()[:10])


def test_drop_rate_is_the_share_of_unserved_tokens():
    routing = router(capacity_factor=0.5)(X)
    unserved = (~routing.choice().any(1)).float().mean()
    assert routing.drop_rate() == unserved
    assert unserved > 0


def test_all_padding_and_no_tokens():
    assert router()(X, torch.zeros(20, dtype=torch.bool)).load().tolist() == [0] * 4
    empty = router()(X[:0])
    assert empty.index.shape == (4, 0)
    assert empty.dense().shape == (0, 4)


def test_gradient_reaches_the_router():
    r = router()
    r(X, group=6).dense().square().sum().backward()
    assert r.weight.grad.abs().sum() > 0
