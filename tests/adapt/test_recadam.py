"""RecAdam by hand, and AdamW where nothing is recalled."""

import math

import pytest
import torch
from torch.nn import functional as F

from moiety.adapt.recadam import RecAdam

LR, DECAY, BETA, EPS = 0.01, 0.1, (0.9, 0.999), 1e-8


def weights(*values, dtype=torch.float64):
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


def test_two_steps_by_hand():
    w, head = weights(0.5, -0.3), weights(0.5, -0.3)
    groups = [{"params": [w], "recall": True}, {"params": [head]}]
    optimizer = RecAdam(groups, lr=LR, weight_decay=DECAY, k=0.8, t0=1.5, strength=20.0)
    gradients = [[0.2, -1.0], [0.1, 0.4]]
    for gradient in gradients:
        w.grad, head.grad = (torch.tensor(gradient, dtype=torch.float64) for _ in range(2))
        optimizer.step()
    for i, start in enumerate((0.5, -0.3)):
        value, plain, m, v = start, start, 0.0, 0.0
        for t, gradient in enumerate(gradients, start=1):
            m = BETA[0] * m + (1 - BETA[0]) * gradient[i]
            v = BETA[1] * v + (1 - BETA[1]) * gradient[i] ** 2
            hats = m / (1 - BETA[0] ** t), v / (1 - BETA[1] ** t)
            adam = LR * hats[0] / (math.sqrt(hats[1]) + EPS)
            learned = 1 / (1 + math.exp(-0.8 * (t - 1.5)))  # 0.40 at step 1, 0.60 at step 2
            value = value * (1 - LR * DECAY) - learned * adam
            value = value - LR * (1 - learned) * 20.0 * (value - start)
            plain = plain * (1 - LR * DECAY) - adam
        assert w[i].item() == pytest.approx(value, abs=1e-10)
        assert head[i].item() == pytest.approx(plain, abs=1e-10)  # a fresh head has no start
        assert abs(value - plain) > 1e-3


def train(make, steps=20, dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    model.to(dtype)
    optimizer = make(model.parameters())
    x, y = torch.randn(32, 6, dtype=dtype), torch.randint(3, (32,))
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def recalling(**options):
    return lambda p: RecAdam([{"params": p, "recall": True}], lr=LR, weight_decay=DECAY, **options)


def adamw(p):
    return torch.optim.AdamW(p, lr=LR, weight_decay=DECAY)


@pytest.mark.parametrize("t0", [10, -math.inf])
def test_a_rate_in_a_tensor_makes_the_same_steps(t0):
    options = {"weight_decay": DECAY, "k": 0.3, "t0": t0, "strength": 50.0}

    def made(lr):
        return lambda p: RecAdam([{"params": p, "recall": True}], lr=lr, **options)

    rate = torch.tensor(LR, dtype=torch.float64)
    one, other = (train(made(lr), dtype=torch.float64) for lr in (LR, rate))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert rate == LR  # it is set by others, and only read here


def test_its_limit_is_adamw_bit_for_bit():
    assert torch.equal(train(recalling(t0=-math.inf, strength=50)), train(adamw))
    assert torch.equal(train(recalling(t0=-1e6, strength=50)), train(adamw))
    assert torch.equal(
        train(lambda p: RecAdam([{"params": p}], lr=LR, weight_decay=DECAY)), train(adamw)
    )


def test_before_it_learns_it_stays_and_every_option_matters():
    start = train(adamw, steps=0)
    held = train(recalling(t0=1e6, strength=50.0))  # exp would overflow
    assert torch.allclose(held, start, atol=0.01) and not torch.equal(held, start)  # decay alone
    runs = [
        train(recalling(**{"k": 0.1, "t0": 10, "strength": 50.0, **change}))
        for change in ({}, {"k": 0.5}, {"t0": 5}, {"strength": 10.0})
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(runs) for b in runs[:i])
    away = [(run - start).norm() for run in (held, runs[0], train(adamw))]
    assert away[0] < away[1] < away[2]


def test_the_moments_never_see_the_pull():
    w, plain = weights(0.5), weights(0.5)
    one = RecAdam([{"params": [w], "recall": True}], lr=LR, t0=5, strength=50.0)
    other = torch.optim.AdamW([plain], lr=LR)
    for gradient in (1.0, -2.0, 0.5):
        w.grad, plain.grad = (torch.tensor([gradient], dtype=torch.float64) for _ in range(2))
        one.step()
        other.step()
    for moment in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(one.state[w][moment], other.state[plain][moment])
    assert not torch.equal(w, plain)


def test_it_goes_on_from_its_state_to_the_same_bits():
    def run(stop):
        w = weights(0.5, -0.3)
        make = recalling(t0=3, strength=20.0)
        optimizer = make([w])
        for t in range(6):
            if t == stop:  # killed: made again on the initial weights, then restored
                kept, saved = w.detach().clone(), optimizer.state_dict()
                w = weights(0.5, -0.3)
                optimizer = make([w])
                w.data.copy_(kept)
                optimizer.load_state_dict(saved)
            w.grad = torch.sin(torch.tensor([t + 1.0, 2.0 * t], dtype=torch.float64))
            optimizer.step()
        return w

    assert torch.equal(run(stop=None), run(stop=3))


def test_what_has_no_gradient_is_left_alone_and_rates_are_restored():
    w, idle = weights(0.5), weights(0.7)
    groups = [{"params": [w, idle], "recall": True}]
    optimizer = RecAdam(groups, lr=LR, weight_decay=DECAY, strength=20.0)
    loss = optimizer.step(lambda: [(2 * w).sum().backward(), 7][1])
    assert loss == 7 and idle.item() == 0.7 and w.item() != 0.5
    assert [optimizer.param_groups[0][name] for name in ("lr", "weight_decay")] == [LR, DECAY]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strength": 5000.0}, "would jump past the initial weights; give at most 100"),
        ({"k": 0.0}, "k must be positive"),
        ({"strength": -1.0}, "strength at least 0"),
    ],
)
def test_bad_options_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        recalling(**options)([weights(0.5)])
