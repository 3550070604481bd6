"""Losses and metrics of a task by hand, with labels missing."""

import math

import pytest
import torch
from samples import TASKS, problem
from torch.nn import functional as F

from moiety.multitask import Task, pack, task_loss, task_metrics, unpack

NAN = math.nan
CLASSES, LABELS, NUMBER = Task("c", size=3), Task("l", "labels", size=2), Task("n", "number")


def test_classes_are_averaged_over_the_labelled():
    output = torch.randn(4, 3, requires_grad=True)
    target = torch.tensor([2, -100, 0, -100])
    logp = output.log_softmax(1)
    torch.testing.assert_close(task_loss(CLASSES, output, target), -(logp[0, 2] + logp[2, 0]) / 2)
    weight = torch.tensor([3.0, 9.0, 1.0, 9.0])
    torch.testing.assert_close(
        task_loss(CLASSES, output, target, weight), -(3 * logp[0, 2] + logp[2, 0]) / 4
    )


def test_every_label_counts_alone():
    output = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    target = torch.tensor([[1.0, NAN], [NAN, 0.0]])
    want = (F.softplus(torch.tensor(-1.0)) + F.softplus(torch.tensor(3.0))) / 2
    torch.testing.assert_close(task_loss(LABELS, output, target), want)
    weight = torch.tensor([1.0, 3.0])
    want = (F.softplus(torch.tensor(-1.0)) + 3 * F.softplus(torch.tensor(3.0))) / 4
    torch.testing.assert_close(task_loss(LABELS, output, target, weight), want)


def test_numbers_take_one_axis_or_two():
    output, target = torch.tensor([[1.0], [5.0], [2.0]]), torch.tensor([3.0, NAN, 1.0])
    assert task_loss(NUMBER, output, target).item() == (4 + 1) / 2
    assert task_loss(NUMBER, output, target[:, None]).item() == (4 + 1) / 2
    weight = torch.tensor([1.0, 1.0, 3.0])
    assert task_loss(NUMBER, output, target, weight).item() == (4 + 3) / 4


@pytest.mark.parametrize(
    ("task", "target"),
    [
        (CLASSES, torch.full((4,), -100)),
        (LABELS, torch.full((4, 2), NAN)),
        (NUMBER, torch.full((4,), NAN)),
    ],
)
@pytest.mark.parametrize("weight", [None, torch.ones(4)])
def test_no_label_at_all_is_zero_with_zero_gradient(task, target, weight):
    output = torch.randn(4, task.outputs, requires_grad=True)
    loss = task_loss(task, output, target, weight)
    loss.backward()
    assert loss.item() == 0 and torch.equal(output.grad, torch.zeros_like(output))
    assert set(task_metrics(task, output, target).values()) == {None}


def test_weights_that_are_all_zero_give_zero():
    output = torch.randn(4, 1, requires_grad=True)
    loss = task_loss(NUMBER, output, torch.ones(4), torch.zeros(4))
    loss.backward()
    assert loss.item() == 0 and not output.grad.any()


@pytest.mark.parametrize(
    ("task", "target", "message"),
    [
        (CLASSES, torch.zeros(4), "class ids must be integers .-100 where missing., got torch.flo"),
        (CLASSES, torch.zeros(4, dtype=torch.bool), "class ids must be integers"),
        (CLASSES, torch.tensor([0, 1, 3, 0]), "class ids are 0 … 2, -100 if missing; got 3"),
        (CLASSES, torch.tensor([0, -1, 2, 0]), "got -1"),
        (CLASSES, torch.zeros(3, dtype=torch.long), r"shape \[4\], got \[3\]"),
        (CLASSES, torch.zeros(4, 1, dtype=torch.long), r"shape \[4\], got \[4, 1\]"),
        (LABELS, torch.zeros(4, 2, dtype=torch.long), "must be floats .NaN where missing."),
        (LABELS, torch.full((4, 2), 1.5), "labels lie in 0 … 1"),
        (LABELS, torch.zeros(4), r"shape \[4, 2\]"),
        (NUMBER, torch.zeros(4, 2), r"shape \[4, 1\], got \[4, 2\]"),
        (NUMBER, torch.tensor([1.0, math.inf, 0.0, 0.0]), "values are finite"),
    ],
)
def test_wrong_targets_are_named(task, target, message):
    with pytest.raises(ValueError, match=f"task {task.name!r}: .*{message}"):
        task_loss(task, torch.zeros(4, task.outputs), target)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(3), r"shape \[4\]"),
        (torch.ones(4, 1), r"shape \[4\]"),
        (torch.tensor([1.0, -1.0, 1.0, 1.0]), "at least 0"),
        (torch.tensor([1.0, NAN, 1.0, 1.0]), "finite"),
    ],
)
def test_wrong_sample_weights_are_named(weight, message):
    with pytest.raises(ValueError, match=message):
        task_loss(NUMBER, torch.zeros(4, 1), torch.zeros(4), weight)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"kind": "class", "size": 2}, "kind must be"),
        ({}, "how many classes"),
        ({"size": 1}, "at least 2, got 1"),
        ({"kind": "labels", "size": 0}, "at least 1"),
        ({"kind": "number", "weight": -1.0}, "weight must be"),
        ({"kind": "number", "weight": NAN}, "weight must be"),
        ({"name": "", "kind": "number"}, "name must be"),
    ],
)
def test_wrong_tasks(words, message):
    with pytest.raises(ValueError, match=message):
        Task(**{"name": "a", **words})


def test_metrics_by_hand():
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [9.0, 0.0]])
    found = task_metrics(Task("c", size=2), logits, torch.tensor([0, 1, 1, -100]))
    # Guesses 0 1 0: class 0 has F1 2/3, class 1 too. Of the pairs (1 over 0) one of two is right.
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["macro_f1"] == pytest.approx(2 / 3)
    assert found["auc"] == pytest.approx(0.5)


def test_auc_counts_ties_as_one_half():
    task = Task("l", "labels")
    output = torch.tensor([[1.0], [1.0], [0.0], [2.0], [5.0]])
    target = torch.tensor([1.0, 0.0, 0.0, 1.0, NAN])
    assert task_metrics(task, output, target)["auc"] == pytest.approx(3.5 / 4)


def test_labels_average_what_each_label_defines():
    output = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    target = torch.tensor([[1.0, 1.0], [0.0, 1.0]])  # the second label has one side only
    found = task_metrics(LABELS, output, target)
    assert found == {"accuracy": 1.0, "macro_f1": 1.0, "auc": 1.0}


def test_numbers_by_hand():
    found = task_metrics(NUMBER, torch.tensor([[1.0], [2.0], [9.0]]), torch.tensor([1.0, 4.0, NAN]))
    assert found["rmse"] == pytest.approx(math.sqrt(2))
    assert found["r2"] == pytest.approx(1 - 4 / 4.5)
    assert task_metrics(NUMBER, torch.ones(2, 1), torch.ones(2))["r2"] is None


def test_pack_and_back():
    _, targets = problem()
    packed = pack(TASKS, targets)
    assert packed.shape == (44, 4)
    back = unpack(TASKS, packed)
    assert torch.equal(back["a"], targets["a"])
    torch.testing.assert_close(back["type"], targets["type"], equal_nan=True)
    torch.testing.assert_close(back["c.d"][:, 0], targets["c.d"], equal_nan=True)
    with pytest.raises(ValueError, match=r"\[B, 4\], got \[44, 3\]"):
        unpack(TASKS, packed[:, :3])
    with pytest.raises(ValueError, match="lacks task 'type'"):
        pack(TASKS, {"a": targets["a"]})
