"""Steps that are repeated: as written on a CPU, captured on a GPU, with the same results."""

import pytest
import torch
from torch import nn
from victims import answers, inputs, mixed, mlp

from moiety import MoE
from moiety.robust import APGD, PGD, Target, run_attack
from moiety.robust.base import FEWEST, Hunt, halved

ATTACKS = [
    PGD(steps=25, random_start=True, restarts=2),
    APGD(steps=30),
    APGD(steps=30, loss="dlr-targeted", targets=3),
]


@pytest.mark.parametrize(
    ("rows", "left", "group", "size"),
    [
        (256, 200, 1, 256),
        (256, 128, 1, 128),
        (256, 100, 1, 128),
        (256, 3, 1, FEWEST),
        (250, 60, 1, 63),
        (256, 0, 1, 0),
        (40, 3, 1, 40),
        (96, 8, 4, 48),
        (100, 4, 4, 52),
    ],
)
def test_few_sizes(rows, left, group, size):
    found = halved(rows, left, group)
    assert found == size and found >= left and found % group == 0


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: repr(a)[:30])
def test_rows_that_fill_up_change_nothing(attack, monkeypatch):
    model, x = mixed(k=2), inputs(150)
    y = answers(model, x)
    exact = run_attack(attack, model, x, y, 0.3)
    monkeypatch.setattr("moiety.robust.base.FEWEST", 4)
    sizes = set()

    def size(self, rows, left):
        sizes.add(halved(rows, left, self.group))
        return halved(rows, left, self.group)

    monkeypatch.setattr(Hunt, "size", size)
    filled = run_attack(attack, model, x, y, 0.3)
    torch.testing.assert_close(filled.x, exact.x, rtol=0, atol=1e-9)
    assert sizes & {75, 38, 19, 10, 5}


class Waiting(nn.Module):
    """A model whose forward waits for the host, so that it cannot be captured."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x) if bool((x >= 0).all()) else x


@pytest.mark.gpu
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: repr(a)[:30])
@pytest.mark.parametrize("stop", [True, False])
def test_captured_steps_are_the_written_ones(attack, stop):
    model, x = mixed(k=2, backend="dense").cuda(), inputs(200).cuda()
    y = answers(model, x)
    written, captured = Target(model), Target(model)
    written.repeater.refused = True
    words = {"batch": 90, "early_stop": stop}
    for eps in (0.1, 0.3):
        a, b = (run_attack(attack, t, x, y, eps, **words) for t in (written, captured))
        torch.testing.assert_close(a.x, b.x, rtol=0, atol=1e-9)
    assert captured.repeater.graphs and not captured.repeater.refused


@pytest.mark.gpu
def test_layers_that_wait_are_captured_with_all_experts():
    """In fp32 the grouped product waits for the host."""
    model, x = mixed(k=2).float().cuda(), inputs(200).float().cuda()
    y = answers(model, x)
    written, captured = Target(model), Target(model)
    written.repeater.refused = True
    a, b = (run_attack(APGD(steps=30), t, x, y, 0.2) for t in (written, captured))
    assert captured.repeater.graphs and not captured.repeater.refused
    assert {m.backend for m in model.modules() if isinstance(m, MoE)} == {"auto"}
    assert (a.fooled != b.fooled).float().mean() <= 0.02  # the sums of a mixture round otherwise


def test_all_experts_for_a_while():
    model, x = mixed(k=2), inputs(20)
    (layer,) = (m for m in model.modules() if isinstance(m, MoE))
    before = model(x)
    with Target(model)._all_experts() as changed:
        assert changed and layer.backend == "dense"
        torch.testing.assert_close(model(x), before)
    assert layer.backend == "auto"
    with Target(mlp())._all_experts() as changed:
        assert not changed


@pytest.mark.gpu
def test_a_model_that_waits_for_the_host_runs_as_written():
    model, x = Waiting().eval().cuda(), inputs(20).cuda()
    y = answers(model, x)
    target = Target(model)
    found = run_attack(PGD(), target, x, y, 0.2)
    assert target.repeater.refused
    torch.testing.assert_close(found.x, run_attack(PGD(), model.inner, x, y, 0.2).x)


@pytest.mark.gpu
def test_new_weights_are_seen():
    model, x = mlp().cuda(), inputs(20).cuda()
    y = answers(model, x)
    target = Target(model)
    before = run_attack(PGD(), target, x, y, 0.2, keep="last").x
    with torch.no_grad():
        model[0].weight.mul_(-1)
    after = run_attack(PGD(), target, x, y, 0.2, keep="last").x
    fresh = run_attack(PGD(), Target(model), x, y, 0.2, keep="last").x
    assert torch.equal(after, fresh) and not torch.equal(before, after)
