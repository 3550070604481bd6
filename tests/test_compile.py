"""torch.compile(fullgraph=True): every router, two lengths, watched or not, with gradients."""

import pytest
import torch
from torch._dynamo.utils import counters

import moiety
from helpers import D, close
from moiety import LowRank, ModuleExperts, MoE, build_router, watch

DTYPES = {torch.float32: 2e-4, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def layer_of(name, dtype=torch.float32, **options):
    torch.manual_seed(0)
    options = {"balance": {}, "hidden": 24, **options}
    return MoE(name, dim=D, experts=4, **options).to(dtype)


def noisy(name):
    return build_router(name, dim=D, experts=4).stochastic


def losses_of(name):
    """A loss that the router has, so that a watch has something to collect."""
    router = build_router(name, dim=D, experts=4)
    routing = router(torch.randn(4, D))
    if routing.probs is not None:
        return {"importance": 0.1}
    return dict.fromkeys(routing.penalties, 0.1)


def length_is_dynamic(x):
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def step(run, layer, x, watched):
    """Output, loss and gradients of one call."""
    x = length_is_dynamic(x.detach().requires_grad_())
    torch.manual_seed(1)
    loss = 0.0
    if watched:
        with watch(layer) as routes:
            y = run(x)
            loss = routes.loss()
        assert len(routes.records) == 1
        assert int(routes.summary()["moe"].tokens) == x.shape[0]
    else:
        y = run(x)
    params = [p for p in layer.parameters() if p.requires_grad]
    total = y.float().square().sum() + loss
    return y, loss, *torch.autograd.grad(total, [x, *params], allow_unused=True)


def same(got, want, tol):
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if isinstance(w, torch.Tensor):
            close(g, w, tol)


def check_router(name, dtype, watched, training=True):
    losses = losses_of(name)
    layer, plain = (layer_of(name, dtype, balance=losses).train(training) for _ in range(2))
    plain._warned = True
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (8, 14):
        x = torch.randn(tokens, D).to(dtype)
        for w in watched:
            same(step(run, layer, x, w), step(plain, plain, x, w), DTYPES[dtype])
    assert counters["stats"]["unique_graphs"] == len(watched)
    for (buffer, a), b in zip(layer.named_buffers(), plain.buffers()):
        torch.testing.assert_close(a, b, msg=buffer)


@pytest.mark.parametrize("name", moiety.list_routers())
def test_every_router(name):
    check_router(name, torch.float32, (False, True))


SOON = ("top-k", "switch", "dselect-k", "expert-choice", "noisy-top-k")


def soon(names):
    """All of them, those that are not of `SOON` behind -m slow."""
    return [n if n in SOON else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", soon(moiety.list_routers()))
def test_every_router_in_bf16(name):
    check_router(name, torch.bfloat16, (True,))


@pytest.mark.parametrize("name", soon(n for n in moiety.list_routers() if noisy(n)))
def test_noisy_routers_in_eval(name):
    check_router(name, torch.float32, (False,), training=False)


@pytest.mark.parametrize(
    "options",
    [
        {"capacity_factor": 0.6},
        {"capacity_factor": 0.6, "overflow": "priority", "group": "example"},
        {"gated": True, "bias": False},
        {"hidden": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_options_and_padding(options, padded):
    layer, plain = layer_of("top-k", **options), layer_of("top-k", **options)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for length in (5, 9):
        x = torch.randn(2, length, D, requires_grad=True)
        mask = torch.rand(2, length) < 0.7 if padded else None
        for t in (x, mask) if padded else (x,):
            torch._dynamo.maybe_mark_dynamic(t, 1)
        got, want = run(x, mask=mask), plain(x, mask=mask)
        close(got, want, 1e-5)
        up = torch.randn_like(want)
        got = torch.autograd.grad(got, [x, *layer.parameters()], up)
        want = torch.autograd.grad(want, [x, *plain.parameters()], up)
        same(got, want, 1e-5)


def test_a_new_watch_each_step_compiles_nothing_new():
    layer = layer_of("top-k", balance={"switch": 0.1})
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    graphs = []
    for tokens in (8, 9, 10, 8):
        with watch(layer) as routes:
            y = run(length_is_dynamic(torch.randn(tokens, D)))
            (y.sum() + routes.loss()).backward()
        assert routes.summary()["moe"].tokens == tokens
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1] * 4
    for tokens in (8, 11):  # without a watch it is another graph, once
        run(length_is_dynamic(torch.randn(tokens, D)))
    assert counters["stats"]["unique_graphs"] == 2


def test_keep_all_and_replay_work_compiled():
    layer = layer_of("top-k")
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(8, D)
    for keep in ("choice", "all"):
        with watch(layer, keep=keep) as routes, torch.no_grad():
            run(x)
        assert torch.equal(routes["moe"][0].index, layer.route(x).index)
    with moiety.replay(layer, routes), torch.no_grad():
        y = layer(x + 1)
    with moiety.replay(layer, routes), torch.no_grad():
        close(run(x + 1), y, 1e-5)


def test_low_rank():
    layer = MoE(build_router("top-k", dim=D, experts=4), LowRank(torch.nn.Linear(D, D), 4, D, 4))
    torch.nn.init.normal_(layer.experts.up)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(8, D)
    same(step(run, layer, x, False), step(layer, layer, x, False), 1e-5)


def test_modules_break_the_graph_and_still_run():
    parts = [torch.nn.Linear(D, D) for _ in range(4)]
    layer = MoE(build_router("top-k", dim=D, experts=4), ModuleExperts(parts, dim=D))
    run = torch.compile(layer, backend="aot_eager")
    x = torch.randn(8, D)
    same(step(run, layer, x, False), step(layer, layer, x, False), 1e-5)


@pytest.mark.parametrize("activation", ["prelu", "xielu"])
def test_a_learned_activation_learns_nothing_from_rows_of_nobody(activation):
    layer = layer_of("top-k", activation=activation, capacity_factor=0.5, backend="grouped")
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(32, D)
    with torch.no_grad():
        for _ in range(8):  # memory that is used again, uninitialised, holds NaN
            torch.full((64, 24), torch.nan)
    same(step(run, layer, x, False), step(layer, layer, x, False), 1e-4)


def test_autocast():
    layer = layer_of("top-k")
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(8, D)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = run(x), layer(x)
    assert got.dtype == torch.bfloat16
    close(got, want, 2e-2)


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("top-k", torch.float32, {"capacity_factor": 0.7}),
        pytest.param("top-k", torch.bfloat16, {"gated": True}, marks=pytest.mark.slow),
        pytest.param("expert-choice", torch.float32, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_inductor(name, dtype, options):
    options = {"balance": {"importance": 0.1}, **options}
    layer, plain = layer_of(name, dtype, **options), layer_of(name, dtype, **options)
    run = torch.compile(layer, fullgraph=True)
    for tokens in (8, 14):
        x = torch.randn(tokens, D).to(dtype)
        same(step(run, layer, x, True), step(plain, plain, x, True), DTYPES[dtype])
