"""FLOPs: the count from the assignments equals what torch counts while the experts run."""

import pytest
import torch
from torch import nn

from helpers import D, E, F, feedforward, lowrank, modules, routing_of
from moiety import ModuleExperts, MoE, build_router, cost
from moiety.experts.grouped import outer_by_expert, product_by_expert
from moiety.routing import value

KINDS = {
    "plain": lambda **o: feedforward(**o),
    "gated": lambda **o: feedforward(gated=True, **o),
    "low-rank": lambda **o: lowrank(**o),
    "modules": lambda **o: modules(**o),
}
FIXED = ["plain", "empty", "one", "inactive", "nobody", "padding", "capacity", "expert", "static"]


def base_flops(made, x):
    return cost.flops(lambda: made.always(x))  # what every token passes is no expert's


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", FIXED)
def test_the_loop_does_what_the_assignments_say(kind, case):
    made, x, routing = KINDS[kind](), torch.randn(13, D), routing_of(case)
    counted = cost.flops(lambda: made(x, routing, "loop")) - base_flops(made, x)
    assert counted == pytest.approx(made.flops(routing), rel=1e-3)


@pytest.mark.parametrize("kind", ["plain", "gated", "low-rank"])
@pytest.mark.parametrize("case", ["plain", "capacity", "padding", "expert"])
@pytest.mark.parametrize("dim", [D, 6])  # the library's kernel, and our own op
def test_the_grouped_product_counts_the_same(kind, case, dim):
    made, x, routing = KINDS[kind](dim=dim), torch.randn(13, dim), routing_of(case)
    counted = cost.flops(lambda: made(x, routing, "grouped")) - base_flops(made, x)
    assert counted == pytest.approx(made.flops(routing), rel=1e-3)


def test_rows_of_nobody_cost_nothing(monkeypatch):
    monkeypatch.setattr(value, "readable", lambda t: False)  # carried along, as on a GPU
    for dim in (D, 6):
        made, x, routing = feedforward(dim=dim), torch.randn(13, dim), routing_of("capacity")
        for backend in ("loop", "grouped"):
            counted = cost.flops(lambda b=backend, m=made, x=x, r=routing: m(x, r, b))
            assert counted == pytest.approx(made.flops(routing), rel=1e-3)


@pytest.mark.parametrize("kind", ["plain", "gated"])
@pytest.mark.parametrize("backend", ["loop", "grouped"])
@pytest.mark.parametrize("dim", [D, 6])
def test_backward_is_twice_the_forward(kind, backend, dim):
    made, routing = KINDS[kind](dim=dim), routing_of("capacity")
    x = torch.randn(13, dim, requires_grad=True)
    forward = cost.flops(lambda: made(x, routing, backend))
    both = cost.flops(lambda: made(x, routing, backend).sum().backward())
    assert both == pytest.approx(3 * forward, rel=1e-3)


def test_by_hand():
    made = feedforward(gated=True)
    routing = routing_of("plain", tokens=10, k=2)
    assert made.flops(routing) == 10 * 2 * (2 * D * 2 * F + 2 * F * D)
    assert lowrank(rank=4).flops(routing) == 10 * 2 * 4 * 4 * D
    layer = MoE(build_router("top-k", dim=D, experts=E, k=2), made)
    assert layer.flops(routing) == made.flops(routing)


def test_our_own_ops_by_hand():
    a, w, ends = torch.randn(9, 6), torch.randn(3, 5, 6), torch.tensor([2, 2, 7]).int()
    assert cost.flops(lambda: product_by_expert(a, w, ends)) == 2 * 7 * 5 * 6
    g = torch.randn(9, 5)
    assert cost.flops(lambda: outer_by_expert(g, a, ends)) == 2 * 7 * 5 * 6


def test_compiled_fp32_counts_through_its_op():
    made, x, routing = feedforward(), torch.randn(13, D), routing_of("capacity").detach()
    graphs = []  # torch compiles nothing while it counts, so the traced graph is counted instead

    def keep(graph, inputs):
        graphs.append((graph, inputs))
        return graph

    with torch.no_grad():
        torch.compile(lambda x: made(x, routing), backend=keep, fullgraph=True)(x)
        graph, inputs = graphs.pop()
        assert "product_by_expert" in graph.code
        counted = cost.flops(lambda: graph(*inputs))
    assert counted == pytest.approx(made.flops(routing), rel=1e-3)


def test_modules_count_their_own_cost_each():
    small, large = nn.Linear(D, D), nn.Sequential(nn.Linear(D, 50), nn.ReLU(), nn.Linear(50, D))
    made = ModuleExperts([small, large], dim=D)
    assert made.flops_per_row() == [2 * D * D, 4 * D * 50]


def test_forward_flops_leaves_modes_and_gradients_alone():
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()))
    net[1][0].eval()  # a frozen norm inside a training model
    before = {n: m.training for n, m in net.named_modules()}
    mean = net[1][0].running_mean.clone()
    assert cost.forward_flops(lambda: net(torch.randn(3, 4)), net) == 2 * 3 * 4 * 4
    assert {n: m.training for n, m in net.named_modules()} == before
    assert torch.equal(net[1][0].running_mean, mean)
    assert all(p.grad is None for p in net.parameters())

    def broken():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cost.forward_flops(broken, net)
    assert {n: m.training for n, m in net.named_modules()} == before


def test_parameters():
    made = lowrank(experts=3, dim=4, rank=2)
    assert cost.parameters(made) == 3 * 2 * (4 * 2) + 4 * 4 + 4
    assert cost.parameters(made, trainable=True) == 3 * 2 * (4 * 2)


def test_fused_attention_counts_two_products_also_with_grouped_queries():
    q = torch.randn(2, 4, 8, 16, requires_grad=True)
    shared = torch.randn(2, 2, 8, 16)  # two query heads share a key head
    two_products = 2 * (2 * 2 * 4 * 8 * 8 * 16)
    attention = torch.nn.functional.scaled_dot_product_attention
    assert cost.flops(lambda: attention(q, q, q)) == two_products
    assert cost.flops(lambda: attention(q, shared, shared, enable_gqa=True)) == two_products
    both = cost.flops(lambda: attention(q, q, q).sum().backward())
    assert both == two_products * 3.5  # backward: the scores again and four gradients
