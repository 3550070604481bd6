"""MARS by hand, and nothing where the ball is endless."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from moiety.adapt import mars
from moiety.adapt.mars import Mars, row_sum, rows


def matrix(values):
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))


def farthest(ball):
    """The largest row sum of any matrix."""
    return max(float(row_sum(p.detach() - start)) for p, start in ball.initial.items())


def test_two_steps_by_hand():
    w, bias = matrix([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]), matrix([0.5])
    optimizer, ball = torch.optim.SGD([w, bias], lr=1.0), Mars([w, bias], radius=1.0)
    # Row 1 moves by (-2, 1, 1), of sum 4: it is left a quarter. Row 2 moves by 0.9, inside.
    w.grad = torch.tensor([[2.0, -1.0, -1.0], [0.3, -0.3, 0.3]], dtype=torch.float64)
    bias.grad = torch.tensor([7.0], dtype=torch.float64)
    optimizer.step()
    ball.project()
    first = torch.tensor([[0.5, 2.25, 3.25], [-0.3, 0.3, -0.3]], dtype=torch.float64)
    assert torch.allclose(w, first, rtol=0, atol=1e-10) and bias.item() == -6.5  # one axis: free
    # Row 1 from there by (0, 0, 1): (-0.5, 0.25, 1.25) from the start, of sum 2: a half of it.
    # Row 2 from there by (-0.3, 0, 0.1): (-0.6, 0.3, -0.2), of sum 1.1.
    w.grad = torch.tensor([[0.0, 0.0, -1.0], [0.3, 0.0, -0.1]], dtype=torch.float64)
    optimizer.step()
    ball.project()
    second = [[0.75, 2.125, 3.625], [-0.6 / 1.1, 0.3 / 1.1, -0.2 / 1.1]]
    assert torch.allclose(w, torch.tensor(second, dtype=torch.float64), rtol=0, atol=1e-10)
    assert farthest(ball) == pytest.approx(1.0)


def train(radius, steps=20):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    ball = None if radius is None else Mars(model[0].parameters(), radius)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if ball:
            ball.project()
            assert farthest(ball) <= radius * (1 + 1e-6)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_its_limit_is_plain_training_bit_for_bit():
    plain = train(None)
    assert torch.equal(train(math.inf), plain)
    assert torch.equal(train(1e6), plain)  # a ball that nobody leaves
    assert not torch.equal(train(0.5), plain) and not torch.equal(train(0.5), train(0.25))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.01, 5))
def test_what_is_projected_is_inside_on_its_way_and_stays_when_projected_again(seed, radius):
    g = torch.Generator().manual_seed(seed)
    start, moved = (torch.randn(4, 5, dtype=torch.float64, generator=g) for _ in range(2))
    w = torch.nn.Parameter(start.clone())
    ball = Mars([w], radius)
    w.data += moved
    ball.project()
    kept = (w.detach() - start).abs().sum(1)
    assert torch.allclose(kept, moved.abs().sum(1).clamp(max=radius))
    assert torch.allclose((w.detach() - start) * moved.abs().sum(1, True), moved * kept[:, None])
    again = w.detach().clone()
    ball.project()
    assert torch.allclose(w, again, atol=1e-12)


def test_a_row_that_never_moved_stays_finite():
    w = matrix([[0.0, 0.0], [1.0, 1.0]])
    ball = Mars([w], radius=0.5)
    w.data[1] += 3
    ball.project()
    assert torch.equal(w[0], torch.zeros(2, dtype=torch.float64)) and w[1, 0].item() == 1.25


def test_rows_of_a_convolution_an_expert_and_a_token():
    assert rows(torch.ones(8, 3, 4, 4)).shape == (8, 48)  # one for each channel that leaves
    assert rows(torch.ones(2, 8, 5)).shape == (16, 5)  # each output of each expert
    assert rows(torch.ones(1, 1, 5)).shape == (1, 5)
    assert row_sum(torch.tensor([[1.0, -2.0], [0.0, 2.0]])) == 3


@pytest.mark.parametrize("radius", [0.0, -1.0, math.nan])
def test_no_ball_is_refused(radius):
    with pytest.raises(ValueError, match="radius must be positive"):
        Mars([], radius)


@pytest.mark.parametrize("most", [1, 10, 2**22])
def test_many_matrices_are_projected_as_each_alone(most, monkeypatch):
    monkeypatch.setattr(mars, "MOST", most)
    shapes = [(3, 4), (5, 4), (2, 3, 4), (4, 2, 2, 2), (3, 4), (6, 7), (1, 4)]
    lots = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=lots)) for shape in shapes]
    alone = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ball, balls = Mars(params, radius=1.0), [Mars([p], radius=1.0) for p in alone]
    for one, other in zip(params, alone):
        step = torch.randn(one.shape, generator=lots) * (
            torch.arange(len(one)).view(-1, *[1] * (one.dim() - 1)) % 2
        )
        one.data += step
        other.data += step
    moved = [p.detach().clone() for p in params]
    ball.project()
    for each in balls:
        each.project()
    assert all(torch.equal(one, other) for one, other in zip(params, alone))
    assert not all(torch.equal(one, other) for one, other in zip(params, moved))
    assert farthest(ball) == pytest.approx(1.0)
