"""What mixtures are compared with."""

import pytest
import torch
from samples import DIM, TASKS, problem
from torch import nn

from moiety.multitask import PLE, SharedBottom, SingleTask


def learns(model):
    x, targets = problem()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model.loss(model(x), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[-1] < losses[0]


def test_a_shared_bottom():
    bottom = nn.Sequential(nn.Linear(DIM, 9), nn.ReLU())
    model = SharedBottom(TASKS, bottom, width=9, tower=4)
    x, _ = problem()
    torch.testing.assert_close(model(x)["type"], model.towers[1](bottom(x)))
    assert learns(model) and model.flops(x) > 0


def test_single_tasks_share_nothing():
    model = SingleTask(TASKS, lambda task: nn.Linear(DIM, 9), width=9)
    model(problem()[0])["a"].sum().backward()
    assert model.bottoms[0].weight.grad.any() and model.bottoms[1].weight.grad is None
    assert learns(model)
    with pytest.raises(ValueError, match="share no trunk"):
        SingleTask(TASKS, lambda task: nn.Linear(DIM, 9), width=9, trunk=nn.Identity())


def test_progressive_layered_extraction_by_hand():
    model = PLE(TASKS, dim=DIM, hidden=4, shared=2, own=1, out_dim=6)
    x, _ = problem()
    first, second = model.levels

    def mixed(gate, x, groups):
        weight, y = gate(x).softmax(1), torch.cat(groups)
        return (weight.T[..., None] * y).sum(0)

    low = [group.answers(x) for group in first.experts]
    paths = [mixed(first.gates[i], x, [low[i], low[3]]) for i in range(3)]
    shared = mixed(first.gates[3], x, low)
    top_shared = second.experts[3].answers(shared)
    top = second.experts[1].answers(paths[1])
    want = model.towers[1](mixed(second.gates[1], paths[1], [top, top_shared]))
    torch.testing.assert_close(model(x)["type"], want)
    assert len(second.gates) == 3  # nobody reads a shared path after the last level
    assert learns(model)


@pytest.mark.parametrize("word", ["shared", "own", "levels"])
def test_wrong_sizes(word):
    with pytest.raises(ValueError, match=f"PLE: {word} must be a whole number"):
        PLE(TASKS, dim=DIM, hidden=4, **{word: 0})
