"""On a GPU: the results of the CPU, repeats equal to the bit, and experts that are skipped."""

import pytest
import torch
from samples import DIM, TASKS, feedforward, gated, make_binary, problem
from torch.utils.data import TensorDataset

import moiety
from moiety.multitask import MultiGate, mix, pack, packed_loss
from moiety.train import fit_many

pytestmark = pytest.mark.gpu


def step(model, x, targets):
    loss = model.loss(model(x), targets)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]


@pytest.mark.parametrize("name", moiety.list_routers())
def test_as_on_the_cpu_and_repeated_to_the_bit(name):
    model = gated(name).eval()  # no noise, and no state that a call changes
    x, targets = problem()
    want = step(model, x, targets)
    model.cuda()
    there = {task: t.cuda() for task, t in targets.items()}
    first, second = step(model, x.cuda(), there), step(model, x.cuda(), there)
    for a, b, c in zip(want, first, second, strict=True):
        if a is not None:
            torch.testing.assert_close(b.cpu(), a, rtol=1e-3, atol=1e-4)
            assert torch.equal(b, c)


def test_a_binary_gate_runs_the_selected_alone():
    model = make_binary(gated(), [(1, 2), (2, 3), (1, 3)]).cuda().eval()
    x = torch.randn(12, DIM, device="cuda")
    with torch.no_grad():
        model.experts.w_in[[0, 4, 5]] = torch.nan  # would spoil all, if anybody read it
    assert all(y.isfinite().all() for y in model(x).values())


def test_many_seeds_in_a_captured_step():
    x, targets = problem()
    data = TensorDataset(x, pack(TASKS, targets))
    settings = {"seeds": [0, 1], "steps": 12, "lr": 1e-2, "loss": packed_loss(TASKS)}

    def make(seed):
        return MultiGate(TASKS, feedforward(), log=(12, 1))

    here = fit_many(make, data, **settings)
    there = fit_many(make, data, device="cuda", **settings)
    for a, b in zip(here.history, there.history, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-3)
    assert there.models()[0].log.steps() == list(range(12))


def test_mixing_in_bf16():
    experts = feedforward().cuda().bfloat16()
    x = torch.randn(64, DIM, device="cuda", dtype=torch.bfloat16)
    for name in ("dselect-k-static", "top-k"):
        gate = moiety.build_router(name, dim=DIM, experts=6).cuda()
        routings = [gate(x), gate(x)]
        want = mix(experts, x, routings, "dense")
        torch.testing.assert_close(mix(experts, x, routings), want, rtol=5e-2, atol=5e-2)
