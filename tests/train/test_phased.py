"""`Phased` beside the plain training of one model in one phase, `anytime.fitting.Fit`."""

import copy

import pytest
import torch
from torch import nn

from moiety.anytime.backbones import crop_flip
from moiety.anytime.data import Examples
from moiety.anytime.fitting import Fit, Training
from moiety.anytime.together import numbers_of
from moiety.train import norms
from moiety.train.phased import Phased, Rules

CLASSES, ROWS = 3, 90


def mlp():
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, CLASSES))


def dropped():
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, CLASSES))


def convolved():
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, CLASSES))


def deep():
    """Its convolutions and pooling have the channels of all copies side by side on a GPU."""
    first = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
    second = nn.Conv2d(8, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(16, CLASSES))


def data(shape=(8,)):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2 * ROWS, *shape, generator=g)
    weight = torch.randn(x[0].numel(), CLASSES, generator=g)
    return x, (x.flatten(1) @ weight).argmax(1)


def started(make, copies):
    models = []
    for seed in range(copies):
        torch.manual_seed(seed)
        models.append(make().eval())
    return models


def rows_of(copies, phase):
    """Rows of each copy for training and for validation, others in each phase."""
    orders = [
        torch.randperm(ROWS, generator=torch.Generator().manual_seed(10 * phase + i)) + phase * ROWS
        for i in range(copies)
    ]
    order_SN = torch.stack(orders)
    return order_SN[:, :70], order_SN[:, 70:]


def rules_of(training):
    numbers = numbers_of(training)
    words = {name: getattr(training, name) for name in ("batch", "epochs", "patience", "min_gain")}
    words |= {"score": training.score, "augment": training.augment}
    return Rules(optimizer=training.method, **numbers, **words)


ADADELTA = Training(batch=16, epochs=12, patience=3)
SGD = Training(method="sgd", lr=0.05, options={"momentum": 0.9, "weight_decay": 1e-3}, batch=16)


@pytest.mark.parametrize(
    ("make", "shape", "training"),
    [
        (mlp, (8,), ADADELTA),
        (mlp, (8,), Training(method="sgd", batch=32, epochs=9, patience=2, score="loss")),
        (mlp, (8,), Training(method="adam", batch=128, epochs=20, patience=4)),
        (dropped, (8,), ADADELTA),
        (convolved, (2, 4, 4), Training(**{**vars(SGD), "epochs": 4, "patience": 2})),
        (
            convolved,
            (2, 4, 4),
            Training(**{**vars(SGD), "epochs": 3, "augment": lambda x: crop_flip(x, 1)}),
        ),
    ],
    ids=["adadelta", "sgd by loss", "adam, one batch", "dropout", "batch norm", "augmented"],
)
def test_each_copy_ends_where_it_would_alone(make, shape, training):
    x, y = data(shape)
    alone = started(make, 3)
    phased = Phased(alone, x, y, rules_of(training))
    stopped = set()
    for phase in range(2):
        train_SN, held_SV = rows_of(3, phase)
        seeds = [100 * phase + i for i in range(3)]
        ended = phased.phase(train_SN, held_SV, seeds)
        for i, model in enumerate(alone):
            parts = [Examples(x[rows], y[rows]) for rows in (train_SN[i], held_SV[i])]
            fit = Fit(model, training, *parts, seeds[i])
            fit.run()
            assert (ended.steps[i], ended.checks[i]) == (fit.step, fit.checks)
            assert ended.best[i] == pytest.approx(fit.best, rel=1e-5)
            stopped.add(fit.step)
        for mine, model in zip(phased.models(), alone):
            for (name, a), b in zip(mine.state_dict().items(), model.state_dict().values()):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    want = torch.stack([model(x).softmax(-1) for model in alone])
    torch.testing.assert_close(phased.probabilities(x), want, rtol=1e-4, atol=1e-5)
    if training is ADADELTA and make is mlp:
        assert len(stopped) > 2  # copies stop at different times


def test_a_copy_does_not_depend_on_its_neighbours():
    x, y = data()
    train_SN, held_SV = rows_of(3, 0)
    models = started(mlp, 3)
    whole, pair = (Phased(models[i:], x, y, rules_of(ADADELTA)) for i in (0, 1))
    three = whole.phase(train_SN, held_SV, [5, 6, 7])
    two = pair.phase(train_SN[1:], held_SV[1:], [6, 7])
    assert three.steps[1:] == two.steps and three.best[1:] == two.best


def test_a_phase_forgets_the_optimizer_of_the_last():
    x, y = data()
    (train, held), rules = rows_of(1, 0), rules_of(ADADELTA)
    first = Phased(started(mlp, 1), x, y, rules)
    first.phase(train, held, [1])
    again = Phased(first.models(), x, y, rules)
    assert first.phase(train, held, [2]) == again.phase(train, held, [2])
    torch.testing.assert_close(first.probabilities(x), again.probabilities(x), rtol=0, atol=0)


def test_each_copy_takes_as_many_checks_as_it_is_told():
    x, y = data()
    train_SN, held_SV = rows_of(3, 0)
    phased = Phased(started(mlp, 3), x, y, rules_of(ADADELTA))
    ended = phased.phase(train_SN, held_SV, [1, 2, 3], every=2, checks=[1, 9, 20])
    assert ended.checks == [1, 9, 20] and ended.steps == [2, 18, 40]


def test_the_models_it_starts_from_stay_as_they_are():
    x, y = data()
    models = started(mlp, 2)
    before = copy.deepcopy([m.state_dict() for m in models])
    Phased(models, x, y, rules_of(ADADELTA)).phase(*rows_of(2, 0), [1, 2])
    for model, old in zip(models, before):
        for name, t in model.state_dict().items():
            assert torch.equal(t, old[name])


def test_what_cannot_be_trained_is_refused_in_a_sentence():
    x, y = data()
    train_SN, held_SV = rows_of(2, 0)
    phased = Phased(started(mlp, 2), x, y, rules_of(ADADELTA))
    with pytest.raises(ValueError, match="examples for validation"):
        phased.phase(train_SN, held_SV[:, :0], [1, 2])
    with pytest.raises(ValueError, match="2 copies and 1 seeds"):
        phased.phase(train_SN, held_SV, [1])
    with pytest.raises(ValueError, match="at least one model"):
        Phased([], x, y, rules_of(ADADELTA))
    with pytest.raises(ValueError, match="optimizer must be one of"):
        Rules(optimizer="sdg")
    lost = Phased(started(mlp, 1), x, y, Rules(optimizer="sgd", lr=1e30, batch=16))
    with pytest.raises(ValueError, match="lower lr"):
        lost.phase(train_SN[:1], held_SV[:1], [1])


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_batch_norms_of_copies_are_one(training, monkeypatch):
    layers = [nn.BatchNorm2d(3).train(training) for _ in range(2)]
    for layer in layers:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    params, buffers = torch.func.stack_module_state(layers)
    seen, ours = [], norms._Norm.vmap
    monkeypatch.setattr(
        norms._Norm, "vmap", staticmethod(lambda *words: seen.append(1) or ours(*words))
    )

    def one(params, buffers, x):
        with norms.Norms():
            return torch.func.functional_call(layers[0], (params, buffers), (x,))

    x = torch.randn(2, 5, 3, 4, 4)
    found = torch.func.vmap(one)(params, buffers, x)
    for i, layer in enumerate(layers):
        torch.testing.assert_close(found[i], layer(x[i]))
        torch.testing.assert_close(buffers["running_var"][i], layer.running_var)
    assert seen == [1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("make", "shape", "training", "graphs"),
    [
        (mlp, (8,), ADADELTA, {("step", 16), ("check", 32)}),
        (convolved, (2, 4, 4), SGD, {("step", 16), ("step", 6), ("check", 32)}),
        (
            convolved,
            (2, 4, 4),
            Training(**{**vars(SGD), "augment": lambda x: crop_flip(x, 1)}),
            {("step", 16), ("step", 6), ("check", 32)},
        ),
        (deep, (3, 4, 4), SGD, {("step", 16), ("step", 6), ("check", 32)}),
    ],
    ids=["mlp", "batch norm", "augmented", "deep"],
)
def test_captured_phases_equal_those_that_are_not(make, shape, training, graphs):
    x, y = data(shape)
    models = [model.cuda() for model in started(make, 3)]
    captured, plain = (Phased(models, x, y, rules_of(training), graph=g) for g in (True, False))
    for phase in range(3):
        train_SN, held_SV = rows_of(3, phase % 2)
        one = captured.phase(train_SN, held_SV, [phase, 7, 8])
        assert one == plain.phase(train_SN, held_SV, [phase, 7, 8])
    assert captured.graphs.keys() == graphs and None not in captured.graphs.values()
    assert torch.equal(captured.probabilities(x), plain.probabilities(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("make", "shape", "training"),
    [(mlp, (8,), ADADELTA), (deep, (3, 4, 4), Training(**{**vars(SGD), "epochs": 3}))],
    ids=["mlp", "deep"],
)
def test_a_gpu_ends_where_a_cpu_does(make, shape, training, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x, y = data(shape)
    here, there = (
        Phased([m.to(device) for m in started(make, 3)], x, y, rules_of(training))
        for device in ("cpu", "cuda")
    )
    for phase in range(2):
        train_SN, held_SV = rows_of(3, phase)
        ended = here.phase(train_SN, held_SV, [1, 2, 3])
        assert there.phase(train_SN, held_SV, [1, 2, 3]).steps == ended.steps
    close = {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(there.probabilities(x).cpu(), here.probabilities(x), **close)
