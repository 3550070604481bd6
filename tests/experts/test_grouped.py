"""The grouped product beyond what the library's kernel takes, and rows that belong to nobody."""

import sys

import pytest
import torch

from helpers import D, E, check_parity, close, feedforward, gradients, lowrank, routing_of
from moiety.experts import base, grouped
from moiety.experts.grouped import grouped_mm, native
from moiety.routing import value

ENDS = torch.tensor([2, 2, 7, 9], dtype=torch.int32)  # the second expert has no row


def by_hand(a_NI, w_EOI, ends_E):
    start, out = 0, []
    for w_OI, end in zip(w_EOI, ends_E.tolist()):
        out.append(a_NI[start:end] @ w_OI.t())
        start = end
    return torch.cat(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("wide", "high"), [(8, 16), (7, 5)])
def test_product_and_gradients(dtype, wide, high):
    a = torch.randn(9, wide).to(dtype).requires_grad_()
    w = torch.randn(4, high, wide).to(dtype).requires_grad_()
    tol = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    got, want = grouped_mm(a, w, ENDS), by_hand(a, w, ENDS)
    close(got, want, tol)
    up = torch.randn(9, high).to(dtype)
    for g, h in zip(gradients(got, [a, w], up), gradients(want, [a, w], up)):
        close(g, h, tol)


@pytest.mark.parametrize("wide", [8, 7])
def test_an_expanded_gradient(wide):
    a = torch.randn(9, wide, requires_grad=True)
    w = torch.randn(4, 8, wide, requires_grad=True)
    got = torch.autograd.grad(grouped_mm(a, w, ENDS).sum(), [a, w])
    want = torch.autograd.grad(by_hand(a, w, ENDS).sum(), [a, w])
    for g, h in zip(got, want):
        close(g, h, 1e-5)


def test_an_expanded_gradient_through_a_layer():
    made, routing = feedforward(gated=True), routing_of("plain")
    x = torch.randn(13, D, requires_grad=True)
    got = torch.autograd.grad(made(x, routing, "grouped").sum(), [x, made.w_in, made.b_in])
    want = torch.autograd.grad(made(x, routing, "loop").sum(), [x, made.w_in, made.b_in])
    for g, h in zip(got, want):
        close(g, h, 1e-5)


def test_double_backward_of_the_product():
    a = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, w: grouped_mm(a, w, ENDS), (a, w))
    assert torch.autograd.gradgradcheck(lambda a, w: grouped_mm(a, w, ENDS), (a, w))


@pytest.mark.parametrize("backend", ["loop", "grouped"])
@pytest.mark.parametrize("case", ["plain", "capacity"])
def test_double_backward_of_experts(backend, case):
    made = feedforward(3, 2, 3, activation="tanh").double()
    routing = routing_of(case, 4, 3, dtype=torch.float64)
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)

    def run(x, weight, w_in, b_in, w_out):
        values = {"w_in": w_in, "b_in": b_in, "w_out": w_out}
        return torch.func.functional_call(
            made, values, (x, routing.replace(weight=weight), backend)
        )

    leaves = (x, routing.weight.detach().requires_grad_(), made.w_in, made.b_in, made.w_out)
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_double_backward_in_fp32_through_the_librarys_kernel():
    made, routing = feedforward(activation="tanh"), routing_of("plain")
    x = torch.randn(13, D, requires_grad=True)

    def norm_of_gradient(backend):
        g = torch.autograd.grad(made(x, routing, backend).square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(g.square().sum(), [x, made.w_in, made.b_in, routing.weight])

    for g, h in zip(norm_of_gradient("grouped"), norm_of_gradient("loop")):
        close(g, h, 1e-4)


def test_no_rows_at_all():
    a, w = torch.randn(0, 8, requires_grad=True), torch.randn(4, 16, 8, requires_grad=True)
    y = grouped_mm(a, w, torch.zeros(4, dtype=torch.int32))
    y.sum().backward()
    assert y.shape == (0, 16)
    assert not w.grad.any()


@pytest.fixture
def carried(monkeypatch):
    """Carry rows of nobody along, as on a GPU, and fill whatever is uninitialised with NaN."""
    monkeypatch.setattr(value, "readable", lambda t: False)
    products = []

    def poisoned(product):
        def run(a, w, ends):
            out = product(a, w, ends)
            if out.dim() == 2:
                products.append(out.shape[0] - int(ends[-1]))
                out[int(ends[-1]) :] = float("nan")
            return out

        return run

    mm = torch.nn.functional.grouped_mm

    def native_mm(a, b, *, offs):
        out = mm(a, b, offs=offs)
        if out.dim() == 2:
            products.append(out.shape[0] - int(offs[-1]))
            out[int(offs[-1]) :] = float("nan")
        return out

    monkeypatch.setattr(grouped.F, "grouped_mm", native_mm)
    monkeypatch.setattr(grouped, "product_by_expert", poisoned(grouped.product_by_expert))
    yield products
    assert any(products), "the test poisoned nothing"


@pytest.mark.parametrize("layout", ["bags", "places"])
@pytest.mark.parametrize("case", ["inactive", "nobody", "padding", "capacity", "expert", "static"])
@pytest.mark.parametrize("dim", [D, 7])
def test_rows_of_nobody_are_never_read(carried, monkeypatch, case, dim, layout):
    if layout == "places":  # the way back that a GPU takes
        monkeypatch.setattr(sys.modules["moiety.experts.dispatch"], "readable", lambda t: False)
    made = feedforward(E, dim, 24, gated=True)
    check_parity(made, torch.randn(13, dim), routing_of(case), "grouped", 2e-5)
    made = lowrank(dim=dim, frozen=False)
    check_parity(made, torch.randn(13, dim), routing_of(case), "grouped", 2e-5)


def test_the_loop_carries_rows_of_nobody_too(monkeypatch):
    monkeypatch.setattr(value, "readable", lambda t: False)
    check_parity(feedforward(), torch.randn(13, D), routing_of("capacity"), "loop", 2e-5)


def test_native_says_why_not():
    cpu = torch.device("cpu")
    assert native(torch.float32, cpu, 8, 4) is None
    assert "no float64" in native(torch.float64, cpu, 8)
    assert "multiples of 4 in float32" in native(torch.float32, cpu, 8, 6)
    assert "multiples of 8 in bfloat16" in native(torch.bfloat16, cpu, 8, 12)
    fp32 = torch.randn(3, 8)
    assert base.active_dtype(fp32) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert base.active_dtype(fp32) == torch.bfloat16
        assert base.active_dtype(fp32.double()) == torch.float64
