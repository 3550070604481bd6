"""Routing change on cases worked by hand; load, drops and dead experts; parts of a batch."""

import math

import pytest
import torch

from moiety import MoE, Routing, replay, watch
from moiety.robust.routes import change_per_example, routing_change, take, use
from moiety.watch import Routes

E = 4


def routes_of(*calls, mask=None, name="moe"):
    """Routes of one layer; each call is a list with the experts of every token ([]: dropped)."""
    routes = Routes([name], "choice")
    for chosen in calls:
        k = max(1, *map(len, chosen))
        index = torch.tensor([[*row, *(e for e in range(E) if e not in row)][:k] for row in chosen])
        active = torch.tensor([[i < len(row) for i in range(k)] for row in chosen])
        weight = torch.full(index.shape, 0.5)
        real = None if mask is None else torch.tensor(mask)
        routing = Routing(
            index=index, weight=weight, experts=E, tokens=len(chosen), active=active,
            dropped=~active, mask=real,
        )  # fmt: skip
        routes.add(name, routing, {})
    return routes


CASES = {
    "equal": ([[0, 1], [2, 3]], [[1, 0], [3, 2]], 0.0),
    "disjoint": ([[0, 1], [2, 3]], [[2, 3], [0, 1]], 1.0),
    "one of two shared": ([[0, 1], [2, 3]], [[0, 2], [2, 1]], 1 - 1 / 3),
    "top-1 half": ([[0], [1]], [[0], [2]], 0.5),
    "dropped both times": ([[]], [[]], 1.0),  # an empty union has IoU 0
    "dropped after": ([[0, 1]], [[]], 1.0),
    "second choice dropped": ([[0, 1]], [[0]], 0.5),
}


@pytest.mark.parametrize("case", CASES)
def test_change_by_hand(case):
    before, after, change = CASES[case]
    got = routing_change(routes_of(before), routes_of(after))
    assert got == {"moe": pytest.approx(change, abs=1e-12)}


def test_padding_is_left_out_and_examples_weigh_alike():
    before, after = [[0], [1], [2], [3]], [[0], [2], [3], [3]]
    mask = [True, True, True, False]  # the second example has one real token, whose route changed
    old, new = routes_of(before, mask=mask), routes_of(after, mask=mask)
    assert change_per_example(old, new, 2)["moe"].tolist() == [0.5, 1.0]
    assert routing_change(old, new, examples=2) == {"moe": 0.75}
    assert routing_change(old, new) == {"moe": pytest.approx(2 / 3)}  # over tokens


def test_an_example_of_padding_alone_counts_for_nothing():
    mask = [True, False]
    old, new = routes_of([[0], [1]], mask=mask), routes_of([[1], [1]], mask=mask)
    per_example = change_per_example(old, new, 2)["moe"].tolist()
    assert per_example[0] == 1.0
    assert math.isnan(per_example[1])
    assert routing_change(old, new, examples=2) == {"moe": 1.0}


def test_a_layer_that_is_called_twice_has_the_mean_of_its_tokens():
    old, new = routes_of([[0], [1]], [[0], [1]]), routes_of([[0], [1]], [[2], [1]])
    assert change_per_example(old, new, 2)["moe"].tolist() == [0.5, 0.0]


def test_an_expert_without_weight_is_not_chosen():
    old = routes_of([[0, 1]])
    new = Routes(["moe"], "choice")
    new.add("moe", old["moe"][0].replace(weight=torch.tensor([[0.5, 0.0]])), {})
    assert routing_change(old, new) == {"moe": 0.5}


@pytest.mark.parametrize(
    ("after", "examples", "says"),
    [
        (routes_of([[0]], name="other"), 1, "different models"),
        (routes_of([[0], [1]], [[0], [1]]), 1, "called 1 times before and 2 after"),
        (routes_of([[0]]), 1, "routed 2 tokens to 4 experts before and 1 to 4"),
        (routes_of([[0], [1]]), 3, "2 tokens, which cannot be told apart"),
    ],
)
def test_routes_that_cannot_be_compared(after, examples, says):
    with pytest.raises(ValueError, match=says):
        routing_change(routes_of([[0], [1]]), after, examples=examples)


def test_use_by_hand():
    got = use(routes_of([[0, 1], [0, 2], [0], []]))["moe"]
    assert got.load_E.tolist() == [3, 1, 1, 0]
    assert (got.dropped, got.asked) == (3, 8)
    assert got.as_dict() == {"load": [0.6, 0.2, 0.2, 0.0], "dropped": 3 / 8, "dead": [3]}
    twice = got + got
    assert twice.load_E.tolist() == [6, 2, 2, 0]
    assert twice.as_dict() == got.as_dict()


def test_use_agrees_with_the_summary_of_a_watch():
    layer = MoE("top-k", dim=8, hidden=8, experts=E, k=2, capacity_factor=0.6).eval()
    with watch(layer, keep="choice") as routes, torch.no_grad():
        layer(torch.randn(3, 5, 8))
    got, summary = use(routes)["moe"].as_dict(), routes.summary()["moe"]
    assert got["load"] == pytest.approx(summary.load)
    assert got["dropped"] == pytest.approx(summary.drop_rate)
    assert got["dropped"] > 0


@pytest.mark.parametrize("router", ["top-k", "softmax", "softmax-static", "top-k-static"])
def test_the_routes_of_some_examples_replay_on_those(router):
    layer = MoE(router, dim=8, hidden=8, experts=E).eval()
    x, rows = torch.randn(5, 3, 8), torch.tensor([4, 1])
    with watch(layer, keep="all") as routes, torch.no_grad():
        y = layer(x)
    part = take(routes, rows, 5)
    with replay(layer, part, weights=True), torch.no_grad():
        torch.testing.assert_close(layer(x[rows]), y[rows])


def test_experts_that_choose_among_all_examples_cannot_be_taken_apart():
    layer = MoE("expert-choice", dim=8, hidden=8, experts=E).eval()
    with watch(layer, keep="choice") as routes, torch.no_grad():
        layer(torch.randn(2, 3, 8))
    with pytest.raises(ValueError, match="chose among all 2 examples"):
        take(routes, torch.tensor([0]), 2)
    assert use(routes)["moe"].asked == 6
