"""The 2×2 of input and routes: parts by hand, parts that sum to the whole, frozen routes."""

import pytest
import torch
from torch import nn

from moiety import MoE
from moiety.robust.attribution import attribute, freeze
from moiety.robust.losses import LOSSES
from moiety.robust.target import Seen, Target


class Model(nn.Module):
    def __init__(self, router="top-k", **options):
        super().__init__()
        torch.manual_seed(0)
        self.first = MoE(router, dim=6, hidden=8, experts=4, **options)
        self.second = MoE(router, dim=6, hidden=8, experts=4, **options)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = x + 3 * self.first(x)
        return self.head((x + 3 * self.second(x)).mean(1))


def data(examples=5):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(examples, 4, 6, generator=draw, dtype=torch.float64)
    x_adv = x + torch.randn(x.shape, generator=draw, dtype=torch.float64)
    return x, x_adv, torch.randint(3, (examples,), generator=draw)


def target_of(**options):
    return Target(Model(**options).double().eval())


def loss_of(target, x, y):
    with torch.no_grad():
        return LOSSES["ce"](Seen(target(x).logits.double()), y)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"k": 1}, {"k": 2}, {"k": 2, "capacity_factor": 0.7, "group": "example"}],
    ids=["top-1", "top-2", "capacity"],
)
def test_the_parts_sum_to_the_change_of_the_loss(options, weights):
    target, (x, x_adv, y) = target_of(**options), data()
    parts = attribute(target, x, x_adv, y, weights=weights)
    change = loss_of(target, x_adv, y) - loss_of(target, x, y)
    assert torch.equal(parts.total, change)
    torch.testing.assert_close(parts.input + parts.routes, change, rtol=0, atol=1e-14)
    assert parts.routes.abs().max() > 1e-3
    assert parts.input.abs().max() > 1e-3


def test_the_cells_by_hand():
    """Two scalar experts, 2x and −x; the router picks by the sign of another coordinate."""
    layer = MoE("top-k", dim=2, hidden=1, experts=2, k=1)
    layer.router.weight.data = torch.tensor([[0.0, 1.0], [0.0, -1.0]])
    gains = torch.tensor([2.0, -1.0], dtype=torch.float64)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = layer
            layer.experts.forward = lambda x, r, backend: gains[r.index] * x.double()

        def forward(self, x):
            return self.moe(x)

    x = torch.tensor([[1.0, 0.5]])
    x_adv = torch.tensor([[3.0, -0.5]])  # another input, and the other expert

    def first_output(seen, y):
        return seen.logits[:, 0]

    parts = attribute(Target(Two().eval()), x, x_adv, torch.tensor([0]), loss=first_output)
    assert parts.clean_clean.item() == 2.0
    assert parts.attacked_attacked.item() == -3.0
    assert parts.clean_attacked.item() == -1.0  # input 1 on the expert of the attack
    assert parts.attacked_clean.item() == 6.0
    assert parts.total.item() == -5.0
    assert parts.input.item() == (4.0 - 2.0) / 2
    assert parts.routes.item() == (-3.0 - 9.0) / 2


def test_routes_that_did_not_change_have_no_part():
    target, (x, _, y) = target_of(k=2), data()
    near = x + 1e-9
    parts = attribute(target, x, near, y)
    assert torch.equal(parts.routes, torch.zeros(5, dtype=torch.float64))
    assert (attribute(target, x, near, y, weights=True).routes != 0).any()


def test_the_model_is_left_as_it_was():
    target, (x, x_adv, y) = target_of(k=1), data()
    target.model.train()
    before = target.model(x)
    attribute(target, x, x_adv, y)
    assert all(m.training for m in target.model.modules())
    assert torch.equal(target.model(x), before)


@pytest.mark.parametrize("weights", [False, True])
def test_frozen_routes_stay_and_carry_the_gradient_of_the_rest(weights):
    target, (x, x_adv, y) = target_of(k=2), data()
    frozen = freeze(target, x, weights=weights)
    torch.testing.assert_close(frozen(x).logits, target(x).logits)
    seen = frozen.watching("choice")(x_adv)
    clean = target.watching("choice")(x).routes
    for name in clean.layers:
        was, now = clean[name][0], seen.routes[name][0]
        assert torch.equal(was.index, now.index)
        assert torch.equal(was.weight, now.weight) == weights
    cells = attribute(target, x, x_adv, y, weights=weights)
    got = LOSSES["ce"](frozen(x_adv), y)
    torch.testing.assert_close(got, cells.attacked_clean)
    x_adv.requires_grad_()
    (grad,) = torch.autograd.grad(LOSSES["ce"](frozen(x_adv), y).sum(), x_adv)
    assert grad.abs().max() > 0
