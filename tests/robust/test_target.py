"""A model as an attacker sees it, and as it is left."""

import copy

import pytest
import torch
from torch import nn
from victims import CLASSES, DIM, inputs, mixed, mlp

from moiety.robust import Target
from moiety.robust.target import check_inputs, correct


class Out:
    def __init__(self, logits):
        self.logits = logits


class Pixels(nn.Module):
    """Called as the vision models of transformers are."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, pixel_values=None, labels=None):
        return Out(self.inner(pixel_values))


class Positions(nn.Module):
    """Called as a language model is: logits of every position."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, input_ids=None, inputs_embeds=None):
        assert input_ids is None
        return Out(self.inner(inputs_embeds))


def test_logits_come_from_the_field_of_that_name():
    x = inputs()
    assert torch.equal(Target(Pixels())(x).logits, Pixels().inner(x))


def test_of_a_language_model_the_last_position_counts():
    x = torch.stack([inputs(), inputs(seed=2)], 1)
    seen = Target(Positions())(x)
    torch.testing.assert_close(seen.logits, mlp()(x[:, -1]))


def test_call_overrides():
    model = mlp()
    seen = Target(model, call=lambda m, x: 2 * m(x))(inputs())
    torch.testing.assert_close(seen.logits, 2 * model(inputs()))


@pytest.mark.parametrize("normalize", [(0.5, 0.25), ([0.5] * DIM, [0.25] * DIM)])
def test_normalisation_happens_inside(normalize):
    x, model = inputs(), mlp()
    torch.testing.assert_close(
        Target(model, normalize=normalize)(x).logits, model((x - 0.5) / 0.25)
    )


def test_channels_are_the_second_axis():
    images = torch.rand(2, 3, 4, 4)
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 2.0, 4.0])
    target = Target(nn.Flatten(), normalize=(mean.tolist(), std.tolist()))
    expected = (images - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(target(images).logits, expected.flatten(1))


def test_routes_are_watched_on_demand():
    x, target = inputs(), Target(mixed(k=2))
    assert target(x).routes is None
    assert target.watching("choice")(x).routes["moe"][0].index.shape == (len(x), 2)
    x = x.requires_grad_()
    scores = target.watching("all")(x).routes["moe"][0].scores
    assert torch.autograd.grad(scores.sum(), x)[0].abs().sum() > 0


X6 = inputs().float()


class Counting(nn.Module):
    """Changes a buffer, and draws a random number, in every forward."""

    def __init__(self):
        super().__init__()
        self.inner, self.drop = mlp(), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.inner(self.drop(x)) + 0 * torch.rand(())


def photograph(model):
    """All that must not change."""
    return {
        "state": copy.deepcopy(model.state_dict()),
        "modes": [m.training for m in model.modules()],
        "wanted": [p.requires_grad for p in model.parameters()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "rng": torch.get_rng_state(),
    }


def unchanged(before, model):
    after = photograph(model)
    assert all(torch.equal(before["state"][k], after["state"][k]) for k in before["state"])
    assert before["modes"] == after["modes"] and before["wanted"] == after["wanted"]
    for a, b in zip(before["grads"], after["grads"]):
        assert a is b is None or torch.equal(a, b)
    assert torch.equal(before["rng"], after["rng"])


def odd_model():
    """One that is in no plain mode and has gradients of its own."""
    model = Counting()
    model.train()
    model.inner[1].eval()
    model.inner[0].bias.requires_grad_(False)
    model(inputs()).sum().backward()
    return model


def test_at_rest_leaves_everything_as_found():
    model = odd_model()
    before, buffer = photograph(model), model.calls
    with Target(model).at_rest() as target:
        assert not any(m.training for m in model.modules())
        assert not any(p.requires_grad for p in model.parameters())
        target(inputs())
        assert model.calls == 2
    unchanged(before, model)
    assert model.calls is buffer


def test_a_traced_model_rests_too():
    traced = torch.jit.trace(nn.Sequential(nn.Linear(DIM, 3), nn.BatchNorm1d(3)).eval(), X6)
    before = photograph(traced)
    with Target(traced).at_rest() as target:
        target(X6)
    unchanged(before, traced)


def test_at_rest_restores_after_an_error_too():
    model = odd_model()
    before = photograph(model)
    with pytest.raises(RuntimeError), Target(model).at_rest() as target:
        target(torch.zeros(2, DIM + 1, dtype=torch.float64))
    unchanged(before, model)


def test_several_labels_count_as_right():
    logits = torch.tensor([[3.0, 1.0, 2.0], [0.0, 1.0, 5.0]])
    assert correct(logits, torch.tensor([0, 1])).tolist() == [True, False]
    assert correct(logits, torch.tensor([[0, 1, 0], [0, 1, 1]])).tolist() == [False, True]


X, Y = torch.rand(4, 3), torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (X.long(), Y, "x must be a float tensor"),
        (X[0], Y, "x must be a float tensor"),
        ([1.0], Y, "x must be a float tensor"),
        (X * float("nan"), Y, "x holds NaN"),
        (X + 1.5, Y, r"outside bounds \(0, 1\): give x before normalisation"),
        (X, Y[:3], "one label for each of 4 examples"),
        (X, Y.float(), r"whole numbers \(class ids\), got torch.float32"),
        (X, [0, 1, 2, 0], "y must be a tensor of class ids"),
        (X, torch.full((4, 3), 0.5), "must hold 0 and 1 only"),
    ],
)
def test_bad_inputs(x, y, said):
    with pytest.raises(ValueError, match=said):
        check_inputs(x, y, (0, 1))


def test_inputs_without_bounds():
    check_inputs(100 * X, Y, None)


@pytest.mark.parametrize(
    ("logits", "said"),
    [
        (torch.randn(4, CLASSES).softmax(-1), "the model returns probabilities"),
        (torch.full((4, CLASSES), float("nan")), "logits of 4 of 4 clean inputs are NaN"),
        (torch.randn(4, 2), "labels must be from 0 to 1 .the model has 2 classes., got 0 to 2"),
    ],
)
def test_bad_logits(logits, said):
    with pytest.raises(ValueError, match=said):
        Target(mlp()).check_logits(logits, Y)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"model": print}, "must be a torch module"),
        ({"model": mlp(), "normalize": 3}, "normalize must be"),
        ({"model": mlp(), "watch": "load"}, "watch must be"),
    ],
)
def test_bad_targets(words, said):
    with pytest.raises(ValueError, match=said):
        Target(**words)


def test_an_answer_that_is_no_logits():
    with pytest.raises(ValueError, match="the model returns dict: give call"):
        Target(mlp(), call=lambda m, x: {"scores": m(x)})(inputs())
    with pytest.raises(ValueError, match=r"logits must be \[12, classes\], got \[12\]"):
        Target(mlp(), call=lambda m, x: m(x)[:, 0])(inputs())
