"""switch: one expert a token, capacity, jitter."""

from __future__ import annotations

import pytest
import torch

from moiety.routing import build_router

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))


def router(**options):
    torch.manual_seed(0)
    return build_router("switch", dim=8, experts=4, **options)


def test_the_weight_is_the_probability_of_the_chosen():
    routing = router().eval()(X)
    best = routing.probs.max(1)
    assert torch.equal(routing.index[:, 0], best.indices)
    assert torch.equal(routing.weight[:, 0], best.values)
    assert (routing.weight < 1).all()


def skewed(**options):
    r = router(**options).eval()
    with torch.no_grad():
        r.weight.zero_()
        r.weight[0, 0] = 1.0  # all tokens with x_0 > 0 go to expert 0, the larger the surer
    return r


def test_capacity_keeps_earlier_tokens():
    x = X.abs()
    x[:, 0] += 0.1
    routing = skewed(capacity_factor=1.0)(x)
    assert routing.load().tolist() == [10, 0, 0, 0]
    assert routing.active[:10].all()
    assert routing.demand().tolist() == [40, 0, 0, 0]
    # The default lets in ceil(40 · 1.25 / 4) = 13.
    assert skewed()(x).load().tolist() == [13, 0, 0, 0]


def test_priority_keeps_surer_tokens():
    x = X.abs()
    routing = skewed(capacity_factor=1.0, overflow="priority")(x)
    kept = set(routing.active[:, 0].nonzero().flatten().tolist())
    assert kept == set(x[:, 0].topk(10).indices.tolist())


def test_groups_and_padding_reach_the_capacity():
    x = X.abs()
    grouped = skewed(capacity_factor=1.0)(x, group=8)
    assert grouped.active.view(5, 8).sum(1).tolist() == [2] * 5
    mask = torch.arange(40) >= 20
    padded = skewed(capacity_factor=1.0)(x, mask)
    assert padded.active[:20].sum() == 0
    assert padded.active[20:25].all()
    assert padded.load().sum() == 5
    assert padded.dropped.sum() == 15


def test_no_limit():
    routing = router(capacity_factor=None)(X)
    assert routing.active is None
    assert routing.drop_rate() == 0


def test_causal_is_read_on_the_instance():
    assert router().causal
    assert not router(overflow="priority").causal
    assert router(overflow="priority", capacity_factor=None).causal


def test_order_overflow_looks_only_back():
    r = router(capacity_factor=0.5).eval()
    changed = X.clone()
    changed[25:] = -X[25:]
    assert torch.equal(r(X).active[:25], r(changed).active[:25])
    p = router(capacity_factor=0.5, overflow="priority").eval()
    assert not torch.equal(p(X).active[:25], p(10 * changed).active[:25])


def test_jitter_is_in_training_only():
    r = router(jitter=0.3)
    assert not torch.equal(r(X).gate, r(X).gate)
    r.eval()
    assert torch.equal(r(X).gate, r(X).gate)
    assert torch.equal(r(X).gate, r(X).probs)


def test_jitter_multiplies_the_input_within_its_range():
    r = router(jitter=0.3, capacity_factor=None)
    with torch.no_grad():
        r.weight.zero_()
        r.weight[0, 0] = 1.0
    x = torch.ones(4000, 8)
    gate = r(x).gate
    seen = gate[:, 0].log() - gate[:, 1].log()  # = x_0 with its noise
    assert 0.7 <= seen.min() < 0.71
    assert 1.29 < seen.max() <= 1.3
    assert seen.mean().item() == pytest.approx(1.0, abs=0.01)
    still = router(jitter=0.0)
    assert torch.equal(still(X).gate, still(X).probs)
    assert not still.stochastic


def test_losses_see_the_noise_free_gate():
    r = router(jitter=0.5)
    torch.testing.assert_close(r(X).probs, r.eval()(X).probs)


def test_default_balance():
    assert router().default_balance() == {"switch": 0.01}
