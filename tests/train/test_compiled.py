"""Functions as torch's compiler makes them: what is frozen, what is kept, what stays as it is."""

import pytest
import torch

from moiety.train.compiled import Programs, deterministic


def as_traced(graph, inputs):
    """A compiler that changes nothing."""
    return graph


def slope(weights, x):
    """A function that takes a gradient itself, and returns dicts."""
    weights = {name: w.detach().requires_grad_() for name, w in weights.items()}
    loss = (x @ weights["b"]).tanh().square().sum() + 0 * weights["a"].sum()
    (found,) = torch.autograd.grad(loss, weights["b"])
    return {"b": found}, {"loss": loss.detach()}


def drawn(seed):
    lots = torch.Generator().manual_seed(seed)
    return {n: torch.randn(4, 3, generator=lots) for n in "ab"}, torch.randn(5, 4, generator=lots)


@pytest.mark.parametrize(
    "compiler", [{"compiler": as_traced}, pytest.param({}, marks=pytest.mark.slow)]
)
def test_a_program_serves_other_arguments_of_its_shapes(compiler):
    programs, calls = Programs(**compiler), []

    def function(*args):
        calls.append(args)
        return slope(*args)

    for seed in range(3):
        args = drawn(seed)
        found, told = programs.of("slope", function, *args)(*args)
        known, loss = slope(*args)
        torch.testing.assert_close(found["b"], known["b"])
        torch.testing.assert_close(told, loss)
    assert len(calls) == 1


def test_another_key_shape_or_dtype_is_another_program():
    programs = Programs(as_traced)
    _, x = drawn(0)
    for key, rows in (("twice", x), ("twice", x[:2]), ("twice", x.double()), ("thrice", x)):
        times = 2 if key == "twice" else 3
        found = programs.of(key, lambda rows, times=times: [times * rows], rows)(rows)
        assert torch.equal(found[0], times * rows)
    assert len(programs.known) == 4


def test_frozen_numbers_are_noticed_and_the_function_stays_as_it_is():
    programs, hidden, x = Programs(as_traced), torch.randn(3), torch.randn(3)
    with pytest.warns(UserWarning, match="not compiled.*no argument of it"):
        step = programs.of("hidden", lambda x: [x + hidden], x)
    hidden += 1
    assert torch.equal(step(x)[0], x + hidden)
    assert programs.of("hidden", step, x) is step  # said once


def test_fixed_order_is_for_a_while():
    before = torch.are_deterministic_algorithms_enabled()
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() is before
