"""Tokens to experts and back: both ways are each other's adjoint, in a fixed order."""

import sys

import pytest
import torch

from helpers import CASES, D, E, routing_of, slots
from moiety.experts import by_slot, combine, dispatch
from moiety.experts.dispatch import spread


@pytest.mark.parametrize("case", CASES)
def test_rows_are_the_tokens_sorted_by_expert(case):
    routing, x = routing_of(case), torch.randn(13, D)
    plan = routing.plan()
    rows = dispatch(x, plan)
    want = sorted(((e, t) for t, e, _ in slots(routing)))
    start = 0
    for e, end in enumerate(plan.ends_E.tolist()):
        got = sorted(map(tuple, rows[start:end].tolist()))
        assert got == sorted(tuple(x[t].tolist()) for f, t in want if f == e)
        start = end
    assert start == len(want)


@pytest.mark.parametrize("case", CASES)
def test_combine_undoes_dispatch(case):
    routing, x = routing_of(case), torch.randn(13, D)
    plan = routing.plan()
    total = torch.zeros(13)
    for t, _, w in slots(routing):
        total[t] += w.detach()
    got = combine(dispatch(x, plan), routing, plan)
    torch.testing.assert_close(got, x * total[:, None])


@pytest.mark.parametrize("case", ["plain", "capacity", "expert", "static"])
def test_gradcheck(case):
    routing = routing_of(case, 5, 3, dtype=torch.float64)
    plan = routing.plan()
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    table = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def run(x, weight, table):
        return combine(
            dispatch(x, plan) * spread(table, plan), routing.replace(weight=weight), plan
        )

    leaves = (x, routing.weight.detach().requires_grad_(), table)
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_spread_gives_each_row_its_experts_entry():
    routing = routing_of("inactive")
    plan, table = routing.plan(), torch.randn(E, 3)
    experts = sorted(e for _, e, _ in slots(routing))
    assert torch.equal(spread(table, plan), table[experts])


@pytest.mark.parametrize("case", ["inactive", "capacity", "expert", "static"])
def test_spread_sums_a_gradient_by_expert_the_same_on_a_gpu(case, monkeypatch):
    plan = routing_of(case).plan()
    table = torch.randn(E, 8, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(plan.rows, 8, dtype=torch.float64)
    gradient[plan.ends_E[-1] :] = float("nan")  # rows of nobody hold anything at all
    spread(table, plan).backward(gradient)
    want, table.grad = table.grad, None
    monkeypatch.setattr(sys.modules[spread.__module__], "readable", lambda t: False)
    spread(table, plan).backward(gradient)
    torch.testing.assert_close(table.grad, want)
    assert want.isfinite().all() and want.abs().sum() > 0


def test_weights_multiply_in_fp32_though_rows_are_bf16():
    routing = routing_of("plain", 4, 2).replace(index=torch.tensor([[0, 1]] * 4))
    weight = torch.full((4, 2), 1 / 3)
    routing, plan = routing.replace(weight=weight), routing.plan()
    y = torch.randn(8, D).bfloat16()
    got = combine(y, routing, plan)
    rows = plan.row_of_slot().view(4, 2)
    want = (y.float() * (1 / 3))[rows].bfloat16().sum(1)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, atol=0, rtol=2**-7)


def test_repeated_runs_are_equal_to_the_bit():
    routing, x = routing_of("expert", 257, 8), torch.randn(257, D, requires_grad=True)

    def run():
        plan = routing.plan()
        y = combine(dispatch(x, plan), routing, plan)
        return y, *torch.autograd.grad(y.square().sum(), [x, routing.weight])

    for a, b in zip(run(), run()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", [case for case in CASES if routing_of(case).by != "expert"])
def test_by_slot_lays_every_answer_where_its_slot_is(case):
    routing, x = routing_of(case).by_token(), torch.randn(13, D, requires_grad=True)
    plan = routing.plan()
    got = by_slot(dispatch(x, plan), plan)
    want = torch.where(routing.used()[..., None], x[:, None], 0.0)
    assert torch.equal(got, want.expand_as(got))
    g = torch.randn_like(got)
    (gx,) = torch.autograd.grad((got * g).sum(), x)
    torch.testing.assert_close(gx, (g * routing.used()[..., None]).sum(1))


def test_by_slot_needs_a_decision_by_token():
    plan = routing_of("expert").plan()
    with pytest.raises(ValueError, match="by token"):
        by_slot(torch.zeros(plan.rows, D), plan)
