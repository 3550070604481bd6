"""sigmoid-balanced: when the bias moves, by which load, and that it only chooses."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moiety.routing import balance, build_router

RATE = 0.125


def router(**options):
    torch.manual_seed(0)
    return build_router("sigmoid-balanced", **({"dim": 8, "experts": 4, "rate": RATE} | options))


def two():
    """Two experts of one-dimensional tokens: positive ones go to expert 0, negative to 1."""
    r = router(dim=1, experts=2, k=1)
    with torch.no_grad():
        r.weight.copy_(torch.tensor([[1.0], [-1.0]]))
    r.last.copy_(r.weight)
    return r


def tokens(first: int, second: int) -> torch.Tensor:
    return torch.tensor([[1.0]] * first + [[-1.0]] * second)


def step(r):
    with torch.no_grad():
        r.weight += 1e-5


def test_four_forwards_and_a_step_make_one_move_by_the_summed_load():
    r = two()
    for batch in (tokens(3, 1), tokens(3, 1), tokens(3, 1), tokens(0, 4)):
        r(batch)
    # 9 to expert 0 and 7 to expert 1; the last call alone would push the other way.
    assert r.seen.tolist() == [9, 7]
    assert r.bias.tolist() == [0, 0]  # nothing before the step
    step(r)
    r(tokens(1, 1))
    assert r.bias.tolist() == [-RATE, RATE]
    assert r.seen.tolist() == [1, 1]  # and it starts anew


def test_forwards_without_a_step_move_nothing():
    r = two()
    r(tokens(3, 1))
    step(r)
    for _ in range(5):
        r(tokens(3, 1))
    assert r.bias.tolist() == [-RATE, RATE]
    assert r.seen.tolist() == [15, 5]


def test_a_real_optimizer_counts_as_a_step():
    r = router()
    optimizer = torch.optim.SGD(r.parameters(), lr=0.1)
    r.weight.data[0] = 5.0
    x = torch.rand(32, 8)
    for n in range(3):
        assert r.bias[0].item() == pytest.approx(-RATE * max(n - 1, 0))
        r(x).weight[:, 0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_load_evens_out():
    r = router(dim=8, experts=8, rate=0.01)
    with torch.no_grad():
        r.weight[:2] += 1.0  # on positive tokens two experts win always
    generator = torch.Generator().manual_seed(1)
    shares = []
    for _ in range(200):
        routing = r(torch.rand(256, 8, generator=generator))
        shares.append((routing.load() / routing.load().sum()).max().item())
        step(r)
    assert shares[0] > 0.4
    assert sum(shares[-10:]) / 10 < 0.2  # even would be 0.125


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_counts_once(reentrant):
    r = two()
    x = tokens(3, 1).requires_grad_()

    def weighed(x):
        return r(x).weight * x

    checkpoint(weighed, x, use_reentrant=reentrant).sum().backward()
    assert r.seen.tolist() == [3, 1]
    assert r.weight.grad is not None


def test_eval_does_nothing():
    r = two()
    r(tokens(3, 1))
    step(r)
    r.eval()
    r(tokens(9, 0))
    assert r.bias.tolist() == [0, 0]
    assert r.seen.tolist() == [3, 1]
    r.train()
    r(tokens(1, 1))
    assert r.bias.tolist() == [-RATE, RATE]


def test_padding_is_not_seen():
    r = two()
    r(tokens(3, 1), torch.tensor([True, False, False, True]))
    assert r.seen.tolist() == [1, 1]


def test_update_moves_a_frozen_router():
    r = two().requires_grad_(False)
    r(tokens(3, 1))
    r.update()
    assert r.bias.tolist() == [-RATE, RATE]
    assert r.seen.tolist() == [0, 0]
    r.update()  # nothing new was seen
    assert r.bias.tolist() == [-RATE, RATE]


def test_the_bias_chooses_but_never_weighs():
    r = router(renormalise=False).eval()
    x = torch.randn(16, 8)
    gate = r(x).gate
    r.bias[3] = 10.0
    routing = r(x)
    assert (routing.index[:, 0] == 3).all()
    assert torch.equal(routing.gate, gate)
    assert torch.equal(routing.probs, gate)
    assert torch.equal(routing.weight[:, 0], gate[:, 3])


def test_options():
    x = torch.randn(16, 8)
    assert router(k=3)(x).index.shape == (16, 3)
    torch.testing.assert_close(router()(x).weight.sum(1), torch.ones(16))
    torch.testing.assert_close(router(scale=2.5)(x).weight.sum(1), torch.full((16,), 2.5))
    free = router(renormalise=False)(x)
    assert torch.equal(free.weight, free.gate.gather(1, free.index))
    assert [router(**o).weights_sum for o in ({}, {"scale": 2.5}, {"renormalise": False})] == [
        "one",
        "free",
        "free",
    ]


@pytest.mark.parametrize(
    ("options", "bias"),
    [
        ({}, [-RATE, RATE, RATE, RATE]),
        ({"rate": 0.5}, [-0.5, 0.5, 0.5, 0.5]),
        # Mean RATE/2 taken off.
        ({"zero_mean": True}, [-1.5 * RATE, 0.5 * RATE, 0.5 * RATE, 0.5 * RATE]),
    ],
)
def test_rate_and_zero_mean(options, bias):
    r = router(**options)
    r.seen.copy_(torch.tensor([10, 2, 2, 2]))
    r.update()
    assert r.bias.tolist() == bias


def test_a_resumed_run_continues_equally():
    def run(r, steps, seed):
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.SGD(r.parameters(), lr=0.1)
        for _ in range(steps):
            r(torch.rand(32, 8, generator=generator)).weight[:, 0].sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, broken, resumed = router(), router(), router()
    resumed.reset_parameters()
    run(whole, 3, 1)
    run(broken, 3, 1)
    state = broken.state_dict()
    assert set(state) == {"weight", "bias", "seen"}
    resumed.load_state_dict(state)
    run(whole, 3, 2)
    run(resumed, 3, 2)
    assert whole.bias.abs().sum() > 0
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_compiled_it_moves_the_same():
    torch._dynamo.reset()
    eager, compiled = two(), two()
    route = torch.compile(compiled, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (tokens(3, 1), tokens(5, 3), tokens(1, 5)):
        assert torch.equal(eager(batch).index, route(batch).index)
        step(eager)
        step(compiled)
    assert torch.equal(eager.bias, compiled.bias)
    assert torch.equal(eager.seen, compiled.seen)
    assert eager.bias.any()


def test_half_precision_keeps_the_bias_exact():
    r = router(rate=1e-3).to(torch.bfloat16)
    assert r.weight.dtype == torch.bfloat16
    r.bias.fill_(1.0)
    r.seen.copy_(torch.tensor([10, 2, 2, 2]))
    r.update()
    torch.testing.assert_close(r.bias, torch.tensor([0.999, 1.001, 1.001, 1.001]))
    assert router().double().bias.dtype == torch.float64


def test_losses_take_the_sigmoids_as_shares():
    r = router()
    routing = r(torch.randn(16, 8))
    assert balance.switch(routing).isfinite()
    share = routing.probs / routing.probs.sum(1, keepdim=True)
    mean = share.mean(0)
    want = (mean - 0.25).square().mean() / 0.25**2
    torch.testing.assert_close(balance.importance(routing), want)
