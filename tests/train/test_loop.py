"""The loop: learns, keeps the best check, and goes on after a kill to the same bits."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import moiety
from moiety.lab.store import Store, Trial
from moiety.train import seeded
from moiety.train.loop import Recipe, train

X = torch.randn(90, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()


def sparse(router="noisy-top-k", **options):
    with seeded(0):
        layer = moiety.MoE(router, dim=8, hidden=16, experts=4, activation=F.gelu, **options)
        return nn.Sequential(layer, nn.Dropout(0.2), nn.Linear(8, 2))


class Killed(Exception):
    """What stands for `kill -9` in one process."""


def fit(model, store=None, *, steps=24, seed=3, die_at=None, **changes):
    seen = []

    def loss(rows):
        seen.append(rows)
        if die_at is not None and len(seen) > die_at:
            raise Killed
        return F.cross_entropy(model(X[rows]), Y[rows])

    def score():
        with torch.no_grad():
            return float((model(X).argmax(1) == Y).double().mean())

    words = {}
    if store is not None:
        trial = Trial("s", "a", seed, {})
        words = {"curve": store.curve(trial), "checkpoint": store.checkpoint(trial)}
        words["save_every"] = 0.0
    recipe = Recipe(**{"steps": steps, "batch": 16, "points": 12, "checks": 6, **changes})
    best = train(model, recipe, examples=90, seed=seed, loss=loss, score=score, **words)
    return best, seen


def curve(store):
    return store.curve(Trial("s", "a", 3, {})).rows()


def test_it_learns_and_leaves_the_best_check():
    model = sparse()
    best, seen = fit(model, steps=200)
    with torch.no_grad():
        assert float((model(X).argmax(1) == Y).double().mean()) == best.score > 0.8
    assert not model.training
    assert len(seen) == 200 and all(len(rows) == 16 for rows in seen)


def test_an_epoch_shows_each_example_once_and_each_epoch_in_another_order():
    _, seen = fit(sparse(), steps=10)
    first, second = torch.cat(seen[:5]), torch.cat(seen[5:])  # 90 // 16 = 5 steps an epoch
    assert len(first.unique()) == len(second.unique()) == 80
    assert not torch.equal(first, second)


ROUTERS = ["noisy-top-k", "sigmoid-balanced", "dselect-k", "switch", "perturbed-cosine"]


@pytest.mark.parametrize("router", ROUTERS)
def test_killed_anywhere_it_ends_in_the_same_bits(router, tmp_path):
    whole = sparse(router)
    best, _ = fit(whole, Store(tmp_path / "whole"))
    store = Store(tmp_path / "killed")
    for die_at in (1, 9, 5, 8):  # in the first steps, and between points
        with pytest.raises(Killed):
            fit(sparse(router), store, die_at=die_at)
    model = sparse(router)
    again, seen = fit(model, store)
    assert len(seen) < 24  # it did continue
    assert again == best and curve(store) == curve(Store(tmp_path / "whole"))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_the_best_check_survives_a_kill(tmp_path):
    """Scores that fall after the first: only the checkpoint knows the best weights."""
    scores = iter([0.9] + [0.1] * 99)

    def run(model, die_at=None):
        count = [0]

        def loss(rows):
            count[0] += 1
            if count[0] == die_at:
                raise Killed
            return F.cross_entropy(model(X[rows]), Y[rows])

        checkpoint = Store(tmp_path).checkpoint(Trial("s", "a", 0, {}))
        words = {"checkpoint": checkpoint, "save_every": 0.0, "score": lambda: next(scores)}
        recipe = Recipe(steps=8, batch=16, points=8, checks=8)
        return train(model, recipe, examples=90, seed=0, loss=loss, **words)

    with pytest.raises(Killed):
        run(sparse(), die_at=5)
    assert run(sparse()).step == 1


def test_the_curve_has_its_points_and_checks(tmp_path):
    fit(sparse(), Store(tmp_path), steps=24)
    rows = curve(Store(tmp_path))
    assert [row["step"] for row in rows] == list(range(2, 25, 2))
    assert [row["step"] for row in rows if "validation" in row] == [4, 8, 12, 16, 20, 24]


def test_fewer_steps_than_points():
    assert fit(sparse(), steps=3)[0].step in (1, 2, 3)


def test_the_learning_rate_rises_and_falls():
    recipe = Recipe(steps=100, lr=2.0, warmup=0.1)
    rates = [recipe.rate(step) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == 2.0 == max(rates)
    assert rates[9:] == sorted(rates[9:], reverse=True) and 0 < rates[-1] < 0.01
    assert recipe.rate(55) == pytest.approx(1 + math.cos(math.pi * 45 / 91))


@pytest.mark.parametrize(
    "changes", [{"lr": 1e-2}, {"weight_decay": 5.0}, {"batch": 8}, {"warmup": 0.5}, {"clip": 1e-3}]
)
def test_every_option_changes_something(changes):
    model, other = sparse(), sparse()
    fit(model)
    fit(other, **changes)
    assert not torch.equal(model[2].weight, other[2].weight)


def test_balance_losses_of_routers_are_part_of_it():
    plain, pulled = sparse("top-k", balance={}), sparse("top-k", balance={"switch": 10.0})
    fit(plain)
    fit(pulled)
    assert not torch.equal(plain[0].router.weight, pulled[0].router.weight)


def test_the_callers_random_numbers_are_left_alone():
    model, state = sparse(), torch.get_rng_state()
    fit(model)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("words", "said"), [({"steps": 0}, "steps must be at least 1"), ({"lr": -1.0}, "lr must be")]
)
def test_a_wrong_recipe_says_what_is_wrong(words, said):
    with pytest.raises(ValueError, match=said):
        Recipe(**{"steps": 5, **words})


def test_a_loss_that_explodes_says_what_to_do():
    model = sparse()
    with pytest.raises(ValueError, match="lower the learning rate"):
        train(
            model,
            Recipe(steps=4),
            examples=90,
            seed=0,
            loss=lambda rows: model(X[rows]).sum() * float("nan"),
            score=lambda: 0.0,
        )


def test_checks_after_shares_of_the_steps():
    recipe = Recipe(steps=64, checks=(1 / 64, 1 / 8, 0.5))
    assert [step for step in range(1, 65) if recipe.at(step, recipe.checks)] == [1, 8, 32, 64]
    short = Recipe(steps=3, checks=(1 / 64, 1 / 8, 0.5))
    assert [step for step in range(1, 4) if short.at(step, short.checks)] == [1, 2, 3]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "router",
    [
        "noisy-top-k",
        "top-k",
        "cosine",
        "perturbed-cosine",
        "dselect-k",
        "sigmoid-balanced",
        "expert-choice",  # which has no balance loss
    ],
)
def test_a_captured_step_is_the_step(router, tmp_path):
    x, y = X.cuda(), Y.cuda()

    def losses(capture, store, die_at=None):
        model, calls = sparse(router).cuda(), 0

        def loss(rows):
            nonlocal calls
            calls += 1
            return F.cross_entropy(model(x[rows]), y[rows])

        def tick(share):
            if die_at is not None and share * 24 >= die_at:
                raise Killed

        trial = Trial("s", "a", 3, {})
        words = {"curve": store.curve(trial), "checkpoint": store.checkpoint(trial)}
        recipe = Recipe(steps=24, batch=16, points=24, checks=2)
        train(
            model, recipe, examples=90, seed=3, loss=loss, score=lambda: 0.0, capture=capture,
            tick=tick, save_every=0.0, **words,
        )  # fmt: skip
        return calls, torch.tensor([row["loss"] for row in curve(store)])

    calls, plain = losses(False, Store(tmp_path / "plain"))
    assert calls == 24
    calls, captured = losses(True, Store(tmp_path / "captured"))
    assert calls < 24  # most steps were replayed
    torch.testing.assert_close(captured, plain, atol=1e-4, rtol=1e-3)
    store = Store(tmp_path / "killed")
    with pytest.raises(Killed):
        losses(True, store, die_at=11)
    _, resumed = losses(True, store)
    torch.testing.assert_close(resumed, captured, atol=1e-5, rtol=1e-4)
