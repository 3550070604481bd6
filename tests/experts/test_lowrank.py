"""Low-rank corrections on a base: the same sum by every backend, and a start at the base itself."""

import pytest
import torch
from torch import nn

from helpers import TIGHT, D, E, check_parity, lowrank, routing_of
from moiety import LowRank, MoE, build_router

BACKENDS = ("loop", "grouped", "dense")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["plain", "empty", "capacity", "nobody", "expert", "static"])
@pytest.mark.parametrize("dtype", TIGHT, ids=str)
def test_parity(backend, case, dtype):
    made = lowrank(frozen=False).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    check_parity(
        made, torch.randn(13, D).to(dtype), routing_of(case, dtype=wide), backend, TIGHT[dtype]
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one(backend, tokens):
    check_parity(lowrank(), torch.randn(tokens, D), routing_of("plain", tokens), backend, 1e-5)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("router", ["top-k", "softmax", "expert-choice", "switch"])
def test_a_fresh_layer_is_its_base_to_the_bit(backend, router):
    base = nn.Sequential(nn.Linear(D, 32), nn.GELU(), nn.Linear(32, D))
    made = LowRank(base, E, D, rank=3)
    layer = MoE(build_router(router, dim=D, experts=E), made, backend=backend, balance={})
    x = torch.randn(2, 7, D)
    assert torch.equal(layer(x), base(x.reshape(-1, D)).view(2, 7, D))


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_base_is_not_trained(frozen):
    made = lowrank(frozen=frozen)
    made(torch.randn(13, D), routing_of("plain")).sum().backward()
    assert all((p.grad is None) == frozen for p in made.base.parameters())
    assert made.up.grad.any()
    assert made.down.grad.any()


def test_rank_changes_the_parameters_and_is_checked():
    assert lowrank(rank=2).down.shape == (E, 2, D)
    for rank in (0, D + 1, 2.5):
        with pytest.raises(ValueError, match="rank must be a whole number from 1 to dim = 16"):
            LowRank(nn.Identity(), E, D, rank)
    with pytest.raises(ValueError, match="experts must be a whole number"):
        LowRank(nn.Identity(), 0, D)


def test_autocast():
    made, x, routing = lowrank(), torch.randn(13, D), routing_of("plain")
    want = made(x, routing)
    with torch.autocast("cpu", torch.bfloat16):
        for backend in BACKENDS:
            torch.testing.assert_close(
                made(x, routing, backend).float(), want, atol=0.15, rtol=0.05
            )
