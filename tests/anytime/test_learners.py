"""Learners of fixed size: bits, options, costs, and the backbones."""

import copy
import dataclasses
from functools import partial

import learning
import pytest
import torch
from learning import SHORT, contract, mlp, phase, trained, weights
from torch import nn

from moiety import cost
from moiety.anytime.backbones import MLP, VGG19, TreeMLP, TreeVGG19, crop_flip
from moiety.anytime.base import Phase
from moiety.anytime.data import Examples
from moiety.anytime.fitting import Fit, Training
from moiety.anytime.learners import learner, learners
from moiety.anytime.metering import Meter

X = learning.examples(40, seed=9).x


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("single", {}),
        ("single", {"start": "scratch"}),
        ("single", {"optimizer": "carry"}),
        ("ensemble", {"members": 2}),
        ("ensemble", {"members": 2, "together": True}),
        ("mixture", {"members": 2, "optimizer": "carry"}),
    ],
)
def test_learners_pass_their_contract(name, options):
    contract(partial(learner, name, mlp), **options)


@pytest.mark.parametrize("start", ["warm", "scratch"])
@pytest.mark.parametrize("name", ["ensemble", "mixture"])
def test_one_member_is_the_single_model_to_the_bit(name, start):
    single = trained("single", learning.with_dropout, start=start)
    other = trained(name, learning.with_dropout, start=start, members=1)
    assert torch.equal(single.predict(X), other.predict(X))
    assert torch.equal(weights(single.models[0]), weights(other.models[0]))
    assert single.reports == other.reports


def test_members_of_an_ensemble_learn_alone_and_those_of_a_mixture_do_not():
    single = trained("single")
    ensemble, mixture = trained("ensemble", members=3), trained("mixture", members=3)
    assert torch.equal(weights(single.models[0]), weights(ensemble.models[0]))
    assert not torch.equal(weights(single.models[0]), weights(mixture.models[0].members[0]))


def test_an_ensemble_averages_probabilities_and_a_mixture_logits():
    ensemble, mixture = trained("ensemble", members=2), trained("mixture", members=2)
    with torch.no_grad():
        parts = torch.stack([model(X).softmax(-1) for model in ensemble.models])
        logits = torch.stack([model(X) for model in mixture.models[0].members])
    torch.testing.assert_close(ensemble.predict(X), parts.mean(0))
    torch.testing.assert_close(mixture.predict(X), logits.mean(0).softmax(-1))
    assert not torch.allclose(mixture.predict(X), logits.softmax(-1).mean(0), atol=1e-6)


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"method": "sgd", "options": {"momentum": 0.9, "nesterov": True}, "clip": 1.0},
        {"method": "adamw", "score": "loss", "min_gain": 0.05, "patience": 2},
        {"method": "adam", "options": {"betas": (0.8, 0.9)}, "steps": 7},
    ],
    ids=lambda words: words.get("method", "adadelta"),
)
def test_members_trained_together_end_as_those_trained_alone(words):
    training = Training(epochs=6, batch=32, **words)
    alone = trained("ensemble", learning.with_dropout, training=training)
    together = trained("ensemble", learning.with_dropout, training=training, together=True)
    torch.testing.assert_close(alone.predict(X), together.predict(X), rtol=1e-4, atol=1e-4)
    for a, b in zip(alone.reports, together.reports):
        assert (a.steps, a.examples, a.flops) == (b.steps, b.examples, b.flops)
        assert a.validation == pytest.approx(b.validation, abs=1e-5)
    assert alone.bytes() == together.bytes()


def noisy(x):
    """Shift and mirror rows of numbers as images, and add noise."""
    return crop_flip(x.view(-1, 1, 4, 4), padding=1).flatten(1) + 0.1 * torch.randn_like(x)


def test_members_trained_together_augment_each_with_its_own_random_numbers():
    training = Training(epochs=3, batch=32, augment=noisy)
    alone = trained("ensemble", learning.with_dropout, training=training)
    together = trained("ensemble", learning.with_dropout, training=training, together=True)
    plain = trained("ensemble", learning.with_dropout, training=Training(epochs=3, batch=32))
    torch.testing.assert_close(alone.predict(X), together.predict(X), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(alone.predict(X), plain.predict(X), atol=1e-2)


def test_scratch_starts_from_other_weights_at_each_phase():
    scratch = learner("single", mlp, start="scratch", training=SHORT)
    first = weights(scratch.models[0])
    scratch.begin(phase(1))
    assert torch.equal(weights(scratch.models[0]), first)
    scratch.train(phase(1))
    scratch.begin(phase(2))
    assert not torch.equal(weights(scratch.models[0]), first)


@pytest.mark.parametrize(
    "changed",
    [
        {"method": "sgd"},
        {"lr": 0.5},
        {"options": {"weight_decay": 0.1}},
        {"batch": 16},
        {"epochs": 1},
        {"steps": 3},
        {"clip": 0.01},
        {"augment": lambda x: x + torch.randn_like(x)},
        {"score": "loss", "epochs": 5},
        {"min_gain": 1.0, "epochs": 5},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_option_of_training_matters(changed):
    words = {"epochs": 5 if changed.get("epochs") == 5 else 2, "batch": 32}
    plain = trained("single", training=Training(**words), phases=1)
    other = trained("single", training=Training(**{**words, **changed}), phases=1)
    assert not torch.equal(plain.predict(X), other.predict(X))


def test_the_optimizer_of_a_phase_is_fresh_or_carried():
    fresh, carried = trained("single"), trained("single", optimizer="carry")
    assert not torch.equal(fresh.predict(X), carried.predict(X))
    assert fresh.carried == [None]
    assert carried.carried[0]["state"]


def make_fit(scores, **words):
    """A fit whose validation scores are given."""
    now = phase()
    fit = Fit(mlp(0), Training(batch=50, **words), now.train, now.validation, seed=0)
    seen = iter(scores)
    fit._score = lambda: next(seen)
    noted = []
    check = fit._check
    fit._check = lambda: (noted.append(weights(fit.model)), check())
    return fit, noted


def test_a_phase_stops_after_patience_and_keeps_its_best_weights():
    fit, noted = make_fit([0.5, 0.6, 0.6009, 0.4, 0.59, 0.9], patience=3, epochs=9)
    fit.run()
    assert fit.step == 5 * 2  # the third gained less than 0.001, and two more did not
    assert fit.best == 0.6
    assert torch.equal(weights(fit.model), noted[1])


def test_without_validation_the_last_weights_are_kept():
    fit, noted = make_fit([], epochs=3)
    fit.validation = Examples(fit.validation.x[:0], fit.validation.y[:0])
    fit.run()
    assert fit.step == 6 and fit.best is None
    assert torch.equal(weights(fit.model), noted[-1])


def test_a_loss_that_is_not_finite_stops_with_a_sentence():
    with pytest.raises(ValueError, match="lower lr"):
        trained("single", training=Training(method="sgd", lr=1e30, epochs=9))


def test_flops_of_a_phase_are_those_of_hand():
    now = phase()
    single = learner("single", mlp, training=Training(epochs=3, batch=30))
    report = single.train(now)
    row = 2 * (16 * 8 + 8 * 8 + 8 * 3)
    assert report.steps == 3 * 4 and report.examples == 300
    assert report.flops["forward"] == 300 * row
    # Backward: the gradients of all weights and of all inputs but the data.
    assert report.flops["train"] == 300 * (3 * row - 2 * 16 * 8)
    assert report.flops["validation"] == 3 * 50 * row
    assert single.inference_flops(X) == len(X) * row
    assert single.parameters() == 17 * 8 + 9 * 8 + 9 * 3


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("ensemble", mlp),
        ("mixture", mlp),
        ("growing-ensemble", mlp),
        ("growing-moe", learning.tree_mlp),
        ("growing-switch", learning.sparse()),
    ],
)
def test_counted_flops_are_those_of_a_fully_counted_run(name, model):
    first = trained(name, model, meter=Meter())
    # It counts nothing anew, so that only the work itself is counted.
    again = learner(name, model, training=SHORT, meter=first.meter)
    phases = [phase(number) for number in (1, 2)]
    whole = cost.flops(lambda: [again.train(now) for now in phases])
    told = sum(
        report.flops[word] for report in first.reports for word in ("train", "validation", "growth")
    )
    dropped = 0.01 if name == "growing-switch" else 0.0  # a step's drops stand for those of all
    assert told == pytest.approx(whole, rel=dropped, abs=0)


def test_a_learner_that_goes_on_counts_as_if_it_had_not_stopped():
    # A capacity that drops tokens: what a step costs depends on the weights of the first one.
    model = learning.sparse(capacity_factor=0.6)
    whole = trained("single", model, phases=1, meter=Meter())
    again = learner("single", model, training=SHORT)
    again.load(copy.deepcopy(whole.state()))
    assert again.train(phase(2)).flops == whole.train(phase(2)).flops
    fresh = Meter().step(again.models[0], phase(2).train.x[:32], phase(2).train.y[:32])
    counted = again.meter.step(again.models[0], phase(2).train.x[:32], phase(2).train.y[:32])
    assert fresh != counted  # so that the test can fail


def test_measure_tells_error_and_loss():
    single = trained("single")
    data = learning.examples(60, seed=3)
    p = single.predict(data.x)
    told = single.measure(data)
    assert told["error"] == pytest.approx(float((p.argmax(1) != data.y).double().mean()))
    expected = nn.functional.nll_loss(p.log(), data.y)
    assert told["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_tokens_are_learned_like_classes():
    def language(seed):
        return nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))

    tokens = torch.arange(400) % 5
    blocks = Examples(tokens.view(40, 10), (tokens.view(40, 10) + 1) % 5)
    words = Training(method="adam", lr=0.1, epochs=8, batch=8, score="loss")
    made = learner("ensemble", language, members=2, training=words)
    made.train(dataclasses.replace(phase(), train=blocks, validation=blocks.take([0, 1])))
    assert made.predict(blocks.x).shape == (40, 10, 5)
    assert made.measure(blocks)["error"] == 0


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("singel", {}, "did you mean single"),
        ("single", {"start": "cold"}, "start must be"),
        ("single", {"optimizer": "old"}, "optimizer must be"),
        ("single", {"members": 2}, "has no option 'members'; it has start, optimizer$"),
        (
            "ensemble",
            {"member": 3},
            "it has members, together, start, optimizer; did you mean members",
        ),
        ("mixture", {"member": 3}, "it has members, start, optimizer; did you mean members"),
        ("growing-moe", {"evry": 2}, "it has every, split, count, optimizer; did you mean every"),
        ("single", {"start": "scratch", "optimizer": "carry"}, 'goes with start="warm"'),
        ("ensemble", {"members": 0}, "members must be"),
        ("ensemble", {"together": True, "optimizer": "carry"}, "goes with together=False"),
        (
            "ensemble",
            {"together": True, "training": Training(options={"maximize": True})},
            "with the option 'maximize'",
        ),
        ("mixture", {"together": True}, "always train together"),
        ("growing-ensemble", {"every": 0}, "every must be"),
        ("growing-ensemble", {"new": "old"}, "new must be"),
        ("growing-moe", {}, "no MoE layer"),
    ],
)
def test_bad_words_are_refused(name, options, match):
    with pytest.raises(ValueError, match=match):
        learner(name, mlp, **options)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"method": "newton"}, "method must be one of"),
        ({"batch": 0}, "batch must be"),
        ({"score": "f1"}, "score must be"),
        ({"options": {"momentum": 0.9}}, "adadelta does not take"),
        ({"lr": -1.0}, "lr must be a positive number, got -1.0"),
        ({"lr": 0}, "lr must be a positive number, got 0"),
    ],
)
def test_bad_trainings_are_refused(words, match):
    with pytest.raises(ValueError, match=match):
        Training(**words)


def test_an_empty_phase_and_a_strange_state_are_refused():
    single = learner("single", mlp)
    nothing = dataclasses.replace(phase(), train=phase().train.take([]))
    with pytest.raises(ValueError, match="no training examples"):
        single.train(nothing)
    for words, match in (
        ({}, "learner = 'ensemble'"),
        ({"members": 2}, "members = 2"),
        ({"seed": 1}, "seed = 1"),
        ({"training": Training(lr=0.5)}, "lr = 0.5"),
    ):
        like = learner("ensemble", mlp) if words else single
        with pytest.raises(ValueError, match=f"a learner with {match}"):
            like.load(learner("ensemble", mlp, **words).state())


def test_all_learners_are_found_by_name():
    assert sorted(learners()) == [
        "ensemble",
        "growing-ensemble",
        "growing-moe",
        "growing-switch",
        "mixture",
        "single",
    ]


@pytest.mark.parametrize(
    ("width", "convolutions", "layers"), [(4, 2510, 3210), (16, 35930, 13002), (64, 558410, 55050)]
)
def test_backbones_have_the_parameters_of_the_paper(width, convolutions, layers):
    assert cost.parameters(VGG19(width)) == convolutions
    assert cost.parameters(MLP(width)) == layers


@pytest.mark.parametrize(
    ("plain", "tree", "shape"), [(MLP, TreeMLP, (1, 28, 28)), (VGG19, TreeVGG19, (3, 32, 32))]
)
def test_a_mixture_starts_as_the_plain_model(plain, tree, shape):
    x = torch.randn(6, *shape)
    models = []
    for make in (plain, tree):
        torch.manual_seed(0)
        models.append(make(4).eval())
    assert torch.equal(models[0](x), models[1](x))


def test_vgg19_refuses_sizes_that_its_pools_cannot_halve():
    with pytest.raises(ValueError, match="32 pixels"):
        VGG19(4, shape=(1, 28, 28))


def test_crop_flip_shifts_and_mirrors():
    torch.manual_seed(0)
    x = torch.arange(200 * 2 * 8 * 8.0).view(200, 2, 8, 8) + 1
    y = crop_flip(x, padding=1)
    assert y.shape == x.shape
    same = [torch.equal(a, b) for a, b in zip(x, y)]
    mirrored = [torch.equal(a.flip(-1), b) for a, b in zip(x, y)]
    assert any(same) and any(mirrored) and not all(same)
    # One up and one to the left: the last row and column are filled.
    moved = [torch.equal(a[:, 1:, 1:], b[:, :-1, :-1]) for a, b in zip(x, y)]
    assert any(moved) and (y == -1.9).any()


@pytest.mark.parametrize("rows", [33, 1])
def test_batch_norm_meets_no_batch_of_one_row(rows):
    def normed(seed):
        head = nn.Linear(8, learning.CLASSES)
        return nn.Sequential(nn.Linear(learning.INPUTS, 8), nn.BatchNorm1d(8), head)

    data = learning.examples(rows + 20)
    now = Phase(
        train=data.take(range(rows)), validation=data.take(range(rows, rows + 20)), number=1
    )
    for options in ({}, {"members": 2, "together": True}):
        made = learner("ensemble", normed, training=SHORT, **options)
        assert made.train(now).examples % (rows + 1) == 0  # the first one twice, in each pass
    assert learner("single", mlp, training=SHORT).train(now).examples == 2 * rows
