"""The one entry: what every attack has in common."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_target import odd_model, photograph, unchanged
from torch import nn
from torch.nn import functional as F
from victims import CLASSES, answers, inputs, mixed, mlp

from moiety.robust import (
    APGD,
    FGSM,
    PGD,
    RandomSearch,
    Target,
    Transfer,
    apgd,
    audit,
    fgsm,
    pgd,
    run_attack,
)

ATTACKS = {
    "fgsm": FGSM(),
    "pgd": PGD(steps=12, random_start=True, restarts=2),
    "apgd": APGD(steps=12, restarts=2),
    "apgd-dlr": APGD(steps=12, loss="dlr"),
    "apgd-targeted": APGD(steps=6, loss="dlr-targeted", targets=3),
    "search": RandomSearch(steps=25),
    "transfer": Transfer(mlp(seed=9), PGD(steps=3)),
}
each_attack = pytest.mark.parametrize("name", ATTACKS)
MODELS = {"mlp": mlp, "mixture": lambda seed=0: mixed(seed=seed, k=2)}


def problem(name="mlp", count=24, seed=0):
    """A model, inputs, and labels of which it gets most right."""
    model, x = MODELS[name](seed), inputs(count, seed)
    y = answers(model, x)
    y[::5] = (y[::5] + 1) % CLASSES
    return model, x, y


@each_attack
@pytest.mark.parametrize("model", MODELS)
def test_early_stopping_changes_no_result(name, model):
    model, x, y = problem(model)
    for eps in (0.05, 0.3):
        stopped, whole = (
            run_attack(ATTACKS[name], model, x, y, eps, early_stop=stop) for stop in (True, False)
        )
        torch.testing.assert_close(stopped.x, whole.x, rtol=0, atol=1e-9)
        assert torch.equal(stopped.fooled, whole.fooled)


def test_early_stopping_saves_work():
    model, x, y = problem()
    seen = []
    handle = model.register_forward_hook(lambda m, args, out: seen.append(len(args[0])))
    work = []
    for stop in (True, False):
        seen.clear()
        run_attack(APGD(steps=50), model, x, y, 0.4, early_stop=stop)
        work.append(sum(seen))
    handle.remove()
    assert work[0] < 0.7 * work[1]


@each_attack
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_an_example_does_not_see_its_batch(name, data):
    model, x, y = problem(data.draw(st.sampled_from(list(MODELS))))
    whole = run_attack(ATTACKS[name], model, x, y, 0.2)
    parts = run_attack(ATTACKS[name], model, x, y, 0.2, batch=data.draw(st.integers(1, 9)))
    torch.testing.assert_close(parts.x, whole.x, rtol=0, atol=1e-9)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(x) - 1), min_size=1, unique=True)))
    some = run_attack(ATTACKS[name], model, x[rows], y[rows], 0.2, ids=rows)
    torch.testing.assert_close(some.x, whole.x[rows], rtol=0, atol=1e-9)


@each_attack
def test_a_list_of_eps_is_one_after_the_other(name):
    model, x, y = problem()
    eps = [0.3, 0.0, 0.1]
    for found, e in zip(run_attack(ATTACKS[name], model, x, y, eps), eps):
        alone = run_attack(ATTACKS[name], model, x, y, e)
        assert found.eps == e and torch.equal(found.x, alone.x)
        assert torch.equal(found.loss, alone.loss)
    assert torch.equal(run_attack(ATTACKS[name], model, x, y, 0.0).x, x)


class Random(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x + 0.3 * torch.randn_like(x))


def test_the_noise_of_a_random_model_comes_from_the_seed():
    model, x, y = Random().eval(), *problem()[1:]
    both = run_attack(PGD(steps=3), model, x, y, [0.1, 0.2])
    torch.randn(7)
    alone, other = (run_attack(PGD(steps=3), model, x, y, 0.2, seed=seed) for seed in (0, 1))
    assert torch.equal(both[1].x, alone.x) and torch.equal(both[1].loss, alone.loss)
    assert not torch.equal(alone.x, other.x)


@each_attack
def test_never_weaker_than_the_clean_input(name):
    for seed in range(4):
        model, x, y = problem(seed=seed)
        found = run_attack(ATTACKS[name], model, x, y, 0.02)
        assert bool((found.fooled >= (answers(model, x) != y)).all())


@each_attack
def test_scores_are_those_of_the_returned_inputs(name):
    model, x, y = problem("mixture")
    found = run_attack(ATTACKS[name], model, x, y, 0.2, keep="loss")
    logits = model(found.x).detach()
    assert torch.equal(found.prediction, logits.argmax(-1))
    assert torch.equal(found.fooled, logits.argmax(-1) != y)
    expected = nn.functional.cross_entropy(logits, y, reduction="none")
    torch.testing.assert_close(found.loss, expected)


@each_attack
@pytest.mark.filterwarnings("ignore:the model is in train mode")
def test_the_model_is_left_as_found(name):
    model, x = odd_model(), inputs()
    y = answers(model.inner, x)
    before, given = photograph(model), (x.clone(), y.clone())
    run_attack(ATTACKS[name], model, x, y, [0.1, 0.2])
    unchanged(before, model)
    assert torch.equal(x, given[0]) and torch.equal(y, given[1]) and not x.requires_grad


def test_the_functions_are_the_objects():
    model, x, y = problem()
    assert torch.equal(pgd(model, x, y, 0.1), run_attack(PGD(), model, x, y, 0.1).x)
    assert torch.equal(apgd(model, x, y, 0.1), run_attack(APGD(), model, x, y, 0.1).x)
    one, two = fgsm(model, x, y, [0.1, 0.2])
    assert torch.equal(one, fgsm(model, x, y, 0.1)) and torch.equal(two, fgsm(model, x, y, 0.2))


def test_normalisation_inside_speaks_of_raw_inputs():
    class Raw(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner((x - 0.5) / 0.25)

    model, x, y = problem()
    inside = pgd(model, x, y, 0.1, normalize=(0.5, 0.25))
    assert torch.equal(inside, pgd(Raw(model).eval(), x, y, 0.1))
    assert torch.equal(inside, pgd(Target(model, normalize=(0.5, 0.25)), x, y, 0.1))
    with pytest.raises(ValueError, match="a Target has its own normalize"):
        pgd(Target(model), x, y, 0.1, normalize=(0.5, 0.25))


def test_several_labels():
    model, x, y = problem()
    rows = nn.functional.one_hot(y, CLASSES)
    found = run_attack(PGD(loss="sigmoid"), model, x, rows, 0.3)
    alone = run_attack(PGD(loss="sigmoid"), model, x, y, 0.3)
    assert torch.equal(found.fooled, alone.fooled) and found.fooled.sum() > 5


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_it_runs_where_gradients_are_off(context):
    model, x, y = problem()
    outside = pgd(model, x, y, 0.2)
    with context():
        assert torch.equal(pgd(model, x, y, 0.2), outside)
        assert not torch.is_grad_enabled()


def test_a_model_in_half_precision():
    model, x, y = problem()
    x_adv = pgd(model.bfloat16(), x.float(), y, 0.2, steps=5)
    assert x_adv.dtype == torch.float32 and float((x_adv - x).abs().max()) <= 0.2 + 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inputs_in_half_precision_keep_to_the_ball(dtype):
    """Rounded to eight bits, a point a little inside the ball would lie outside."""
    model, x, y = problem()
    x = x.to(dtype)
    x_adv = apgd(model, x, y, 0.001, steps=5)
    assert x_adv.dtype == torch.float32
    assert 0 < float((x_adv - x.float()).abs().max()) <= 0.001 + 1e-7


def test_no_examples():
    model, x, y = problem()
    found = run_attack(PGD(), model, x[:0], y[:0], 0.1)
    assert found.x.shape == (0, x.shape[1]) and found.prediction.dtype == torch.long


def test_tensors_made_in_inference_mode():
    model, x, y = problem()
    with torch.inference_mode():
        made = x.clone(), y.clone()
    assert torch.equal(apgd(model, *made, 0.2, steps=5), apgd(model, x, y, 0.2, steps=5))


class Wrong(nn.Module):
    """Probabilities, or NaN for some inputs."""

    def __init__(self, how):
        super().__init__()
        self.inner, self.how = mlp(), how

    def forward(self, x):
        z = self.inner(x)
        if self.how == "probabilities":
            return z.softmax(-1)
        return torch.where(x[:, :1] > 0.5, z, torch.nan)


X = inputs()
Y = torch.zeros(len(X), dtype=torch.long)
BAD = [
    (mlp(), X + 1, Y, {}, "outside bounds"),
    (mlp(), X, Y + CLASSES, {}, "labels must be from 0 to 4"),
    (mlp(), X, Y - 1, {}, "labels must be from 0 to 4"),
    (mlp(), X, Y[:-1], {}, "one label for each of 12 examples"),
    (mlp(), X, Y.float(), {}, "whole numbers"),
    (Wrong("probabilities").eval(), X, Y, {}, "the model returns probabilities"),
    (Wrong("nan").eval(), X, Y, {}, "clean inputs are NaN"),
    (mlp(), X, Y, {"batch": 0}, "batch must be a whole number, at least 1"),
    (mlp(), X, Y, {"group": 1.5}, "group must be a whole number, at least 1"),
    (mlp(), X, Y, {"keep": "best"}, 'keep must be "fooled", "loss" or "last"'),
    (mlp(), X, Y, {"ids": torch.arange(3)}, "ids must hold a number for each"),
    (mlp(), X, Y, {"norm": "l1"}, 'norm must be "linf" or "l2"'),
    (mlp(), X, Y, {"eps": [0.1, -1]}, "eps must be a number, at least 0, got -1"),
    (mlp(), X, Y, {"bounds": (0,)}, r"bounds must be \(low, high\) or None, got \(0,\)"),
    (mlp(), X, Y, {"normalize": ([0.1] * 3, [1.0] * 3)}, "normalize has 3 numbers and x"),
    (mlp(), X, F.one_hot(Y, CLASSES), {"loss": "dlr"}, "DLR losses take one label an example"),
]


@pytest.mark.parametrize(("model", "x", "y", "words", "said"), BAD, ids=[b[-1] for b in BAD])
def test_bad_input_is_one_sentence_and_changes_nothing(model, x, y, words, said):
    before = photograph(model)
    with pytest.raises(ValueError, match=said) as error:
        pgd(model, x, y, **{"eps": 0.1, **words})
    assert "\n" not in str(error.value)
    unchanged(before, model)


def test_a_model_in_train_mode_is_said_and_attacked_in_eval_mode():
    model, x, y = problem()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = pgd(model, x, y, 0.2)
    model.train()
    with pytest.warns(UserWarning, match="train mode: it is attacked in eval mode and left"):
        assert torch.equal(pgd(model, x, y, 0.2), expected)
    assert model.training


QUICK = {"steps": 1, "masking": 1, "lipschitz": 0, "progress": False}
CALLS = {
    "entry": lambda model, x, y: run_attack(FGSM(), model, x, y, 0.1),
    "function": lambda model, x, y: fgsm(model, x, y, 0.1),
    "audit": lambda model, x, y: audit(model, (x, y), [0.1], "fgsm", **QUICK),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_warning_shows_the_line_of_the_user(call):
    model, x, y = problem(count=4)
    model.train()
    with pytest.warns(UserWarning, match="train mode") as warned:
        CALLS[call](model, x, y)
    assert [w.filename for w in warned] == [__file__]


@pytest.mark.parametrize(
    ("points", "words"),
    [
        (lambda x: x * torch.nan, "'Own' returned NaN"),
        (lambda x: x[:1], r"'Own' must return points of the shape \[12, \d+\]"),
        (lambda x: None, "got NoneType"),
    ],
)
def test_points_of_an_attack_of_ones_own_are_looked_at(points, words):
    class Own:
        def __call__(self, target, x, *rest, **options):
            return points(x)

    model, x = mlp(), inputs()
    with pytest.raises(ValueError, match=words):
        run_attack(Own(), model, x, answers(model, x), 0.1)


@pytest.mark.parametrize("seed", [-1, 2**63, 0.5])
def test_a_seed_that_does_not_fit(seed):
    model, x = mlp(), inputs()
    with pytest.raises(ValueError, match="seed must be a whole number"):
        run_attack(PGD(), model, x, answers(model, x), 0.1, seed=seed)
