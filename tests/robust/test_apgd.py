"""AutoPGD: its schedule, beside a plain transcription of the algorithm, and its strength."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from victims import CLASSES, answers, inputs, mixed, mlp

from moiety.robust import APGD, PGD, Ball, Noise, Target, apgd, run_attack
from moiety.robust.apgd import Climb, check, windows
from moiety.robust.ball import largest, lengths
from moiety.robust.losses import build_loss
from moiety.robust.target import Seen


def test_checkpoints_of_a_hundred_steps():
    assert list(accumulate(windows(100))) == [22, 41, 57, 70, 80, 87, 93, 99, 100]


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10, 33, 50])
def test_windows_fill_the_steps(steps):
    sizes = list(windows(steps))
    assert sum(sizes) == steps and min(sizes) >= 1


def plain(model, x, y, eps, norm, steps, loss):
    """Algorithm 1 for one example [1, ...], with plain numbers: the best point and its loss."""

    def at(p):
        p = p.detach().requires_grad_()
        value = build_loss(loss)(Seen(model(p)), y)
        return value.item(), torch.autograd.grad(value.sum(), p)[0]

    def direction(g):
        return g.sign() if norm == "linf" else g / (g.norm() + 1e-12)

    def into(p):
        away = p - x
        if norm == "linf":
            return (x + away.clamp(-eps, eps)).clamp(0, 1)
        return (x + away * min(1.0, eps / max(float(away.norm()), 1e-12))).clamp(0, 1)

    ball, noise = Ball(eps, norm), Noise(0, torch.zeros(1))
    now = old = best = ball.start(x, noise.stream(0).stream(0), edge=True)
    loss_now, grad = at(now)
    best_loss, best_grad, size = loss_now, grad, 2 * eps
    course, last_best, halved = [0.0], loss_now, True
    window, since = max(int(0.22 * steps), 1), 0
    for k in range(steps):
        z = into(now + size * direction(grad))
        ahead = z if k == 0 else into(now + 0.75 * (z - now) + 0.25 * (now - old))
        old, now = now, ahead
        loss_now, grad = at(now)
        course.append(loss_now)
        if loss_now > best_loss:
            best, best_loss, best_grad = now, loss_now, grad
        since += 1
        if since == window:
            rises = sum(b > a for a, b in zip(course[-window - 1 :], course[-window:]))
            reduce = rises <= 0.75 * window or (not halved and last_best >= best_loss)
            halved, last_best, since = reduce, best_loss, 0
            if reduce:
                size, now, grad = size / 2, best, best_grad
            window = max(window - max(int(0.03 * steps), 1), max(int(0.06 * steps), 1))
    return best, best_loss


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("loss", ["ce", "dlr"])
@pytest.mark.parametrize("steps", [5, 40])
def test_beside_the_plain_algorithm(norm, loss, steps):
    model = mlp(seed=2)
    for seed in range(6):
        x = inputs(1, seed)
        y = answers(model, x)
        best, best_loss = plain(model, x, y, 0.2, norm, steps, loss)
        ours = apgd(model, x, y, 0.2, steps, norm=norm, loss=loss, keep="loss")
        reached = build_loss(loss)(Seen(model(ours)), y).item()
        assert reached == pytest.approx(best_loss, abs=1e-9)
        if not (loss == "dlr" and best_loss > 0):  # beyond 0 it has plateaus without a gradient
            torch.testing.assert_close(ours, best, rtol=0, atol=1e-8)


HALVES = [  # rises of 10 steps, halved last time, best loss then and now; whether it halves
    (8, True, 1.0, 1.0, False),
    (8, False, 1.0, 2.0, False),
    (8, False, 1.0, 1.0, True),  # though most steps rose, none beat the best
    (7, False, 1.0, 2.0, True),  # too few rose
]


def test_when_a_checkpoint_halves_the_step():
    rises, halved, then, now, wanted = (torch.tensor(column) for column in zip(*HALVES))
    at = torch.arange(4.0)[:, None]
    climb = Climb(
        row=at, clean=at, y=at, x=at, kept=at, kept_loss=then, kept_fooled=then, old=at,
        grad=at + 10, size=torch.ones(4, 1), loss=then, best=at + 20, best_grad=at + 30,
        best_loss=now, checked_loss=then, halved=halved, rises=rises,
    )  # fmt: skip
    check(climb, window=10)
    assert torch.equal(climb.halved, wanted) and torch.equal(climb.checked_loss, now)
    assert torch.equal(climb.size[:, 0], torch.where(wanted, 0.5, 1.0))
    assert torch.equal(climb.x, torch.where(wanted[:, None], at + 20, at))
    assert torch.equal(climb.grad, torch.where(wanted[:, None], at + 30, at + 10))
    assert not climb.rises.any()


def curved(x):
    """A target with many local maxima, where a fixed step does badly."""
    return torch.stack([torch.sin(9 * x).sum(1), 2 * x.sum(1), -x.sum(1), x[:, 0]], 1)


class Curved(torch.nn.Module):
    def forward(self, x):
        return curved(x)


def test_it_finds_more_loss_than_pgd():
    model, x = Curved().eval(), inputs(60)
    y = answers(model, x)
    words = {"eps": 0.3, "keep": "loss"}
    auto = run_attack(APGD(steps=40), model, x, y, **words)
    fixed = run_attack(PGD(steps=40, random_start=True), model, x, y, **words)
    assert auto.loss.mean() > fixed.loss.mean()


@given(st.integers(0, 200), st.floats(0, 1), st.sampled_from(["linf", "l2"]))
@settings(max_examples=20, deadline=None)
def test_the_ball_and_the_bounds(seed, eps, norm):
    model, x = mixed(seed=seed, k=2), inputs(5, seed)
    x_adv = apgd(model, x, answers(model, x), eps, steps=6, norm=norm)
    assert float(x_adv.min()) >= 0 and float(x_adv.max()) <= 1
    reach = (largest if norm == "linf" else lengths)(x_adv - x)
    assert float(reach.max()) <= eps + 1e-12


@pytest.mark.parametrize("loss", ["ce", "dlr-targeted"])
def test_more_restarts_are_never_weaker(loss):
    model, x = mlp(), inputs(40)
    y = answers(model, x)
    one, three = (
        run_attack(APGD(steps=5, restarts=n, loss=loss), model, x, y, 0.25) for n in (1, 3)
    )
    assert bool((three.fooled >= one.fooled).all())


def test_targets_are_the_likeliest_other_classes():
    model, x = mlp(), inputs()
    y = torch.randint(CLASSES, (len(x),))
    aims = torch.stack(APGD(loss="dlr-targeted").aims(Target(model), x, y), 1)
    assert aims.shape == (len(x), CLASSES - 1)
    logits = model(x)
    for row, label, aim in zip(logits, y, aims):
        order = [c for c in row.argsort(descending=True).tolist() if c != int(label)]
        assert aim.tolist() == order
    assert len(APGD(loss="dlr-targeted", targets=2).aims(Target(model), x, y)) == 2


def test_every_further_target_may_only_help():
    model, x = mlp(), inputs(60)
    y = answers(model, x)
    one, four = (
        run_attack(APGD(steps=5, loss="dlr-targeted", targets=n), model, x, y, 0.3) for n in (1, 4)
    )
    assert bool((four.fooled >= one.fooled).all()) and four.fooled.sum() > 0


def test_without_a_random_start_it_starts_at_x():
    model, x = mlp(), inputs(4)
    y = answers(model, x)
    words = {"eps": 0.1, "random_start": False, "keep": "loss"}
    assert torch.equal(apgd(model, x, y, seed=0, **words), apgd(model, x, y, seed=1, **words))
    random = (apgd(model, x, y, 0.1, steps=1, seed=s, norm="l2", keep="loss") for s in (0, 1))
    assert not torch.equal(*random)
    before = F.cross_entropy(model(x), y)
    assert F.cross_entropy(model(apgd(model, x, y, **words)), y) > before


def test_bad_settings():
    with pytest.raises(ValueError, match="targets must be a whole number"):
        APGD(targets=0)
    with pytest.raises(ValueError, match="set random_start=True"):
        APGD(restarts=2, random_start=False)
    model = mlp(classes=3)
    x = inputs()
    with pytest.raises(ValueError, match="needs at least 4 classes and the model has 3"):
        apgd(model, x, answers(model, x), 0.1, loss="dlr-targeted")
    with pytest.raises(ValueError, match="take one label an example"):
        apgd(mlp(), x, F.one_hot(answers(mlp(), x), CLASSES), 0.1, loss="dlr-targeted")
