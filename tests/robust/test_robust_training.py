"""Adversarial training: more robust, and otherwise as if there had been no attack."""

import copy
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from moiety import MoE, watch
from moiety.data import digits
from moiety.models import PatchTransformer
from moiety.robust.attack import run_attack
from moiety.robust.pgd import PGD
from moiety.robust.training import attack_batch, fit_attacked
from moiety.train import evaluate, fit
from moiety.train.loop import Recipe, train

ROUTERS = ["sigmoid-balanced", "noisy-top-k", "dselect-k", "switch"]


def patches(name, **words):
    def feedforward(dim):
        return MoE(name, 4, dim=dim, hidden=16, activation=F.gelu, **words)

    torch.manual_seed(0)
    return PatchTransformer(
        patches=16, patch_dim=4, classes=10, dim=12, depth=1, feedforward=feedforward
    )


def flat(name, dim=32):
    torch.manual_seed(0)
    layer = MoE(name, 4, dim=dim, hidden=dim)
    return nn.Sequential(nn.Linear(64, dim), nn.ReLU(), layer, nn.Linear(dim, 10))


def few(n=48):
    return TensorDataset(*(t[:n] for t in digits()[0].tensors))


def state(model):
    return {name: t.clone() for name, t in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- what it is for ------------------------------------------------------------------------------


def test_a_model_trained_on_attacks_withstands_them_better():
    data, test = (TensorDataset(d.tensors[0].flatten(1), d.tensors[1]) for d in digits())
    eps, words = 0.1, {"epochs": 20, "batch": 200, "seed": 0}
    plain, attacked = flat("sigmoid-balanced"), flat("sigmoid-balanced")
    fit(plain, data, **words)
    fit_attacked(attacked, data, eps=eps, steps=2, **words)
    wrong = [
        run_attack(PGD(steps=10), model.eval(), *test.tensors, eps).fooled.float().mean().item()
        for model in (plain, attacked)
    ]
    assert wrong[1] < wrong[0] - 0.2
    assert evaluate(attacked, test) > 0.8


# -- nothing is disturbed ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROUTERS)
def test_with_an_eps_of_zero_it_is_the_ordinary_loop_to_the_bit(name):
    words = {"epochs": 2, "batch": 16, "seed": 3}
    plain, attacked = patches(name), patches(name)
    random = torch.get_rng_state()
    want = fit(plain, few(), **words)
    got = fit_attacked(attacked, few(), eps=0.0, steps=2, **words)
    assert got == want and same(state(plain), state(attacked))
    assert torch.equal(random, torch.get_rng_state())
    assert attacked.training


@pytest.mark.parametrize("name", ROUTERS)
def test_counters_count_the_updates_and_not_the_attacks(name):
    """Buffers that count calls or tokens stand where a loop without attack leaves them."""
    words = {"epochs": 2, "batch": 16, "seed": 3}
    plain, attacked = patches(name), patches(name)
    fit(plain, few(), **words)
    fit_attacked(attacked, few(), eps=0.3, steps=4, **words)
    one, other = (dict(model.named_buffers()) for model in (plain, attacked))
    counters = [n for n, t in one.items() if not t.is_floating_point()]
    assert bool(counters) == (name in ("sigmoid-balanced", "dselect-k"))
    for counter in counters:
        assert int(one[counter].sum()) == int(other[counter].sum()) > 0
    assert not same(state(plain), state(attacked))  # it was another training


def test_labels_of_any_whole_numbers():
    x, y = few().tensors
    words = {"eps": 0.1, "steps": 2, "epochs": 1, "batch": 16}
    kinds = (TensorDataset(x, y), TensorDataset(x, y.int()))
    long, short = (fit_attacked(patches("top-k"), data, **words) for data in kinds)
    assert long == short
    moved = (attack_batch(patches("top-k"), x, labels, steps=2) for labels in (y, y.int()))
    assert torch.equal(*moved)


def test_the_bias_moves_once_an_update():
    model = patches("sigmoid-balanced", rate=0.25)
    router = next(m.router for m in model.modules() if isinstance(m, MoE))
    moved = []

    def note(step):
        moved.append(router.bias.clone())

    fit_attacked(model, few(), eps=0.1, steps=3, epochs=1, batch=16, on_step=note)
    assert len(moved) == 3 and moved[0].eq(0).all()  # the first call has no load to go by
    for before, after in pairwise(moved):
        assert (after - before).abs().max() == 0.25
    assert moved[-1].abs().max() <= 0.5


def test_a_watch_around_it_sees_the_training_forward_alone():
    model = patches("top-k", balance={"switch": 0.1}).train()
    x, y = few(8).tensors
    with watch(model, keep="choice") as routes:
        adversarial = attack_batch(model, x, y, eps=0.2)
        assert routes.records == [] and float(routes.loss()) == 0
        model(adversarial)
        assert len(routes.records) == 1 and routes.loss().item() > 0
    with watch(model) as alone:
        model(adversarial)
        alone.loss()
    assert torch.equal(alone.load()[alone.layers[0]], routes.load()[routes.layers[0]])


def test_the_batch_is_attacked_and_the_model_left_as_it_was():
    model = patches("sigmoid-balanced").train()
    frozen = next(m for m in model.modules() if isinstance(m, nn.Linear))
    frozen.eval().requires_grad_(False)
    x, y = few(8).tensors
    F.cross_entropy(model(x), y).backward()
    before, modes = state(model), [m.training for m in model.modules()]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    wants = [p.requires_grad for p in model.parameters()]
    random = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = attack_batch(model, x, y, eps=0.1)
    assert float((found - x).abs().max()) == pytest.approx(0.1, rel=1e-4)
    assert found.min() >= 0 and found.max() <= 1 and not found.requires_grad
    assert same(before, state(model)) and modes == [m.training for m in model.modules()]
    assert wants == [p.requires_grad for p in model.parameters()]
    after = [p.grad for p in model.parameters()]
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(after, grads))
    assert torch.equal(random, torch.get_rng_state())


def test_an_attack_that_fails_leaves_the_watchers():
    model = patches("top-k").train()
    x, y = few(8).tensors
    with watch(model) as routes:
        with pytest.raises(ValueError, match="eps must be a number"):
            attack_batch(model, x, y, eps=-1)
        with pytest.raises(ValueError, match="expected patches"):
            attack_batch(model, x[..., :3], y, eps=0.1)
        model(x)
    assert len(routes.records) == 1


# -- options -------------------------------------------------------------------------------------


def test_it_is_pgd_on_the_batch():
    model = patches("top-k").eval()
    x, y = few(8).tensors
    found = attack_batch(model, x, y, eps=0.1, steps=5)
    want = run_attack(PGD(steps=5), model, x, y, 0.1, keep="last", early_stop=False).x
    assert torch.equal(found, want)


@pytest.mark.parametrize(
    "words",
    [
        {"eps": 0.05},
        {"steps": 1},
        {"rel_stepsize": 0.9},
        {"random_start": True},
        {"norm": "l2"},
        {"bounds": (0.0, 2.0)},
    ],
)
def test_every_option_changes_the_batch(words):
    model = patches("top-k")
    x, y = few(8).tensors
    assert not torch.equal(
        attack_batch(model, x, y, **{"eps": 0.1, **words}), attack_batch(model, x, y, eps=0.1)
    )
    usual, other = (
        fit_attacked(copy.deepcopy(model), few(16), epochs=1, batch=8, **{"eps": 0.1, **w})
        for w in ({}, words)
    )
    assert usual != other


def test_the_seed_decides_the_random_start_and_each_step_has_its_own():
    model = patches("top-k")
    x, y = few(8).tensors
    one, again, other = (
        attack_batch(model, x, y, eps=0.1, random_start=True, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(one, again) and not torch.equal(one, other)
    words = {"eps": 0.1, "steps": 2, "random_start": True, "epochs": 1, "batch": 8}
    a, b, c = (
        fit_attacked(copy.deepcopy(model), few(16), seed=seed, **words) for seed in (0, 0, 1)
    )
    assert a == b != c


def test_normalisation_happens_inside():
    model = patches("top-k")
    words = {"eps": 0.1, "steps": 2, "epochs": 1, "batch": 8}
    plain = fit_attacked(copy.deepcopy(model), few(16), **words)
    scaled = fit_attacked(copy.deepcopy(model), few(16), normalize=(0.5, 0.5), **words)
    assert plain != scaled
    x, y = few(16).tensors
    with pytest.raises(ValueError, match="outside bounds"):
        fit_attacked(model, TensorDataset(2 * x - 1, y), **words)


def test_the_loop_of_studies_trains_on_attacked_batches():
    data = few()
    x, y = data.tensors
    plain, attacked = patches("sigmoid-balanced"), patches("sigmoid-balanced")

    def loss_of(model, eps):
        def loss(rows):
            return F.cross_entropy(model(attack_batch(model, x[rows], y[rows], eps=eps)), y[rows])

        return loss

    recipe = Recipe(steps=4, batch=16, checks=1)
    words = {"examples": len(y), "seed": 0}
    for model, loss in (
        (plain, lambda rows: F.cross_entropy(plain(x[rows]), y[rows])),
        (attacked, loss_of(attacked, 0.0)),
    ):
        train(model, recipe, loss=loss, score=lambda model=model: evaluate(model, data), **words)
    assert same(state(plain), state(attacked))
    other = patches("sigmoid-balanced")
    train(other, recipe, loss=loss_of(other, 0.2), score=lambda: evaluate(other, data), **words)
    assert not same(state(plain), state(other))
