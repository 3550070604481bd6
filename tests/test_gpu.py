"""What only a GPU can show: parity there, no waiting for the host, bit-equal repeats."""

import contextlib

import pytest
import torch
from torch import nn

import moiety
from helpers import CASES, TIGHT, D, E, check_parity, feedforward, lowrank, moved, routing_of
from moiety import MoE, watch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:balance losses"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def layer_of(name="top-k", **options):
    torch.manual_seed(0)
    return moiety.MoE(name, dim=64, hidden=128, experts=8, **options).cuda()


def train(name, steps=20, dtype=torch.float32, autocast=False, **options):
    """Parameters after a few steps of a two-layer model."""
    torch.manual_seed(0)
    options = {"dim": 64, "hidden": 128, "experts": 8, **options}
    model = nn.Sequential(*[moiety.MoE(name, **options) for _ in range(2)]).to("cuda", dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(16, 64, 64, device="cuda", dtype=dtype)
    for _ in range(steps):
        half = torch.autocast("cuda", torch.bfloat16, enabled=autocast)
        with half, moiety.watch(model) as routes:
            loss = (model(x).float() - x.float()).square().mean() + routes.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", moiety.list_routers())
def test_repeated_training_is_bit_equal(name, dtype):
    for a, b in zip(train(name, dtype=dtype), train(name, dtype=dtype), strict=True):
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"backend": "loop"},
        {"capacity_factor": 0.5},
        {"capacity_factor": 0.5, "overflow": "priority"},
        {"gated": True, "hidden": 30},  # our own product
    ],
    ids=str,
)
def test_repeated_training_is_bit_equal_on_every_path(options, autocast):
    runs = [train("top-k", autocast=autocast, **options) for _ in range(2)]
    for a, b in zip(*runs, strict=True):
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)


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


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_few_tokens_and_idle_experts(tokens):
    layer = layer_of(k=1).to(torch.bfloat16)
    with torch.no_grad():
        layer.router.weight[1:].mul_(1e-3)
    x = torch.rand(tokens, 64, device="cuda", dtype=torch.bfloat16)
    layer.backend = "loop"
    expected = layer(x)
    layer.backend = "grouped"
    y = layer(x)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    y.float().sum().backward()
    for p in layer.parameters():
        assert torch.isfinite(p.grad).all()
    idle = layer.route(x).load() == 0
    assert not layer.experts.w_in.grad[idle].any()  # zero, not uninitialised


@contextlib.contextmanager
def no_waiting():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("name", "options"),
    [*[(name, {}) for name in moiety.list_routers()], ("top-k", {"capacity_factor": 0.7})],
)
def test_the_host_never_waits(name, options):
    # In bf16: the library's fp32 product looks at the offsets itself.
    model = layer_of(name, **options).to(torch.bfloat16)
    x = torch.randn(4, 32, 64, device="cuda", dtype=torch.bfloat16)
    mask = torch.rand(4, 32, device="cuda") > 0.2
    for attempt in range(2):  # the first may set up libraries
        with no_waiting() if attempt else contextlib.nullcontext(), moiety.watch(model) as routes:
            loss = model(x, mask).float().square().mean() + routes.loss()
            loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["top-k", "expert-choice", "dselect-k", "sigmoid-balanced"])
def test_compiled_equals_eager(name, dtype):
    torch._dynamo.reset()
    layer = layer_of(name).to(dtype).eval()
    compiled = torch.compile(layer, fullgraph=True)
    for tokens in (24, 40):
        x = torch.randn(2, tokens, 64, device="cuda", dtype=dtype)
        with torch.no_grad(), moiety.watch(layer) as routes:
            a, b = compiled(x), layer(x)
        assert float((a - b).float().norm() / b.float().norm()) < 2e-2
        assert torch.equal(routes.records[0][1].load_E, routes.records[1][1].load_E)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_gradients_equal_eager(dtype):
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
