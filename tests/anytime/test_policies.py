"""Waiting and replay: decisions by hand, words, and samples that are what they say."""

import random
from itertools import pairwise

import pytest
import torch

from moiety.anytime.policies import (
    ByBudget,
    ByPlateau,
    BySize,
    Fixed,
    Fraction,
    NoReplay,
    Reservoir,
    View,
    draw_keys,
    read_replay,
    read_wait,
)


def phases(wait, rows, score=lambda k: 0.0, price=lambda n: float(n)):
    """At which times a policy trains on mega-batches of these sizes."""
    waiting, flops, validation, times = [], [], [], []
    for t, size in enumerate(rows, start=1):
        waiting.append(size)
        if wait.ready(View(t, tuple(waiting), tuple(flops), tuple(validation))):
            times.append(t)
            flops.append(price(sum(waiting)))
            validation.append(score(len(times)))
            waiting = []
    return times


def test_a_fixed_wait_trains_every_w_arrivals():
    assert phases(Fixed(1), [5] * 4) == [1, 2, 3, 4]
    assert phases(Fixed(3), [5] * 7) == [3, 6]


def test_by_size_counts_rows_not_arrivals():
    assert phases(BySize(10), [4, 4, 4, 20, 1, 9]) == [3, 4, 6]


def test_by_budget_earns_at_every_arrival_what_a_phase_costs():
    # A phase costs 3, an arrival earns 1: t = 1 at once (owes 2), then 3 + 3 <= t, 6 + 3 <= t, …
    assert phases(ByBudget(1.0), [1] * 12, price=lambda n: 3.0) == [1, 6, 9, 12]
    assert phases(ByBudget(100.0), [1] * 4, price=lambda n: 3.0) == [1, 2, 3, 4]


@pytest.mark.parametrize("share", [0.5, 1.0, 1.5, 3.0])
def test_by_budget_overdraws_by_no_more_than_the_newest_phase(share):
    # A row costs so many times what it earns: all that was spent after a phase does, too.
    times = phases(ByBudget(2.0), [1] * 1000, price=lambda rows: 2 * share * rows)
    assert len(times) > 4
    for before, t in pairwise([0, *times]):
        spent, newest, earned = 2 * share * t, 2 * share * (t - before), 2 * t
        assert spent - earned <= newest
        later = [after for after in times if after > t]
        assert not later or 2 * later[0] >= spent + newest  # earned back before the next


def test_by_budget_keeps_to_it_whatever_a_phase_costs():
    draw, prices = random.Random(0), []

    def price(rows):
        prices.append(rows * draw.uniform(0.1, 2.0))
        return prices[-1]

    rows = [draw.randint(1, 9) for _ in range(3000)]
    times = phases(ByBudget(4.0), rows, price=price)
    assert len(times) > 4
    over = [sum(prices[: i + 1]) - 4 * t for i, t in enumerate(times)]
    assert all(more <= newest for more, newest in zip(over, prices, strict=True))
    assert max(over) > 0


def test_by_plateau_doubles_while_nothing_is_gained_and_starts_again_after_a_gain():
    scores = {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.9, 5: 0.95}
    # gains: -, 0, 0, 0.4, 0.05: waits 1, 1, 2, 4, 1, 1
    times = phases(ByPlateau(0.01), [1] * 10, score=lambda k: scores.get(k, 1.0))
    assert times == [1, 2, 4, 8, 9, 10]
    flat = phases(ByPlateau(0.01, most=2), [1] * 9, score=lambda k: 0.5)
    assert flat == [1, 2, 4, 6, 8]


def test_a_fallen_score_must_beat_the_best_before_to_count_as_a_gain():
    policy = ByPlateau(0.01)
    assert not policy.ready(View(4, (1,), validation=(0.9, 0.2, 0.8)))
    assert policy.ready(View(4, (1,), validation=(0.9, 0.2, 0.91)))


@pytest.mark.parametrize(
    ("words", "policy"),
    [
        ("5", Fixed(5)),
        (5, Fixed(5)),
        ("size:10000", BySize(10000)),
        ("size:1e4", BySize(10000)),
        ("budget:1e12", ByBudget(1e12)),
        ("plateau:0.001", ByPlateau(0.001)),
        ("plateau:0.001:8", ByPlateau(0.001, 8)),
        (Fixed(2), Fixed(2)),
    ],
)
def test_waits_are_read_from_words_and_written_back(words, policy):
    assert read_wait(words) == policy
    assert read_wait(str(policy)) == policy


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("soon", "is not known: give a number"),
        ("1.5", "is not known"),
        ("size:many", "is not known"),
        ("size:", "is not known"),
        ("inf", "is not known"),
        ("plateau:1:2:3", "is not known"),
        ("0", "at least 1 mega-batch"),
        ("size:0", "at least 1 row"),
        ("budget:-1", "positive"),
        ("plateau:-1", "from 0 up"),
    ],
)
def test_a_wrong_wait_is_one_sentence(words, said):
    with pytest.raises(ValueError, match=said):
        read_wait(words)


@pytest.mark.parametrize(
    ("words", "policy"),
    [
        ("none", NoReplay()),
        ("0", NoReplay()),
        ("0.2", Fraction(0.2)),
        (1, Fraction(1.0)),
        ("reservoir:5000", Reservoir(5000)),
        (Reservoir(2), Reservoir(2)),
    ],
)
def test_replays_are_read_from_words_and_written_back(words, policy):
    assert read_replay(words) == policy
    assert read_replay(str(policy)) == policy


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("all", "is not known: give none"),
        ("reservoir", "is not known"),
        ("reservoir:0", "at least 1 row"),
        ("1.5", "at most 1"),
        ("nan", "at most 1"),
    ],
)
def test_a_wrong_replay_is_one_sentence(words, said):
    with pytest.raises(ValueError, match=said):
        read_replay(words)


def test_a_share_is_drawn_anew_for_each_phase_and_again_for_the_same():
    keys = torch.rand(100)
    first = Fraction(0.2).keep(keys, seed=0, phase=1)
    assert len(first) == len(first.unique()) == 20
    assert first.equal(Fraction(0.2).keep(keys, seed=0, phase=1))
    assert not first.equal(Fraction(0.2).keep(keys, seed=0, phase=2))
    assert not first.equal(Fraction(0.2).keep(keys, seed=1, phase=1))
    assert Fraction(1.0).keep(keys, seed=0, phase=1).tolist() == list(range(100))
    assert len(NoReplay().keep(keys, seed=0, phase=1)) == 0


def test_a_reservoir_is_a_uniform_sample_of_all_rows_seen():
    counts = torch.zeros(6)
    for seed in range(600):  # 3 mega-batches of 2 rows each, one after another; 2 are kept
        memory, rows = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.long)
        for number in range(3):
            memory = torch.cat([memory, draw_keys(seed, number, 2)])
            rows = torch.cat([rows, torch.arange(2) + 2 * number])
            kept = Reservoir(2).keep(memory, seed, number)
            memory, rows = memory[kept], rows[kept]
        counts[rows] += 1
    # Each row is kept with probability 1/3: 200 times, with a standard deviation of 11.5.
    assert (counts - 200).abs().max() < 50


def test_the_keys_of_a_mega_batch_are_its_own_and_come_again():
    assert draw_keys(0, 1, 4).equal(draw_keys(0, 1, 4))
    assert not draw_keys(0, 1, 4).equal(draw_keys(0, 2, 4))
    assert not draw_keys(0, 1, 4).equal(draw_keys(1, 1, 4))
