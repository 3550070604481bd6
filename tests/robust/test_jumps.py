"""Jumps of sparse layers: the distance to a routing boundary, and the gap there."""

import copy

import pytest
import torch
from test_lipschitz import layer
from torch import nn

from moiety import ModuleExperts, MoE
from moiety.robust.jumps import jump_sizes


@pytest.mark.parametrize(
    ("name", "words"),
    [("top-k", {"k": 1}), ("top-k", {"k": 2}), ("noisy-top-k", {"k": 2}), ("switch", {})],
)
def test_the_nearest_boundary_of_a_linear_router_is_where_geometry_says(name, words):
    torch.manual_seed(0)
    moe, x = layer(name, **words), torch.randn(40, 6, dtype=torch.float64)
    jumps = jump_sizes(moe, x)
    k, rows = words.get("k", 1), moe.router.weight.detach()
    scores, order = (x @ rows.T).sort(descending=True)
    last, first = order[:, k - 1], order[:, k]  # chosen, and not chosen
    way = rows[first] - rows[last]
    want = (scores[:, k - 1] - scores[:, k]) / way.norm(dim=1)
    # Two others may change places still nearer; those of one chosen and one not are met head-on.
    assert (jumps.distance <= want * (1 + 1e-9)).all()
    assert torch.isclose(jumps.distance, want, rtol=1e-6).double().mean() > 0.7
    assert jumps.found.all() and (jumps.gap > 0).all()


def test_the_gap_is_the_difference_of_the_two_experts():
    torch.manual_seed(0)
    moe = layer("top-k", experts=2, k=1)
    x = torch.randn(20, 6, dtype=torch.float64)
    jumps = jump_sizes(moe, x)
    rows = moe.router.weight.detach()
    across = rows[0] - rows[1]
    edge = x - (x @ across / across.square().sum())[:, None] * across
    assert torch.allclose(jumps.distance, (x - edge).norm(dim=1), rtol=1e-9)
    one, two = moe.experts.answers(edge).detach()
    assert torch.allclose(jumps.gap, (one - two).norm(dim=1), rtol=1e-6)


def test_a_direction_of_ones_own_is_followed_and_may_lead_nowhere():
    torch.manual_seed(0)
    moe, x = layer("top-k", experts=2, k=1), torch.randn(20, 6, dtype=torch.float64)
    rows = moe.router.weight.detach()
    along = torch.linalg.qr(torch.stack([rows[0] - rows[1], *torch.randn(1, 6).double()]).T).Q[:, 1]
    nowhere = jump_sizes(moe, x, direction=along.expand(20, 6))
    assert not nowhere.found.any() and nowhere.gap.isnan().all()
    assert nowhere.distance.isinf().all()
    far, near = (jump_sizes(moe, x, reach=reach) for reach in (2.0, 0.05))
    assert near.found.sum() < far.found.sum()
    assert torch.allclose(near.distance[near.found], far.distance[near.found], rtol=1e-6)


def test_equal_experts_leave_no_gap_and_a_smooth_layer_has_no_boundary():
    torch.manual_seed(0)
    one = nn.Linear(6, 6)
    members = [copy.deepcopy(one) for _ in range(4)]
    moe = MoE("top-k", ModuleExperts(members, dim=6), k=1).double().eval()
    x = torch.randn(30, 6, dtype=torch.float64)
    assert (jump_sizes(moe, x).gap < 1e-9).all()
    assert not jump_sizes(layer("softmax"), x).found.any()


@pytest.mark.parametrize("name", ["sigmoid-balanced", "cosine", "perturbed-cosine", "dselect-k"])
def test_other_routers_are_walked_to_their_boundaries(name):
    torch.manual_seed(0)
    moe, x = layer(name), torch.randn(30, 6, dtype=torch.float64)
    jumps = jump_sizes(moe, x)
    before = {name: t.clone() for name, t in moe.state_dict().items()}
    assert jumps.gap[jumps.found].isfinite().all()
    if name != "dselect-k":  # which starts smooth
        assert jumps.found.double().mean() > 0.5
    assert all(torch.equal(before[name], t) for name, t in moe.state_dict().items())


def test_capacity_has_no_part_in_it():
    torch.manual_seed(0)
    free = layer("top-k", k=1)
    tight = MoE(free.router, free.experts, capacity_factor=0.3)
    x = torch.randn(20, 6, dtype=torch.float64)
    assert torch.equal(jump_sizes(free, x).gap, jump_sizes(tight, x).gap)


def test_where_experts_choose_there_is_no_boundary_of_a_token():
    with pytest.raises(ValueError, match="experts choose among the tokens"):
        jump_sizes(layer("expert-choice"), torch.randn(4, 6, dtype=torch.float64))


def test_a_noisy_router_is_walked_without_its_noise_and_left_in_train_mode():
    torch.manual_seed(0)
    moe, x = layer("noisy-top-k", k=2), torch.randn(8, 6, dtype=torch.float64)
    quiet = jump_sizes(moe, x)
    moe.train()
    assert torch.equal(jump_sizes(moe, x).gap, quiet.gap) and moe.router.training
