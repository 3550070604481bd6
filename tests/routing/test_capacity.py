"""Who keeps a place when an expert is full."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from moiety.routing.capacity import limit, slots_for
from moiety.routing.value import Routing

INDEX = [[0, 1], [0, 2], [0, 1], [1, 0]]
WEIGHT = [[0.5, 0.1], [0.6, 0.1], [0.9, 0.1], [0.7, 0.2]]


def decision(index=INDEX, weight=WEIGHT, experts=3) -> Routing:
    index = torch.tensor(index)
    return Routing(index=index, weight=torch.tensor(weight), experts=experts, tokens=index.shape[0])


def kept(routing: Routing) -> list:
    return routing.active.int().tolist()


def test_first_choices_are_placed_before_second_ones():
    # Capacity ceil(4 · 2 · 0.75 / 3) = 2.
    # First choices:  expert 0 takes tokens 0 and 1, not 2; expert 1 takes token 3.
    # Second choices: expert 1 takes token 0 and is full for token 2; expert 2 takes token 1;
    #                 expert 0 is full for token 3.
    r = limit(decision(), 0.75)
    assert kept(r) == [[1, 1], [1, 1], [0, 0], [1, 0]]
    assert r.dropped.int().tolist() == [[0, 0], [0, 0], [1, 1], [0, 1]]
    assert r.load().tolist() == [2, 2, 1]
    assert r.demand().tolist() == [4, 3, 1]
    assert r.drop_rate().item() == pytest.approx(3 / 8)


def test_priority_serves_the_larger_gate_first():
    # Served in the order 2, 3, 1, 0. First: expert 0 takes 2 and 1, expert 1 takes 3.
    # Second: expert 1 takes 2; expert 0 is full for 3; expert 2 takes 1; expert 1 is full for 0.
    r = limit(decision(), 0.75, overflow="priority")
    assert kept(r) == [[0, 0], [1, 1], [1, 1], [1, 0]]


def test_equal_gates_keep_the_order_under_priority():
    even = [[0.5, 0.5]] * 4
    by_order = limit(decision(weight=even), 0.75)
    assert kept(limit(decision(weight=even), 0.75, overflow="priority")) == kept(by_order)


def test_groups_have_their_own_capacity():
    # Two groups of two tokens, capacity ceil(2 · 2 · 0.75 / 3) = 1 in each.
    r = limit(decision(), 0.75, group=2)
    assert kept(r) == [[1, 1], [0, 1], [1, 0], [1, 0]]


def test_the_last_group_counts_only_its_own_tokens():
    # Groups of 3 and of 1 token, all to expert 0 of 2: ceil(3/2) = 2 places, then ceil(1/2) = 1.
    r = limit(decision([[0]] * 4, [[1.0]] * 4, experts=2), 1.0, group=3)
    assert kept(r) == [[1], [1], [0], [1]]


@pytest.mark.parametrize("overflow", ["order", "priority"])
def test_padding_takes_no_place_and_adds_none(overflow):
    # Token 0 is padding: capacity ceil(3 · 2 · 0.75 / 3) = 2, and its places go to the others.
    mask = torch.tensor([False, True, True, True])
    r = limit(decision(), 0.75, overflow=overflow, mask=mask)
    assert kept(r) == [[0, 0], [1, 1], [1, 1], [1, 0]]
    assert r.dropped.int().tolist() == [[0, 0], [0, 0], [0, 0], [0, 1]]


def test_inactive_slots_take_no_place():
    active = torch.tensor([[False, True], [True, True], [True, True], [True, True]])
    r = limit(decision().replace(active=active), 0.75)
    assert kept(r)[2][0] == 1  # the place that token 0 left


@pytest.mark.parametrize("factor", ["1.05", "0.1", "1.25", "1.5", "2"])
def test_the_formula_is_exact(factor):
    # In floating point 100 · 1.05 / 5 is a little more than 21, and its ceiling would be 22.
    for experts in (1, 3, 5, 8, 20, 64):
        for k in (1, 2):
            tokens = range(0, 400, 5)
            want = [math.ceil(Fraction(factor) * k * n / experts) for n in tokens]
            got = slots_for(torch.tensor(list(tokens)), k * float(factor), experts)
            assert got.tolist() == want


def test_it_agrees_with_a_plain_loop():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        tokens, experts, k = 23, 4, 2
        order = torch.rand(tokens, experts, generator=generator).argsort(1)
        routing = decision(order[:, :k].tolist(), torch.rand(tokens, k).tolist(), experts)
        mask = torch.rand(tokens, generator=generator) > 0.3
        r = limit(routing, 1.05, group=10, mask=mask)
        assert kept(r) == plainly(routing.index.tolist(), mask.tolist(), experts, 1.05, 10)


def plainly(index, mask, experts, factor, group):
    k = len(index[0])
    out = [[0] * k for _ in index]
    for start in range(0, len(index), group):
        members = [t for t in range(start, min(start + group, len(index))) if mask[t]]
        room = [math.ceil(round(len(members) * k * factor / experts, 9))] * experts
        for rank in range(k):
            for t in members:
                out[t][rank] = int(room[index[t][rank]] > 0)
                room[index[t][rank]] -= 1
    return out


def test_no_tokens():
    empty = Routing(
        index=torch.zeros(0, 2, dtype=torch.long), weight=torch.zeros(0, 2), experts=3, tokens=0
    )
    assert limit(empty, 1.0).tokens == 0


def test_expert_choice_refuses_a_second_capacity():
    by_expert = decision().replace(by="expert")
    with pytest.raises(ValueError, match="capacity built in"):
        limit(by_expert, 1.0)


def test_a_second_limit_keeps_what_the_first_dropped():
    index = torch.tensor([[0], [0], [0], [1]])
    routing = Routing(index=index, weight=torch.ones(4, 1), experts=2, tokens=4)
    once = limit(routing, 1.0)  # two slots an expert: token 2 is dropped
    twice = limit(once, 0.5)  # one slot an expert: token 1 as well
    assert twice.dropped.flatten().tolist() == [False, True, True, False]
    assert twice.demand().tolist() == [3, 1]
    assert float(twice.drop_rate()) == 0.5


def test_priority_looks_at_the_gate_not_at_renormalised_weights():
    # Both tokens want expert 0, with weight one after renormalising; token 1 is surer.
    gate = torch.tensor([[0.6, 0.4], [0.9, 0.1]])
    routing = Routing.choose(torch.tensor([[0], [0]]), gate, renormalise=True)
    assert limit(routing, 1.0).active.flatten().tolist() == [True, False]
    sure = limit(routing, 1.0, overflow="priority")
    assert sure.active.flatten().tolist() == [False, True]
