"""On a CUDA device, where the host never looks: the same sums, and the same bits again."""

import pytest
import torch
from torch import nn

import moiety
from helpers import CASES, TIGHT, D, E, check_parity, feedforward, lowrank, moved, routing_of
from moiety import MoE, watch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("backend", ["loop", "grouped", "dense"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", TIGHT, ids=str)
def test_parity(backend, case, dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    routing = moved(routing_of(case, dtype=wide), "cuda")
    for dim, tokens in ((D, 13), (7, 13), (D, 1), (D, 0)):
        if tokens != 13 and case in ("capacity", "empty"):
            continue
        if tokens != 13:
            routing = moved(routing_of(case, tokens, dtype=wide), "cuda")
        x = torch.randn(tokens, dim, device="cuda").to(dtype)
        made = feedforward(E, dim, 24, gated=True).cuda().to(dtype)
        check_parity(made, x, routing, backend, TIGHT[dtype])
        made = lowrank(dim=dim, frozen=False).cuda().to(dtype)
        check_parity(made, x, routing, backend, TIGHT[dtype])


@pytest.mark.parametrize("name", moiety.list_routers())
def test_every_router_gives_what_it_gives_on_a_cpu(name):
    layer = MoE(name, dim=D, hidden=24, experts=4, balance={}).eval()
    x = torch.randn(3, 6, D)
    mask = torch.rand(3, 6) < 0.7
    want = layer(x, mask=mask)
    got = layer.cuda()(x.cuda(), mask=mask.cuda())
    torch.testing.assert_close(got.cpu(), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"backend": "loop"},
        {"capacity_factor": 0.7, "overflow": "priority"},
        {"gated": True, "hidden": 30},  # our own product
        {"router": "expert-choice"},
        {"router": "switch"},
        {"router": "softmax"},
    ],
    ids=str,
)
def test_twenty_steps_repeat_to_the_bit(options, dtype):
    options = {"router": "top-k", "dim": 64, "hidden": 128, "experts": 8, **options}

    def train():
        torch.manual_seed(0)
        parts = [MoE(options["router"], **{k: v for k, v in options.items() if k != "router"})
                 for _ in range(2)]  # fmt: skip
        model = nn.Sequential(parts[0], nn.LayerNorm(64), parts[1]).cuda()
        adam = torch.optim.Adam(model.parameters(), 1e-3)
        x = torch.randn(2, 512, 64, device="cuda")
        for _ in range(20):
            half = torch.autocast("cuda", torch.bfloat16, dtype == torch.bfloat16)
            with half, watch(model) as routes:
                loss = (model(x).float() - x.flip(1)).square().mean() + routes.loss()
            adam.zero_grad()
            loss.backward()
            adam.step()
        return model.state_dict()

    first, second = train(), train()
    for name, value in first.items():
        assert torch.isfinite(value).all(), name
        assert torch.equal(value, second[name]), name


def test_nothing_waits_for_the_device():
    # In bf16: the library's fp32 product looks at the offsets itself.
    layer = MoE("top-k", dim=64, hidden=128, experts=8, capacity_factor=0.7).cuda().bfloat16()
    x = torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = torch.rand(2, 64, device="cuda") < 0.7
    layer(x, mask=mask).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with watch(layer, keep="choice"):
            layer(x, mask=mask).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled(dtype):
    options = {
        "dim": 64,
        "hidden": 128,
        "experts": 8,
        "capacity_factor": 0.7,
        "balance": {"z": 0.1},
    }
    layer = MoE("top-k", **options).cuda().to(dtype)
    run = torch.compile(layer, fullgraph=True)
    x = torch.randn(200, 64, device="cuda").to(dtype)
    mask = torch.rand(200, device="cuda") < 0.7
    found = []
    for call in (layer, run):
        layer.zero_grad()
        with watch(layer) as routes:
            y = call(x, mask=mask)
            (y.float().square().sum() + routes.loss()).backward()
        found.append([y, *[p.grad.clone() for p in layer.parameters()]])
    tol = 1e-4 if dtype == torch.float32 else 5e-2
    for a, b in zip(*found):
        assert float((a - b).abs().max() / b.abs().max()) < tol
