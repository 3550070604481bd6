"""The ball and the bounds hold, whatever is thrown at them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety.robust.ball import Ball, largest, lengths
from moiety.robust.noise import Noise

NORMS = {"linf": largest, "l2": lengths}
cases = given(
    norm=st.sampled_from(list(NORMS)),
    eps=st.floats(0, 2),
    bounds=st.sampled_from([None, (0.0, 1.0), (-1.0, 3.0)]),
    seed=st.integers(0, 1000),
)


def inside(ball, x_adv, x):
    assert float(NORMS[ball.norm](x_adv - x).max()) <= ball.eps + 1e-12
    if ball.bounds is not None:
        assert float(x_adv.min()) >= ball.bounds[0] and float(x_adv.max()) <= ball.bounds[1]


@cases
@settings(max_examples=60, deadline=None)
def test_a_projected_point_is_in_the_ball_and_stays_where_it_is(norm, eps, bounds, seed):
    ball, generator = Ball(eps, norm, bounds), torch.Generator().manual_seed(seed)
    x = torch.rand(5, 2, 3, generator=generator, dtype=torch.float64)
    far = x + 4 * torch.randn(5, 2, 3, generator=generator, dtype=torch.float64)
    projected = ball.project(far, x)
    inside(ball, projected, x)
    torch.testing.assert_close(ball.project(projected, x), projected, rtol=0, atol=1e-12)


@cases
@settings(max_examples=60, deadline=None)
def test_a_start_is_in_the_ball(norm, eps, bounds, seed):
    ball, noise = Ball(eps, norm, bounds), Noise(seed, torch.arange(4))
    x = torch.full((4, 3), 0.5, dtype=torch.float64)
    for edge in (False, True):
        inside(ball, ball.start(x, noise, edge=edge), x)
    if bounds is None:
        reach = NORMS[norm](ball.start(x, noise, edge=True) - x)
        torch.testing.assert_close(reach, torch.full_like(reach, eps))


@pytest.mark.parametrize("norm", NORMS)
def test_a_step_is_the_steepest_of_length_one(norm):
    grad = torch.randn(7, 4, dtype=torch.float64)
    step = Ball(1.0, norm).step(grad)
    torch.testing.assert_close(NORMS[norm](step), torch.ones(7, 1, dtype=torch.float64))
    dual = grad.abs().sum(1) if norm == "linf" else grad.norm(dim=1)
    torch.testing.assert_close((step * grad).sum(1), dual)


@pytest.mark.parametrize("norm", NORMS)
def test_no_gradient_and_nan_move_nothing(norm):
    grad = torch.tensor([[0.0, 0.0], [float("nan"), 0.0]])
    assert not Ball(1.0, norm).step(grad).any()


def test_a_draw_belongs_to_its_example():
    noise = Noise(3, torch.arange(10))
    some = torch.tensor([7, 2])
    assert torch.equal(noise.uniform((4, 2))[some], noise[some].uniform((4, 2)))
    assert torch.equal(noise.normal((3,))[some], noise[some].normal((3,)))
    assert not torch.equal(noise.stream(0).uniform((4,)), noise.stream(1).uniform((4,)))
    assert not torch.equal(noise.uniform((4,)), Noise(4, noise.ids).uniform((4,)))


def test_draws_are_uniform_and_normal():
    noise = Noise(0, torch.arange(2000))
    uniform, normal = noise.uniform((20,)), noise.normal((20,))
    assert abs(float(uniform.mean()) - 0.5) < 0.01 and abs(float(uniform.var()) - 1 / 12) < 0.002
    assert abs(float(normal.mean())) < 0.02 and abs(float(normal.var()) - 1) < 0.03
    beside = torch.corrcoef(torch.stack([uniform[:, :-1].flatten(), uniform[:, 1:].flatten()]))
    assert abs(float(beside[0, 1])) < 0.02


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"eps": -0.1}, "eps must be a number, at least 0"),
        ({"eps": float("nan")}, "eps must be a number"),
        ({"eps": "1/255"}, "eps must be a number"),
        ({"eps": 0.1, "norm": "l1"}, 'norm must be "linf" or "l2"'),
        ({"eps": 0.1, "bounds": (1, 0)}, "bounds must be"),
        ({"eps": 0.1, "bounds": (1,)}, "bounds must be"),
    ],
)
def test_bad_balls(words, said):
    with pytest.raises(ValueError, match=said):
        Ball(**words)
