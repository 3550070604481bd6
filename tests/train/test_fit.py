"""The loop learns, repeats itself from a seed, and collects the losses of the routers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import moiety
from moiety.train import evaluate, find_device, fit, seeded


def task(examples=96):
    x = torch.randn(examples, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())


def sparse(router="noisy-top-k", **options):
    with seeded(0):
        layer = moiety.MoE(router, dim=8, hidden=16, experts=4, activation=F.gelu, **options)
        return nn.Sequential(layer, nn.Linear(8, 2))


def train(seed=0, **changes):
    model = sparse()
    return fit(model, task(), epochs=2, batch=32, seed=seed, **changes), model


def test_it_learns():
    model = sparse()
    before = evaluate(model, task())
    losses = fit(model, task(), epochs=40, batch=32)
    assert len(losses) == 40 * 3
    assert losses[-1] < losses[0]
    assert evaluate(model, task()) > max(before, 0.9)


def test_a_dense_model_trains_too():
    assert len(fit(nn.Linear(8, 2), task(), epochs=1)) == 2


def test_the_same_seed_gives_the_same_numbers():
    (one, a), (two, b) = train(), train()
    assert one == two
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    assert train(seed=1)[0] != one


def test_the_callers_random_state_is_left_alone():
    state = torch.get_rng_state()
    train()
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("changes", [{"lr": 1e-2}, {"weight_decay": 5.0}, {"batch": 16}])
def test_every_option_changes_something(changes):
    model, other = sparse(), sparse()
    fit(model, task(), epochs=2)
    fit(other, task(), epochs=2, **changes)
    assert not torch.equal(model[1].weight, other[1].weight)


def test_the_losses_of_the_router_are_part_of_the_loss():
    plain, heavy = sparse("top-k", balance={}), sparse("top-k", balance={"switch": 10.0})
    assert fit(heavy, task(), epochs=1)[0] > fit(plain, task(), epochs=1)[0] + 5


def test_the_callback_counts_the_steps():
    steps = []
    train(on_step=steps.append)
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_turns_noise_off_and_restores_the_mode(training):
    model = sparse(std=50.0).train(training)
    model[1].train(not training)  # a part that the user has frozen stays so
    assert len({evaluate(model, task()) for _ in range(3)}) == 1
    assert (model.training, model[1].training) == (training, not training)


@pytest.mark.parametrize("name", ["nonsense", "cuda:99", "meta"])
def test_a_device_that_is_not_here(name):
    with pytest.raises(ValueError, match=f"no device '{name}' here; there is cpu"):
        find_device(name)


def test_a_device_that_is_here():
    assert find_device("cpu") == torch.device("cpu")
