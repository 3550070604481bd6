"""noisy-top-k: noise in training only, and what it leaves behind for the load loss."""

from __future__ import annotations

import math

import pytest
import torch

from moiety.routing import balance, build_router

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


def router(**options):
    torch.manual_seed(0)
    return build_router("noisy-top-k", **({"dim": 8, "experts": 4} | options))


def noise_of(routing):
    """The noise of each score up to a constant a token, read off the noisy gate."""
    return routing.gate.log() - routing.scores


def test_eval_has_no_noise():
    r = router().eval()
    a, b = r(X), r(X)
    assert torch.equal(a.index, b.index)
    assert torch.equal(a.gate, a.probs)
    assert a.threshold is None
    assert a.noise_std is None
    assert torch.equal(a.index, a.scores.topk(2).indices)


def test_training_chooses_and_weighs_by_the_noisy_gate():
    routing = router(std=1.0)(X)
    assert not torch.equal(routing.index, routing.scores.topk(2).indices)
    assert torch.equal(routing.index, routing.gate.topk(2).indices)
    assert torch.equal(routing.weight, routing.gate.gather(1, routing.index))
    torch.testing.assert_close(routing.probs, routing.scores.softmax(-1))


def test_training_draws_anew():
    r = router()
    assert not torch.equal(r(X).gate, r(X).gate)


@pytest.mark.parametrize(("std", "sigma"), [(None, 1 / 4), (1.0, 1.0), (0.05, 0.05)])
def test_the_fixed_noise_has_its_standard_deviation(std, sigma):
    r = router(std=std)
    x = X.repeat(40, 1)
    routing = r(x)
    noise = noise_of(routing)
    # The difference of two independent noises has variance 2 σ².
    measured = (noise[:, 0] - noise[:, 1]).std() / math.sqrt(2)
    assert measured.item() == pytest.approx(sigma, rel=0.05)
    assert routing.noise_std.item() == pytest.approx(sigma)


def test_std_zero_is_no_noise():
    r = router(std=0.0)
    routing = r(X)
    assert torch.equal(routing.gate, routing.probs)
    assert routing.noise_std is None
    assert not r.stochastic


def test_learned_noise():
    r = router(noise="learned")
    assert not r.noise_weight.any()  # every score starts with the same noise
    # softplus(0) + 0.01
    torch.testing.assert_close(r(X).noise_std, torch.full((64, 4), math.log(2) + 0.01))
    with torch.no_grad():
        r.noise_weight[2] = 1.0
        r.noise_weight[3] = -100.0
    positive = X.abs()
    std = r(positive).noise_std
    torch.testing.assert_close(std[:, 2], positive.sum(1).exp().log1p() + 0.01)
    assert (std[:, 3] < 0.02).all()
    noise = noise_of(r(positive.repeat(30, 1)))
    wide = (noise[:, 2] - noise[:, 3]).std()
    assert wide.item() == pytest.approx(std[:, 2].square().mean().sqrt().item(), rel=0.1)


def test_learned_noise_learns():
    r = router(noise="learned")
    balance.load(r(X)).backward()
    assert r.noise_weight.grad.abs().sum() > 0


def test_std_belongs_to_fixed_noise():
    with pytest.raises(ValueError, match="std is for noise='fixed'"):
        router(noise="learned", std=0.1)


def test_the_threshold_is_the_kth_noisy_score_and_carries_gradient():
    r = router(k=3)
    torch.manual_seed(5)
    routing = r(X)
    torch.manual_seed(5)
    noisy = routing.scores + torch.randn(64, 4) * routing.noise_std
    torch.testing.assert_close(routing.threshold, noisy.sort(descending=True).values[:, 2])
    # d threshold / d scores is one-hot, at the expert that holds the third place.
    third = noisy.argsort(descending=True)[:, 2]
    want = torch.nn.functional.one_hot(third, 4).float().t() @ X
    (grad,) = torch.autograd.grad(routing.threshold.sum(), r.weight)
    torch.testing.assert_close(grad, want)


def test_k_and_renormalise():
    assert router(k=3)(X).index.shape == (64, 3)
    assert (router()(X).weight.sum(1) < 0.999).all()
    assert router().weights_sum == "at most one"
    torch.testing.assert_close(router(renormalise=True)(X).weight.sum(1), torch.ones(64))
    assert router(renormalise=True).weights_sum == "one"
    assert router(k=4).weights_sum == "one"


def test_default_balance():
    assert router().default_balance() == {"importance": 0.005, "load": 0.005}
    assert router(experts=2).default_balance() == {"gshard": 0.01}
    assert balance.load(router()(X)) > 0
    assert balance.load(router().eval()(X)) == 0
