"""What only a GPU can show: parity there, no waiting for the host, bit-equal repeats."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import moiety

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:balance losses"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def layer_of(name="top-k", **options):
    torch.manual_seed(0)
    return moiety.MoE(name, dim=64, hidden=128, experts=8, **options).cuda()


def train(name, steps=20, dtype=torch.float32, **options):
    """Parameters after a few steps of a two-layer model."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *[moiety.MoE(name, dim=64, hidden=128, experts=8, **options) for _ in range(2)]
    ).to("cuda", dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(16, 64, 64, device="cuda", dtype=dtype)
    for _ in range(steps):
        with moiety.watch(model) as routes:
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


@pytest.mark.parametrize(
    "options", [{"capacity_factor": 0.5}, {"capacity_factor": 0.5, "overflow": "priority"}], ids=str
)
def test_repeated_training_with_dropped_slots_is_bit_equal(options):
    for a, b in zip(train("top-k", **options), train("top-k", **options), strict=True):
        assert torch.equal(a, b)


def values_of(layer, backend, x, mask):
    """Output and all gradients, as float64."""
    layer.backend = backend
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x, mask)
    y.square().sum(dtype=torch.float32 if x.dtype == torch.bfloat16 else None).backward()
    grads = [p.grad for p in layer.parameters() if p.grad is not None]
    return [t.detach().double() for t in (y, x.grad, *grads)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["top-k", "expert-choice", "dselect-k", "top-k-static"])
def test_backends_are_as_exact_as_the_loop(name, gated, dtype):
    layer = layer_of(name, gated=gated).to(dtype)
    x = torch.randn(3, 40, 64, device="cuda", dtype=dtype)
    mask = torch.ones(3, 40, dtype=torch.bool, device="cuda")
    mask[0, 30:] = False
    truth = values_of(copy.deepcopy(layer).double(), "loop", x.double(), mask)
    error = {
        backend: [
            float((a - b).norm() / b.norm().clamp(min=1e-12))
            for a, b in zip(values_of(layer, backend, x, mask), truth, strict=True)
        ]
        for backend in ("loop", "grouped", "dense")
    }
    enough = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 2e-2}[dtype]  # tf32
    for backend in ("grouped", "dense"):
        for ours, loop in zip(error[backend], error["loop"], strict=True):
            # A static gate's gradient is a difference of large sums: there the loop errs as well.
            assert ours <= max(enough, 3 * loop), error


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


@pytest.mark.parametrize("name", moiety.list_routers())
def test_the_host_never_waits(name):
    model = layer_of(name, capacity_factor=None).to(torch.bfloat16)
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


def test_float32_experts_agree_with_float64():
    layer = layer_of(gated=True)
    x = torch.randn(64, 64, device="cuda")
    exact = layer.double()(x.double())
    assert float((layer.float()(x) - exact).norm() / exact.norm()) < 1e-3
