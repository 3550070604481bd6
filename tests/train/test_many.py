"""Every copy of `fit_many` ends where a plain loop over seeds ends."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import moiety
from moiety.train import fit_many, seeded, step_seed
from moiety.train.layers import pool_first

SEEDS = [3, 0, 11]
TORCH = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "sgd": torch.optim.SGD,
}


def task(examples=44, dtype=torch.float32, seed=0):
    x = torch.randn(examples, 16, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def mlp(seed=None):
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def conv(seed=None):
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 4, 3, bias=False),  # before a norm its gradient is rounding alone
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def dropping(seed=None):
    return nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))


def routed(router="top-k", **options):
    def make(seed):
        layer = moiety.MoE(router, dim=16, hidden=4, experts=4, **options)
        return nn.Sequential(layer, nn.Linear(16, 3))

    return make


def plain(make, data, seed, *, optimizer, steps, batch=16, clip=None, schedule=None, watch=(), **o):
    """The loop one would write; `watch` are the steps whose weights are wanted."""
    with seeded(seed):
        model = make(seed).to(data.tensors[0].dtype)
    optimizer = TORCH[optimizer](model.parameters(), **o)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule or (lambda step: 1.0))
    generator, order, losses, snapshots = torch.Generator().manual_seed(seed), [], [], {}
    x, y = data.tensors
    for step in range(1, steps + 1):
        if not order:
            order = list(torch.randperm(len(y), generator=generator).split(batch))
        rows = order.pop(0)
        with seeded(step_seed(seed, step)):
            if any(isinstance(part, moiety.MoE) for part in model.modules()):
                with moiety.watch(model) as routes:
                    loss = F.cross_entropy(model(x[rows]), y[rows]) + routes.loss()
            else:
                loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        rates.step()
        losses.append(loss.item())
        if step in watch:
            snapshots[step] = copy.deepcopy(model)
    return model, losses, snapshots


def same(model, other, tolerance=1e-5):
    pairs = zip(model.state_dict().items(), other.state_dict().items(), strict=True)
    for (name, a), (_, b) in pairs:
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
        )


def agree(make, many, each, *, steps=20, dtype=torch.float32, tolerance=1e-5):
    """Compare `fit_many(**many)` with the plain loop of each seed with its own settings."""
    data = task(dtype=dtype)
    built = lambda seed: make(seed).to(dtype)  # noqa: E731
    fitted = fit_many(built, data, seeds=SEEDS, steps=steps, batch=16, block=3, **many)
    assert fitted.best_step == [steps] * len(SEEDS)
    for i, (seed, model) in enumerate(zip(SEEDS, fitted.models(), strict=True)):
        want, losses, _ = plain(make, data, seed, steps=steps, **each(i))
        same(model, want, tolerance)
        assert fitted.history[i].loss == pytest.approx(losses, rel=10 * tolerance)


OPTIMIZERS = {
    "adam": {"lr": 1e-2, "weight_decay": 0.1},
    "adamw": {"lr": 1e-2, "weight_decay": 0.1},
    "adagrad": {"lr": 1e-2, "weight_decay": 0.1},
    "adadelta": {"lr": 1.0, "weight_decay": 0.1},
    "sgd": {"lr": 0.1, "weight_decay": 0.1},
}


@pytest.mark.parametrize("make", [mlp, conv, routed()], ids=["mlp", "conv", "routed"])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_equals_the_plain_loop(name, clip, make):
    settings = {"optimizer": name, "clip": clip, **OPTIMIZERS[name]}
    exact = {"dtype": torch.float64, "tolerance": 1e-10}
    agree(make, settings, lambda i: settings, **exact)


@pytest.mark.parametrize("make", [mlp, conv, routed()], ids=["mlp", "conv", "routed"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_in_single_precision_too(name, make):
    settings = {"optimizer": name, **OPTIMIZERS[name]}
    agree(make, settings, lambda i: settings)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_settings_of_each_copy(name):
    base = OPTIMIZERS[name]["lr"]
    lists = {
        "lr": [base, base / 3, base / 10],
        "weight_decay": [0.0, 0.1, 0.3],
        "clip": [0.1, 0.5, math.inf],
        "schedule": [lambda s: 1.0, lambda s: 0.9**s, lambda s: 1 / (1 + s)],
    }
    agree(
        mlp,
        {"optimizer": name, **lists},
        lambda i: {"optimizer": name, **{word: values[i] for word, values in lists.items()}},
        dtype=torch.float64,
        tolerance=1e-10,
    )


@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [
        ("adam", {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3}, {"betas": (0.5, 0.9), "eps": 1e-3}),
        ("adamw", {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3}, {"betas": (0.5, 0.9), "eps": 1e-3}),
        ("adagrad", {"eps": 1e-3}, {"eps": 1e-3}),
        ("adadelta", {"rho": 0.5, "eps": 1e-3}, {"rho": 0.5, "eps": 1e-3}),
        ("sgd", {"momentum": 0.9}, {"momentum": 0.9}),
        ("sgd", {"momentum": 0.9, "nesterov": 1}, {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_options_of_the_optimizers(name, options, theirs):
    settings = {"optimizer": name, "lr": 0.03, "weight_decay": 0.0}
    exact = {"dtype": torch.float64, "tolerance": 1e-10}
    agree(mlp, {**settings, "options": options}, lambda i: {**settings, **theirs}, **exact)


@pytest.mark.parametrize("name", moiety.list_routers())
def test_every_router_with_its_losses_and_noise(name):
    settings = {"optimizer": "adam", "lr": 1e-2}
    exact = {"dtype": torch.float64, "tolerance": 1e-9}
    agree(routed(name), settings, lambda i: settings, steps=5, **exact)


def test_balance_losses_count():
    light, heavy = (
        fit_many(routed(balance={"switch": w}), task(), seeds=[0], steps=1).history[0].loss[0]
        for w in (0.0, 10.0)
    )
    assert heavy > light + 5


@pytest.mark.parametrize("make", [dropping, routed("noisy-top-k")], ids=["dropout", "noise"])
def test_random_numbers_belong_to_seed_and_step(make):
    settings = {"optimizer": "sgd", "lr": 0.1}
    agree(make, settings, lambda i: settings, dtype=torch.float64, tolerance=1e-10)


@pytest.mark.parametrize("block", [1, 2])
def test_blocks_give_the_same_results(block):
    settings = {"seeds": SEEDS, "epochs": 3, "batch": 16, "lr": [0.1, 0.01, 0.02]}
    settings |= {"validation": task(seed=1), "patience": 1, "clip": [1.0, 0.1, 0.5]}
    one = fit_many(dropping, task(), **settings)
    parts = fit_many(dropping, task(), block=block, **settings)
    assert one.best_step == parts.best_step
    for a, b in zip(one.models(), parts.models(), strict=True):
        same(a, b)


def test_best_weights_and_stopping_of_each_copy():
    data, held = task(), task(seed=1)
    lr, patience = [3.0, 0.003, 0.3], 2
    settings = {"optimizer": "sgd", "steps": 24, "batch": 16}
    judged = {"validation": held, "every": 2, "patience": patience}
    fitted = fit_many(conv, data, seeds=SEEDS, lr=lr, block=3, **judged, **settings)
    ends = set()
    for i, seed in enumerate(SEEDS):
        checks = range(2, 25, 2)
        _, losses, models = plain(conv, data, seed, lr=lr[i], watch=checks, **settings)
        best, best_step, curve = math.inf, 0, {}
        for step in checks:
            with torch.no_grad():
                x, y = held.tensors
                curve[step] = F.cross_entropy(models[step].eval()(x), y).item()
            if curve[step] < best:
                best, best_step = curve[step], step
            if step - best_step >= 2 * patience:
                break
        history = fitted.history[i]
        assert history.validation == pytest.approx(curve, rel=1e-3)
        assert fitted.best_step[i] == best_step
        assert history.loss == pytest.approx(losses[:step], rel=1e-3)
        same(fitted.models()[i], models[best_step], 1e-4)
        ends.add(step)
    assert len(ends) > 1  # the copies stopped at different steps


def test_convolutions_on_a_cpu_run_one_after_another_and_say_so():
    with pytest.warns(UserWarning, match="one after another"):
        apart = fit_many(conv, task(), seeds=SEEDS, steps=5)
    together = fit_many(conv, task(), seeds=SEEDS, steps=5, block=3)
    for a, b in zip(apart.models(), together.models(), strict=True):
        same(a, b)


def test_score_and_min_gain_decide_what_is_best():
    settings = {"seeds": [0], "epochs": 4, "validation": task(seed=1), "lr": 0.05}
    wrong = lambda out, y: (out.argmax(-1) != y).float().mean()  # noqa: E731
    share = fit_many(mlp, task(), score=wrong, **settings).history[0].validation.values()
    assert all(value * 44 == pytest.approx(round(value * 44), abs=1e-4) for value in share)
    assert fit_many(mlp, task(), min_gain=100.0, patience=2, **settings).best_step == [1]


def test_a_seed_is_alone_in_any_company():
    one = fit_many(dropping, task(), seeds=[5], steps=4).models()[0]
    among = fit_many(dropping, task(), seeds=[1, 5, 5], steps=4, lr=[1e-3, 1e-3, 1e-2]).models()
    same(one, among[1])
    assert not torch.allclose(among[1][0].weight, among[2][0].weight)


def test_a_copy_that_diverges_spoils_no_other():
    settings = {"seeds": SEEDS, "steps": 9, "validation": task(seed=1), "optimizer": "sgd"}
    calm = fit_many(mlp, task(), lr=0.1, **settings)
    wild = fit_many(mlp, task(), lr=[0.1, 1e30, 0.1], **settings)
    assert math.isnan(wild.history[1].loss[-1]) and wild.best_step[1] == 0
    for i in (0, 2):
        same(calm.models()[i], wild.models()[i])


def test_pooling_before_relu_is_the_same_to_the_bit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.ReLU())
    turned = pool_first(model)
    assert isinstance(turned[1], nn.MaxPool2d) and isinstance(model[1], nn.ReLU)
    x = torch.randn(5, 1, 9, 9).round()  # ties, and zeros
    for each in (model, turned):
        each(x).square().sum().backward()
    assert torch.equal(model(x), turned(x))
    assert torch.equal(model[0].weight.grad, turned[0].weight.grad)


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.again, self.out = (nn.Linear(16, w) for w in (16, 16, 3))
            self.again.weight = self.inner.weight

        def forward(self, x):
            return self.out(self.again(self.inner(x).tanh()))

    settings = {"optimizer": "adam", "lr": 1e-2}
    agree(lambda seed: Tied(), settings, lambda i: settings, dtype=torch.float64, tolerance=1e-10)


def test_frozen_and_unused_parameters_stay():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.idle = mlp(), nn.Linear(2, 2)
            self.net[0].weight.requires_grad_(False)

        def forward(self, x):
            return self.net(x)

    fitted = fit_many(lambda seed: Part(), task(), seeds=[0], steps=3, weight_decay=0.5)
    with seeded(0):
        before = Part()
    after = fitted.models()[0]
    assert torch.equal(after.net[0].weight, before.net[0].weight)
    assert torch.equal(after.idle.weight, before.idle.weight)
    assert not torch.equal(after.net[2].weight, before.net[2].weight)


def test_the_callers_random_state_is_left_alone_and_steps_are_told():
    state, steps = torch.get_rng_state(), []
    fit_many(dropping, task(), seeds=[0, 1], steps=3, on_step=steps.append)
    assert torch.equal(state, torch.get_rng_state())
    assert steps == [1, 2, 3]


class Peeking(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


class Shuffling(nn.Linear):
    def forward(self, x):
        return super().forward(x)[torch.randperm(len(x))]


@pytest.mark.parametrize("kind", [Peeking, Shuffling])
def test_a_model_that_cannot_be_batched_is_told_why(kind):
    with pytest.raises(ValueError, match=f"{kind.__name__} cannot be trained by fit_many"):
        fit_many(lambda seed: kind(16, 3), task(), seeds=[0, 1], steps=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 1, "epochs": 1}, "either steps or epochs"),
        ({}, "either steps or epochs"),
        ({"steps": 0}, "nothing to train"),
        ({"steps": 1, "seeds": []}, "seeds is empty"),
        ({"steps": 1, "optimizer": "lion"}, "must be one of adam, .* got 'lion'"),
        ({"steps": 1, "options": {"momentum": 0.9}}, "adam has no option 'momentum'"),
        ({"steps": 1, "lr": [0.1]}, "lr has 1 values for 2 seeds"),
        ({"steps": 1, "schedule": [lambda s: 1.0]}, "schedule has 1 values for 2 seeds"),
        ({"steps": 1, "patience": 3}, "give validation"),
        ({"steps": 1, "validation": task(0)}, "validation is empty"),
    ],
)
def test_wrong_arguments(wrong, message):
    with pytest.raises(ValueError, match=message):
        fit_many(mlp, task(), **{"seeds": [0, 1], **wrong})


@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_other_backends_are_refused(backend):
    with pytest.raises(ValueError, match=f'backend="auto", not {backend!r}'):
        fit_many(routed(backend=backend), task(), seeds=[0], steps=1)


def test_models_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="make must build the same model for every seed"):
        fit_many(lambda seed: nn.Linear(16, 3 + seed), task(), seeds=[0, 1], steps=1)


def test_a_score_that_reads_values_is_told_why():
    settings = {"seeds": [0, 1], "steps": 1, "validation": task(seed=1)}
    with pytest.raises(ValueError, match=r"item\(\)"):
        fit_many(mlp, task(), score=lambda out, y: out.sum().item(), **settings)


def test_every_copy_with_data_of_its_own():
    trains, held = [task(seed=i) for i in range(3)], [task(30, seed=9 + i) for i in range(3)]
    words = {"steps": 12, "batch": 16, "lr": 0.05, "every": 4}
    many = fit_many(mlp, trains, seeds=SEEDS, validation=held, block=2, **words)
    for i, seed in enumerate(SEEDS):
        alone = fit_many(mlp, trains[i], seeds=[seed], validation=held[i], **words)
        assert many.history[i].validation == pytest.approx(alone.history[0].validation, abs=1e-6)
        assert many.best_step[i] == alone.best_step[0]
        same(many.models()[i], alone.models()[0])


def test_data_of_each_copy_that_does_not_fit():
    with pytest.raises(ValueError, match="train has 2 data sets for 3 seeds"):
        fit_many(mlp, [task(), task()], seeds=SEEDS, steps=1)
    with pytest.raises(ValueError, match="must be of one size and type"):
        fit_many(mlp, [task(), task(), task(40)], seeds=SEEDS, steps=1)
    x, y = task().tensors
    with pytest.raises(ValueError, match=r"one size and type, got .*float32.* and .*float64"):
        fit_many(mlp, [task(), task(), TensorDataset(x.double(), y)], seeds=SEEDS, steps=1)
