"""Each expert once for all tasks: values and gradients of the plain sum over experts per task."""

import pytest
import torch
from torch import nn

import moiety
from moiety.multitask import mix, union_of

NAMES = moiety.list_routers()
E, D, T = 8, 16, 11


def stacked():
    return moiety.FeedForward(E, D, 12, activation=torch.relu, out_dim=5)


def modules():
    return moiety.ModuleExperts([nn.Linear(D, 5) for _ in range(E)], dim=D, out_dim=5)


def corrected():
    experts = moiety.LowRank(nn.Linear(D, D), E, D, rank=2)
    nn.init.normal_(experts.up)
    return experts


def routers(*names, binary=True):
    torch.manual_seed(1)
    made = [moiety.build_router(name, dim=D, experts=E) for name in names]
    with torch.no_grad():
        for router in made:
            if router.name.startswith("dselect") and binary:  # far out: many digits on a plateau
                for p in router.parameters():
                    p.mul_(60)
    return made


def plain(experts, x, routings):
    """The sum as one writes it: every expert on every token, once for every task."""
    each = torch.stack(list(experts.loop([x] * E)), 1)
    base = experts.always(x)
    return torch.stack(
        [(each * r.dense()[..., None]).sum(1) + (0 if base is None else base) for r in routings]
    )


def gradients(y, leaves, g):
    found = torch.autograd.grad((y * g).sum(), leaves, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(p) if d is None else d for p, d in zip(leaves, found, strict=True)]


def check(experts, gates, backends):
    x = torch.randn(T, D, requires_grad=True)
    routings = [gate(x) for gate in gates]
    want = plain(experts, x, routings)
    g = torch.randn_like(want)
    leaves = [x, *(p for m in (experts, *gates) for p in m.parameters() if p.requires_grad)]
    slopes = gradients(want, leaves, g)
    for backend in backends:
        got = mix(experts, x, routings, backend)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        for a, b in zip(gradients(got, leaves, g), slopes, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [stacked, modules, corrected])
@pytest.mark.parametrize("name", NAMES)
def test_the_union_is_the_plain_sum(name, make):
    experts = make()
    check(experts, routers(name, name, name), ("auto", *experts.backends))


def test_static_and_other_gates_side_by_side():
    gates = routers("dselect-k-static", "top-k", "expert-choice", "dselect-k")
    check(stacked(), gates, ("auto", "loop", "grouped", "dense"))


def test_only_what_some_task_needs_is_laid_out():
    gates = routers("top-k-static", "top-k-static")
    routings = [gate(torch.zeros(T, D)) for gate in gates]
    needed = (routings[0].choice() | routings[1].choice())[0].nonzero().flatten()
    got = union_of(routings)
    assert got.index.tolist() == [needed.tolist()] and got.active is None
    assert torch.equal(got.load() > 0, torch.zeros(E, dtype=torch.bool).index_fill(0, needed, True))


def test_by_example_the_union_is_the_or_of_the_choices():
    x = torch.randn(T, D)
    routings = [gate(x) for gate in routers("top-k", "dselect-k", "expert-choice")]
    want = torch.stack([r.choice() for r in routings]).any(0)
    got = union_of(routings)
    assert torch.equal(got.choice(), want)
    assert got.index.shape[1] == want.sum(1).max()


@pytest.mark.parametrize("make", [stacked, modules])
def test_gates_that_need_nobody_give_zero(make):
    gate = moiety.build_router("gumbel-static", dim=D, experts=E).eval()
    nn.init.constant_(gate.weight, -1.0)
    x = torch.randn(T, D, requires_grad=True)
    y = mix(make(), x, [gate(x), gate(x)])
    assert y.shape == (2, T, 5) and not y.any()
    y.sum().backward()
    assert not x.grad.any()


@pytest.mark.parametrize("name", ["dselect-k-static", "dselect-k", "top-k"])
def test_no_example_and_one(name):
    for tokens in (0, 1):
        x = torch.randn(tokens, D)
        gates = routers(name, name)
        for backend in ("loop", "grouped", "dense"):
            assert mix(stacked(), x, [gate(x) for gate in gates], backend).shape == (2, tokens, 5)


@pytest.mark.parametrize("name", ["dselect-k-static", "dselect-k", "top-k"])
def test_repeats_are_equal_to_the_bit(name):
    experts, gates, x = stacked(), routers(name, name), torch.randn(T, D)

    def once():
        y = mix(experts, x, [gate(x) for gate in gates])
        return [y, *torch.autograd.grad(y.square().sum(), list(experts.parameters()))]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


@pytest.mark.parametrize("name", ["dselect-k-static", "dselect-k", "top-k", "softmax"])
def test_vmap_over_copies(name):
    experts, gates = stacked(), routers(name, name)
    x_S = torch.randn(3, T, D)

    def one(x):
        return mix(experts, x, [gate(x) for gate in gates])

    for gate in gates:
        gate.eval()
    torch.testing.assert_close(torch.func.vmap(one)(x_S), torch.stack([one(x) for x in x_S]))
