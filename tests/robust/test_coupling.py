"""Which models let the examples of a batch influence each other, and how they are attacked."""

import pytest
import torch
from torch import nn
from victims import CLASSES, DIM, answers, inputs, mixed, mlp

from moiety.robust import PGD, coupled, run_attack


class Together(nn.Module):
    """Subtracts the mean of its batch."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        h = self.inner(x)
        return h - 0.5 * h.mean(0)


class FirstComeFirstServed(Together):
    """Has room for some of a batch, and says nothing of those that come late."""

    def forward(self, x):
        h = self.inner(x)
        return h * (torch.arange(len(x)) < 0.6 * len(x))[:, None]


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x) + torch.randn(len(x), CLASSES)


class Rounded(nn.Module):
    """Sums of another size run in another order, as in TF32: the answer depends on the size."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x) * (1 + len(x) / 100)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (mlp(), None),
        (mixed(k=2), None),
        (mixed(k=1, capacity_factor=1.0, group="example"), None),
        (mixed(k=1, capacity_factor=1.0), "moe: a whole batch shares the capacity of the experts"),
        (mixed("expert-choice"), "moe: a whole batch shares the capacity of the experts"),
        (mixed("switch", group=4), "moe: 4 examples share the capacity of the experts"),
        (mixed("random"), "moe: the choice depends on a token's place in the batch"),
        (Together().eval(), "an example's logits change with the others of its batch"),
        (
            FirstComeFirstServed().eval(),
            "an example's logits change with the others of its batch",
        ),
        (Noisy().eval(), None),
        (Rounded().eval(), None),
    ],
)
def test_who_is_coupled(model, why):
    assert coupled(model, inputs()) == why


def test_a_group_as_large_as_the_layers_is_apart_from_others():
    model = mixed("switch", group=4)
    assert coupled(model, inputs(), group=4) is None
    assert coupled(model, inputs(), group=8) is None
    assert "4 examples" in coupled(model, inputs(), group=6)


def batches_of(model, **options):
    """The sizes of all forwards of an attack."""
    sizes, x = [], inputs(10)
    y = answers(model, x)
    handle = model.register_forward_hook(lambda m, args, out: sizes.append(len(args[0])))
    found = run_attack(PGD(steps=2), model, x, y, 0.1, **options)
    handle.remove()
    return set(sizes), found


def test_coupled_models_are_attacked_one_example_at_a_time():
    sizes, found = batches_of(mixed("expert-choice"))
    assert sizes == {1} and found.threat == "per example"


def test_groups_stay_whole():
    sizes, found = batches_of(mixed("expert-choice"), group=4)
    assert sizes == {4, 2} and found.threat == "batch threat model"
    sizes, _ = batches_of(mixed("switch", group=4), group=4, batch=9, early_stop=False)
    assert sizes <= {8, 2, 4, 20}  # two groups in a batch, and the probe's five copies of one


def test_a_group_is_scored_as_it_was_attacked():
    model, x = mixed("expert-choice"), inputs(12)
    y = answers(model, x)
    found = run_attack(PGD(steps=5), model, x, y, 0.3, group=4)
    with torch.no_grad():
        rows = torch.cat(
            [model(part).argmax(-1) != label for part, label in zip(found.x.split(4), y.split(4))]
        )
    assert torch.equal(rows, found.fooled)
    assert found.x.shape == (12, DIM)
