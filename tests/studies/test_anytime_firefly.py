"""Firefly: candidates in a wider model, the chosen ones in a grown one."""

import copy

import pytest
import torch
from torch.nn import functional as F

from moiety.anytime import MLP, VGG19, run_stream
from moiety.anytime.base import Phase
from moiety.anytime.data import Examples
from moiety.anytime.fitting import Training
from moiety.anytime.stream import cut
from moiety.studies.anytime.engine import Cell, run_cell
from moiety.studies.anytime.firefly import (
    Candidates,
    Firefly,
    elites,
    layers_of,
    padded,
    unit_of,
    widened,
)
from moiety.testing import check_learner

MODELS = {
    "mlp": (lambda seed: MLP(5, inputs=12, classes=3), (12,)),
    "vgg": (lambda seed: VGG19(2, shape=(1, 64, 64), classes=3), (1, 64, 64)),  # 2 × 2 at the end
}


def tried(name):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make(0).train()
    for _, norm in layers_of(model):
        if norm is not None:
            norm.momentum = 1.0
    model(torch.randn(8, *shape))  # the norms have statistics other than those of the start
    return Candidates(model.eval(), 3), torch.randn(6, *shape)


@torch.no_grad()
def wide(candidates, x):
    return torch.func.functional_call(candidates.wide.eval(), candidates.weights(), (x,))


@pytest.mark.parametrize("name", MODELS)
def test_candidates_that_do_nothing_leave_the_function_as_it_is(name):
    candidates, x = tried(name)
    with torch.no_grad():
        for own in candidates.tried:
            own.split.zero_()
            own.out.zero_()
        torch.testing.assert_close(wide(candidates, x), candidates.model(x))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_all_candidates_is_the_one_in_which_they_were_tried(name):
    candidates, x = tried(name)
    every = [list(range(len(own.gate))) for own in candidates.tried]
    grown = candidates.grown(every)
    with torch.no_grad():
        torch.testing.assert_close(grown(x), wide(candidates, x))
        assert not torch.allclose(grown(x), candidates.model(x))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_any_is_the_old_one_and_one_split_changes_it(name):
    candidates, x = tried(name)
    none = [[] for _ in candidates.tried]
    with torch.no_grad():
        torch.testing.assert_close(candidates.grown(none)(x), candidates.model(x))
        one = copy.deepcopy(none)
        one[1] = [0]
        grown = candidates.grown(one)
        widths = [len(layer.weight) for layer, _ in layers_of(grown)]
        assert widths[1] == len(layers_of(candidates.model)[1][0].weight) + 1
        candidates.tried[1].split.zero_()
        torch.testing.assert_close(candidates.grown(one)(x), candidates.model(x))


def test_gates_of_useful_candidates_have_negative_gradients():
    candidates, x = tried("mlp")
    y = torch.arange(6) % 3
    before = float(F.cross_entropy(wide(candidates, x), y))
    scores = candidates.scores([(x, y)] * 100)
    assert float(F.cross_entropy(wide(candidates, x), y)) < before
    assert torch.cat(scores).min() < 0


def test_elites_are_chosen_over_all_layers():
    scores = [torch.tensor([0.0, -3.0]), torch.tensor([-1.0, -2.0, 5.0])]
    assert elites(scores, 3, [2, 3]) == [[1], [0, 1]]
    assert elites(scores, 3, [2, 1]) == [[0, 1], [1]]  # the second has room for one


def test_the_width_grows_in_a_straight_line():
    torch.manual_seed(0)
    data = Examples(torch.randn(60, 12), torch.arange(60) % 3)
    training = Training(method="sgd", epochs=1, batch=20)
    learner = Firefly(lambda seed: MLP(10, inputs=12, classes=3), training=training, candidates=4)
    totals = []
    for number in range(1, 5):
        report = learner.train(Phase(train=data, validation=data, number=number))
        totals.append(sum(len(layer.weight) for layer, _ in layers_of(learner.models[0])[:-1]))
        assert (report.growth is None) == (number == 1)
    assert totals == pytest.approx([20, 32, 44, 56], abs=3)  # whole units, rounded down
    assert report.growth["gap"] > 0 and report.flops["growth"] > 0 and not learner.exact


@pytest.mark.parametrize("optimizer", ["fresh", "carry"])
def test_it_keeps_the_contract_of_learners(optimizer):
    """Its widths are in its state, so that one that was killed or loaded goes on to the same."""
    training = Training(epochs=2, batch=32, save_every=0)
    words = {"candidates": 4, "optimizer": optimizer, "training": training}
    check_learner(lambda seed: Firefly(lambda s: MLP(8, inputs=16, classes=3), seed=seed, **words))


def test_a_loaded_one_with_images_has_the_widths_and_the_answers_of_its_owner():
    make, shape = MODELS["vgg"]
    g = torch.Generator().manual_seed(0)
    data = Examples(torch.randn(24, *shape, generator=g), torch.arange(24) % 3)
    training = Training(method="sgd", epochs=1, batch=12)
    owner, other = (Firefly(make, candidates=2, training=training, widest=4) for _ in range(2))
    for number in (1, 2, 3):
        owner.train(Phase(train=data, validation=data, number=number))
    assert owner.widths() != other.widths()
    other.load(copy.deepcopy(owner.state()))
    assert owner.widths() == other.widths() and other.growths == 2
    assert torch.equal(owner.predict(data.x), other.predict(data.x))


@pytest.mark.parametrize("name", MODELS)
def test_padded_models_train_together_as_each_would_alone(name, tmp_path):
    make, shape = MODELS[name]
    g = torch.Generator().manual_seed(0)
    data = Examples(torch.randn(48, *shape, generator=g), torch.arange(48) % 3)
    options = {"momentum": 0.9, "weight_decay": 1e-3}
    training = Training(method="sgd", lr=0.02, options=options, batch=16, epochs=2)
    cell = Cell(
        train=data,
        test=data,
        batches=3,
        classes=3,
        training=training,
        make=make,
        options={"candidates": 2},
    )
    course = run_cell(cell, [0, 1], ["firefly"]).lines["firefly"]
    for seed, mine in enumerate(course):
        made = Firefly(make, seed=seed, training=training, candidates=2)
        words = {"test": data, "overlap": 1.0, "seed": seed, "out": tmp_path / str(seed)}
        theirs = run_stream(cut(data, 3, seed=seed), made, **words).lines
        for a, b in zip(mine, theirs, strict=True):
            assert a["parameters"] == b["parameters"] and a["steps"] == b["steps"]
            assert a["flops"] == pytest.approx(b["flops"])
            assert a["loss"] > 0 and a["error"] == pytest.approx(b["error"], abs=0.03)
    first, second = ([line["parameters"] for line in mine] for mine in course)
    assert first[-1] > first[0] and first != second  # of different widths


def test_widths_that_differ_are_padded_to_few():
    models = [MLP(3, inputs=4, classes=2) for _ in range(2)]
    assert [len(layer.weight) for layer, _ in layers_of(padded(models, 7)[0])] == [3, 3, 2]
    models[1] = widened(models[1], [4, 8])
    x = torch.randn(5, 4)
    for model, twin in zip(models, padded(models, 7)):
        assert [len(layer.weight) for layer, _ in layers_of(twin)] == [7, 14, 2]
        torch.testing.assert_close(twin(x), model(x))
    assert unit_of(models[0]) == 1 and unit_of(VGG19(8)) < unit_of(VGG19(32))
