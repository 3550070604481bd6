"""Attacks without the model's gradient."""

import pytest
import torch
from torch import nn
from victims import answers, inputs, mlp

from moiety.robust import APGD, PGD, RandomSearch, Target, Transfer, run_attack


class Masked(nn.Module):
    """The same answers without a gradient."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x.detach())


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_random_search_needs_no_gradient(norm):
    model, x = Masked().eval(), inputs(40)
    y = answers(model, x)
    blind = run_attack(APGD(random_start=False), model, x, y, 0.5, norm=norm)
    searched = run_attack(RandomSearch(steps=100), model, x, y, 0.5, norm=norm)
    assert not blind.fooled.any() and searched.fooled.float().mean() > 0.2


def test_more_steps_find_more():
    model, x = mlp(), inputs(60)
    y = answers(model, x)
    few, many = (run_attack(RandomSearch(steps=n), model, x, y, 0.4) for n in (2, 200))
    assert many.fooled.sum() > few.fooled.sum()


def test_random_search_without_early_stopping_is_the_same():
    model, x = mlp(), inputs(30)
    y = answers(model, x)
    attack = RandomSearch(steps=60)
    a, b = (run_attack(attack, model, x, y, 0.3, early_stop=stop) for stop in (True, False))
    assert torch.equal(a.x, b.x)


def test_transfer_attacks_the_source_and_scores_the_target():
    source, model, x = mlp(seed=1), Masked().eval(), inputs(40)
    y = answers(source, x)
    made = run_attack(PGD(), source, x, y, 0.4, keep="loss")
    moved = run_attack(Transfer(source, PGD()), model, x, y, 0.4, keep="loss")
    assert torch.equal(made.x, moved.x) and not torch.equal(made.prediction, moved.prediction)
    # From the model behind the mask the attack comes through.
    y = answers(model, x)
    through = run_attack(Transfer(Target(model.inner), PGD()), model, x, y, 0.4)
    assert through.fooled.float().mean() > 0.2


def test_transfer_leaves_the_source_as_found():
    source = mlp(seed=1).train()
    x = inputs()
    run_attack(Transfer(source, PGD(steps=2)), mlp(), x, answers(mlp(), x), 0.1)
    assert source.training and all(p.requires_grad for p in source.parameters())


def test_a_source_of_other_classes_is_told():
    x = inputs()
    with pytest.raises(ValueError, match="the model has 2 classes"):
        run_attack(Transfer(mlp(classes=2), PGD()), mlp(), x, torch.full((len(x),), 4), 0.1)
