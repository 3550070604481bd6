"""Losses of the router: numbers by hand, gradients that do what they say, one example at a time."""

import math

import pytest
import torch
from torch import nn

from moiety import MoE, balance, watch
from moiety.robust import router_losses
from moiety.robust.losses import LOSSES, build_loss
from moiety.robust.routes import routing_change, use
from moiety.robust.target import Seen, Target

NAMES = ["router-margin", "overload", "overload-call", "diversity", "auxiliary"]


class Model(nn.Module):
    """Tokens to an MoE layer to the mean to classes."""

    def __init__(self, router="top-k", dim=6, experts=4, **options):
        super().__init__()
        torch.manual_seed(0)
        self.moe = MoE(router, dim=dim, hidden=8, experts=experts, **options)
        self.head = nn.Linear(dim, 3)

    def forward(self, x):
        return self.head((x + self.moe(x)).mean(1))


def model_of(**options):
    return Model(**options).double().eval()


def steered(**options):
    """Scores are the tokens themselves."""
    model = model_of(dim=4, **options)
    model.moe.router.weight.data = torch.eye(4, dtype=torch.float64)
    return model


def see(model, x):
    return Target(model, watch="all")(x)


def climb(model, x, name, steps=60, rate=0.1):
    """Gradient ascent on one loss."""
    y = torch.zeros(len(x), dtype=torch.long)
    for _ in range(steps):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(LOSSES[name](see(model, x), y).sum(), x)
        x = x + rate * grad / grad.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1)
    return x.detach()


def tokens(*rows):
    return torch.tensor([rows], dtype=torch.float64)


def y_of(x):
    return torch.zeros(len(x), dtype=torch.long)


def test_margin_by_hand():
    model = steered(k=2)
    x = tokens([3.0, 2.0, 0.5, 0.0], [0.0, 1.0, 1.0, 5.0])  # margins 1.5 and 0
    assert LOSSES["router-margin"](see(model, x), y_of(x)).item() == pytest.approx(-0.75)


def test_margin_against_the_clean_choice_is_bounded():
    model = steered(k=1)
    clean, now = tokens([3.0, 0.0, 0.0, 0.0]), tokens([0.0, 9.0, 0.0, 0.0])
    with watch(model, keep="choice") as anchors:
        model(clean)
    seen = see(model, now)
    anchored = router_losses.Anchored(seen.logits, seen.routes, anchors)
    assert LOSSES["router-margin"](anchored, y_of(now)).item() == router_losses.BEYOND
    assert LOSSES["router-margin"](seen, y_of(now)).item() == -9.0


def test_overload_and_diversity_by_hand():
    model = steered(k=1)
    x = torch.log(tokens([0.7, 0.1, 0.1, 0.1], [0.5, 0.3, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]))
    seen = see(model, x)
    assert LOSSES["overload"](seen, y_of(x)).item() == pytest.approx(1.3 / 3)
    mean = torch.tensor([1.3, 0.5, 0.3, 0.9]) / 3
    entropy = float(-(mean * mean.log()).sum())
    assert LOSSES["diversity"](seen, y_of(x)).item() == pytest.approx(-entropy / math.log(4))


def test_overload_of_the_call_crowds_on_one_expert_of_all_examples():
    model = steered(k=1)
    rows = [[[0.7, 0.1, 0.1, 0.1]], [[0.1, 0.7, 0.1, 0.1]], [[0.6, 0.2, 0.1, 0.1]]]
    seen = see(model, torch.tensor(rows, dtype=torch.float64).log())
    y = torch.zeros(3, dtype=torch.long)
    assert LOSSES["overload"](seen, y).tolist() == pytest.approx([0.7, 0.7, 0.6])
    assert LOSSES["overload-call"](seen, y).tolist() == pytest.approx([0.7, 0.1, 0.6])


def test_auxiliary_is_the_layers_loss_on_each_example_alone():
    weights = {"switch": 0.5, "importance": 0.25, "z": 0.1}
    model, x = model_of(k=2, balance=weights), torch.randn(3, 5, 6, dtype=torch.float64)
    got = LOSSES["auxiliary"](see(model, x), y_of(x))
    want = []
    for one in x.split(1):
        with watch(model) as routes:
            model(one)
        want.append(routes.loss())
    torch.testing.assert_close(got, torch.stack(want))
    r = see(model, x[:1]).routes["moe"][0]
    by_name = sum(w * balance.LOSSES[n](r) for n, w in weights.items())
    torch.testing.assert_close(got[0], by_name)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_does_not_see_the_others(name):
    model = model_of(k=2, balance={"switch": 1.0, "importance": 1.0})
    x = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    y = y_of(x)
    loss = LOSSES[name](see(model, x), y)
    assert loss.shape == (4,)
    (grad,) = torch.autograd.grad(loss[1], x)
    others = grad[[0, 2, 3]].abs().max()
    assert others == 0
    assert grad[1].abs().max() > 0
    if name != "overload-call":
        alone = LOSSES[name](see(model, x[1:2]), y[:1])
        torch.testing.assert_close(alone[0], loss[1])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "overload-call"])
def test_padding_does_not_count(name):
    model = model_of(k=2, balance={"switch": 1.0})
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    with watch(model, keep="all") as routes:
        model.moe(x, mask)
    seen, y = Seen(model(x), routes), y_of(x)
    with watch(model, keep="all") as short:
        model.moe(x[1:, :3])
    alone = LOSSES[name](Seen(model(x[1:]), short), y[:1])
    torch.testing.assert_close(LOSSES[name](seen, y)[1], alone[0])


def test_ascent_on_overload_makes_the_capacity_drop():
    model, x = model_of(k=1, capacity_factor=1.0, group="example"), torch.randn(4, 8, 6).double()
    before = use(see(model, x).routes)["moe"]
    after = use(see(model, climb(model, x, "overload")).routes)["moe"]
    assert after.dropped > before.dropped + 5


def test_ascent_on_diversity_empties_experts():
    model, x = model_of(k=1), torch.randn(1, 12, 6).double()
    before = use(see(model, x).routes)["moe"].as_dict()["dead"]
    after = use(see(model, climb(model, x, "diversity", rate=0.5)).routes)["moe"].as_dict()["dead"]
    assert len(after) > len(before)


def test_ascent_on_the_margin_changes_routes():
    model, x = model_of(k=1), torch.randn(3, 8, 6).double()
    clean = see(model, x).routes
    moved = climb(model, x, "router-margin", steps=40, rate=0.05)
    grown = routing_change(clean, see(model, moved).routes, examples=3)["moe"]
    away = (moved - x).flatten(1).norm(dim=1).view(-1, 1, 1)
    random = torch.randn_like(x)
    random = x + away * random / random.flatten(1).norm(dim=1).view(-1, 1, 1)
    assert grown > routing_change(clean, see(model, random).routes, examples=3)["moe"] + 0.1


@pytest.mark.parametrize(("name", "router"), [
    ("router-margin", "softmax"), ("router-margin", "softmax-static"), ("router-margin", "hash"),
    ("router-margin", "tree"),
    ("overload", "hash"), ("diversity", "top-k-static"), ("overload-call", "top-k-static"),
])  # fmt: skip
def test_a_router_that_cannot_be_attacked_so_says_it(name, router):
    # With a capacity a static router has a choice for each token, and still one gate for all.
    model = Model(router=router, capacity_factor=1.0 if "static" in router else None).eval()
    if router == "hash":
        ids = torch.arange(10).view(2, 5)
        model.moe.register_forward_pre_hook(lambda m, a, k: (a, {"ids": ids}), with_kwargs=True)
    seen = see(model, torch.randn(2, 5, 6))
    with pytest.raises(ValueError, match=f'loss "{name}" needs a router with'):
        LOSSES[name](seen, torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize("options", [{"router": "softmax"}, {"router": "top-k", "k": 4}])
def test_the_margin_of_all_experts_is_refused_though_some_are_dropped_or_padding(options):
    model = Model(capacity_factor=0.5, **options).eval()
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    x, y = torch.randn(2, 5, 6), torch.zeros(2, dtype=torch.long)
    for given in (None, mask):
        with watch(model, keep="all") as routes:
            model.moe(x, given)
        with pytest.raises(ValueError, match="experts that were not chosen"):
            LOSSES["router-margin"](Seen(torch.zeros(2, 3), routes), y)


def test_errors_in_one_sentence():
    model, x = Model(balance={}).eval(), torch.randn(2, 5, 6)
    y = torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match='loss "auxiliary" needs a balance loss'):
        LOSSES["auxiliary"](see(model, x), y)
    with pytest.raises(ValueError, match='"overload" needs the routes'):
        LOSSES["overload"](Target(model)(x), y)


def test_a_sum_of_losses_watches():
    both = build_loss({"ce": 1.0, "overload": 2.0})
    assert both.needs_routes
    model, x = Model().eval(), torch.randn(2, 5, 6)
    seen, y = see(model, x), torch.zeros(2, dtype=torch.long)
    want = LOSSES["ce"](seen, y) + 2 * LOSSES["overload"](seen, y)
    torch.testing.assert_close(both(seen, y), want)
