"""Losses of attacks, with numbers by hand."""

import math

import pytest
import torch

from moiety.robust.losses import LOSSES, Loss, build_loss
from moiety.robust.target import Seen

LOGITS = torch.tensor([[4.0, 3.0, 1.0, 0.0], [0.0, 2.0, 6.0, 4.0]])
Y = torch.tensor([0, 3])


def value(loss, y=Y, target=None):
    return build_loss(loss)(Seen(LOGITS), y, target).tolist()


def test_dlr_by_hand():
    # Right: −(4 − 3) / (4 − 1). Wrong: the third of 6, 4, 2, 0 is 2, so −(4 − 6) / (6 − 2).
    assert value("dlr") == pytest.approx([-1 / 3, 1 / 2])


def test_targeted_dlr_by_hand():
    # −(4 − 0) / (4 − (1 + 0) / 2) and −(4 − 2) / (6 − (2 + 0) / 2)
    aimed = value("dlr-targeted", target=torch.tensor([3, 1]))
    assert aimed == pytest.approx([-4 / 3.5, -2 / 5])
    # Without a target it aims at the best other class.
    assert value("dlr-targeted") == pytest.approx([-1 / 3.5, 2 / 5])


@pytest.mark.parametrize("name", ["dlr", "dlr-targeted"])
def test_dlr_forgets_scale_and_shift(name):
    loss = LOSSES[name]
    torch.testing.assert_close(loss(Seen(LOGITS), Y), loss(Seen(50 * LOGITS - 7), Y))


def test_cross_entropies_by_hand():
    first = math.log(sum(math.exp(z) for z in (4, 3, 1, 0))) - 4
    assert value("ce")[0] == pytest.approx(first)
    binary = math.log1p(math.exp(-4)) + sum(math.log1p(math.exp(z)) for z in (3, 1, 0))
    assert value("sigmoid")[0] == pytest.approx(binary)


def test_a_row_of_labels():
    rows = torch.nn.functional.one_hot(Y, 4)
    for name in ("ce", "sigmoid"):
        assert value(name, rows) == pytest.approx(value(name))
    with pytest.raises(ValueError, match="one label an example"):
        value("dlr", rows)


def test_a_sum_weighs_its_parts():
    both = build_loss({"ce": 2.0, "dlr": 0.5})
    expected = [2 * a + 0.5 * b for a, b in zip(value("ce"), value("dlr"))]
    assert both(Seen(LOGITS), Y).tolist() == pytest.approx(expected)
    assert both.name == "2 ce + 0.5 dlr" and both.classes == 3 and not both.targeted
    assert build_loss({"ce": 1, "dlr-targeted": 1}).targeted


def test_a_function_is_a_loss():
    own = build_loss(lambda seen, y: seen.logits[:, 0])
    assert isinstance(own, Loss) and own(Seen(LOGITS), Y).tolist() == [4.0, 0.0]


def test_bad_losses():
    with pytest.raises(ValueError, match="loss must be one of ce, sigmoid"):
        build_loss("hinge")
    with pytest.raises(ValueError, match="a number for each name"):
        build_loss({})
    with pytest.raises(ValueError, match="needs at least 3 classes and the model has 2"):
        LOSSES["dlr"](Seen(LOGITS[:, :2]), Y)
