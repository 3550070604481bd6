"""PGD and FGSM: the formulas, the ball, and what settings do."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from victims import CLASSES, answers, inputs, linear, mixed, mlp

from moiety.robust import PGD, fgsm, pgd, run_attack
from moiety.robust.ball import largest, lengths

MODELS = {"linear": linear, "mlp": mlp, "mixture": lambda seed: mixed(seed=seed, k=2)}
models = st.sampled_from(list(MODELS))
seeds = st.integers(0, 500)


def labels(count, seed):
    return torch.randint(CLASSES, (count,), generator=torch.Generator().manual_seed(seed))


def losses(model, x, y):
    with torch.no_grad():
        return F.cross_entropy(model(x), y, reduction="none")


@given(models, seeds, st.floats(0, 1), st.sampled_from(["linf", "l2"]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_ball_and_the_bounds(name, seed, eps, norm, random_start):
    model, x = MODELS[name](seed), inputs(6, seed)
    options = {"norm": norm, "random_start": random_start, "rel_stepsize": 0.7}
    x_adv = pgd(model, x, labels(6, seed), eps, steps=3, **options)
    assert x_adv.shape == x.shape and x_adv.dtype == x.dtype
    assert float(x_adv.min()) >= 0 and float(x_adv.max()) <= 1
    reach = (largest if norm == "linf" else lengths)(x_adv - x)
    assert float(reach.max()) <= eps + 1e-12


@given(models, seeds, st.floats(0.01, 0.5))
@settings(max_examples=30, deadline=None)
def test_one_step_is_fgsm(name, seed, eps):
    model, x, y = MODELS[name](seed), inputs(6, seed), labels(6, seed)
    leaf = x.clone().requires_grad_()
    grad = torch.autograd.grad(F.cross_entropy(model(leaf), y), leaf)[0]
    by_hand = (x + eps * grad.sign()).clamp(0, 1)
    torch.testing.assert_close(fgsm(model, x, y, eps, keep="last"), by_hand)
    for keep in ("fooled", "loss", "last"):
        one = pgd(model, x, y, eps, steps=1, keep=keep)
        assert torch.equal(one, fgsm(model, x, y, eps, keep=keep))


@given(seeds, st.floats(0.01, 0.5), st.sampled_from(["linf", "l2"]))
@settings(max_examples=30, deadline=None)
def test_on_a_linear_model_the_loss_never_falls(seed, eps, norm):
    model, x, y = linear(seed), inputs(6, seed), labels(6, seed)
    course = [losses(model, x, y)]
    for steps in range(1, 6):  # the first steps of one run of five
        words = {"steps": steps, "rel_stepsize": 0.2, "keep": "last"}
        course.append(losses(model, pgd(model, x, y, eps, norm=norm, **words), y))
    assert bool((torch.stack(course).diff(dim=0) >= -1e-12).all())


@given(models, seeds, st.sampled_from(["fooled", "loss", "last"]))
@settings(max_examples=20, deadline=None)
def test_more_restarts_are_never_weaker(name, seed, keep):
    model, x, y = MODELS[name](seed), inputs(8, seed), labels(8, seed)
    runs = []
    for restarts in (1, 3):
        attack = PGD(steps=3, random_start=True, restarts=restarts)
        runs.append(run_attack(attack, model, x, y, 0.2, seed=seed, keep=keep))
    one, three = runs
    if keep == "fooled":
        assert bool((three.fooled >= one.fooled).all())
    else:
        assert bool((three.loss >= one.loss - 1e-12).all())


def test_steps_and_their_size():
    model, x = linear(), inputs(4) * 0.2 + 0.4
    y = answers(model, x)
    ten = pgd(model, x, y, 0.1, steps=10, keep="last")
    torch.testing.assert_close((ten - x).abs(), torch.full_like(x, 0.1))
    half = pgd(model, x, y, 0.1, steps=1, rel_stepsize=0.5, keep="last")
    torch.testing.assert_close((half - x).abs(), torch.full_like(x, 0.05))


def test_the_seed_decides_the_start():
    model, x = mlp(), inputs()
    y = answers(model, x)
    words = {"steps": 1, "rel_stepsize": 0.01, "random_start": True, "keep": "last"}
    first, again, other = (pgd(model, x, y, 0.1, seed=s, **words) for s in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_samples_average_the_noise_of_a_random_model():
    class Noisy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x):
            return self.inner(x + 0.5 * torch.randn_like(x))

    model, x = Noisy().eval(), inputs(200)
    y = answers(model.inner, x)
    few, many = (pgd(model, x, y, 0.1, steps=4, samples=n, keep="last") for n in (1, 16))
    assert losses(model.inner, many, y).mean() > losses(model.inner, few, y).mean()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"steps": 0}, "steps must be a whole number, at least 1, got 0"),
        ({"rel_stepsize": 0.0}, "rel_stepsize must be a number above 0"),
        ({"restarts": 2}, "set random_start=True"),
        ({"samples": 1.5}, "samples must be a whole number"),
        ({"loss": "hinge"}, "loss must be one of"),
    ],
)
def test_bad_settings(words, said):
    with pytest.raises(ValueError, match=said):
        PGD(**words)
