"""Growth keeps the function and carries the optimizer along (digest 4, sections 3.3 and 3.6)."""

import copy

import pytest
import torch
from torch import nn

import moiety
from moiety.experts import LowRank, ModuleExperts
from moiety.grow import contribution

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}
pytestmark = pytest.mark.filterwarnings("ignore:balance losses")


def step(layer, optimizer, x):
    with moiety.watch(layer, keep="choice") as routes:
        per_example = (layer(x) - x).square().mean((1, 2))
        (per_example.mean() + routes.loss()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return routes, per_example.detach()


def outputs(layer, x):
    layer.eval()
    with torch.no_grad():
        y = layer(x)
    layer.train()
    return y


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", moiety.list_routers())
def test_growth_keeps_the_function_of_every_router_again_and_again(name, optimizer):
    torch.manual_seed(0)
    layer = moiety.MoE(name, dim=16, hidden=32, experts=5)
    opt = OPTIMIZERS[optimizer](layer.parameters())
    x = torch.randn(4, 8, 16)
    for kind in ({"by": "usage"}, {"by": "loss"}, {"parents": [0, layer.experts.experts]}):
        for _ in range(3):
            routes, losses = step(layer, opt, x)
        before = outputs(layer, x)
        if kind.get("by") == "loss":
            kind["loss"] = losses
        (growth,) = moiety.grow(layer, routes=routes, optimizer=opt, **kind)
        torch.testing.assert_close(outputs(layer, x), before, rtol=1e-5, atol=1e-6)
        assert growth.gap < 1e-5
        held = {id(p) for g in opt.param_groups for p in g["params"]}
        assert held == {id(p) for p in layer.parameters()}
    assert layer.experts.experts == 9


@pytest.mark.parametrize("name", ["top-k", "softmax", "tree"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_state_follows_the_same_rows(name, optimizer):
    torch.manual_seed(0)
    layer = moiety.MoE(name, dim=16, hidden=32, experts=4)
    opt = OPTIMIZERS[optimizer](layer.parameters())
    x = torch.randn(4, 8, 16)
    for _ in range(3):
        routes, _ = step(layer, opt, x)
    key = "exp_avg" if optimizer == "adam" else "momentum_buffer"
    before = opt.state[layer.experts.w_in][key].clone()
    weights = layer.experts.w_in.detach().clone()
    moiety.grow(layer, routes=routes, optimizer=opt, parents=[2])
    after = opt.state[layer.experts.w_in][key].clone()
    assert torch.equal(after, before[[0, 1, 2, 3, 2]])
    assert torch.equal(layer.experts.w_in, weights[[0, 1, 2, 3, 2]])
    step(layer, opt, x)  # and the optimizer goes on with what it holds
    moved = opt.state[layer.experts.w_in][key]
    assert moved.shape == after.shape and not torch.equal(moved, after)


def test_twin_training_runs_agree_until_the_copies_differ():
    """A grown layer whose split gate sends everything to the parent trains like the old one."""
    torch.manual_seed(0)
    layer = moiety.MoE("top-k", dim=16, hidden=32, experts=4, balance={}).double()
    opt = torch.optim.Adam(layer.parameters(), lr=1e-2)
    x = torch.randn(4, 8, 16, dtype=torch.float64)
    for _ in range(3):
        routes, _ = step(layer, opt, x)
    twin = copy.deepcopy(layer)
    twin_opt = torch.optim.Adam(twin.parameters(), lr=1e-2)
    twin_opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    moiety.grow(layer, routes=routes, optimizer=opt, parents=[1])
    with torch.no_grad():
        layer.router.families.weight.zero_()  # score 0 stays with the parent
    layer.router.families.weight.requires_grad_(False)
    for _ in range(5):
        step(layer, opt, x)
        step(twin, twin_opt, x)
    torch.testing.assert_close(layer.experts.w_in[:4], twin.experts.w_in, rtol=1e-9, atol=1e-9)


def test_copies_come_to_differ_and_serve_different_tokens():
    torch.manual_seed(0)
    layer = moiety.MoE("top-k", dim=16, hidden=32, experts=4)
    opt = torch.optim.Adam(layer.parameters(), lr=1e-2)
    x = torch.randn(8, 16, 16)
    routes, _ = step(layer, opt, x)
    moiety.grow(layer, routes=routes, optimizer=opt, parents=[0])
    gate = layer.router.families.weight.detach().clone()
    for _ in range(20):
        routes, _ = step(layer, opt, x)
    assert not torch.allclose(layer.experts.w_in[0], layer.experts.w_in[4], atol=1e-3)
    load = routes.load()["moe"]
    assert load[0] > 0 and load[4] > 0
    assert not torch.equal(gate, layer.router.families.weight)  # the split gate learns


def test_usage_and_loss_pick_the_expert_by_hand():
    # Tokens 0, 1, 2 go to expert 0 (losses 1, 1, 1), token 3 to expert 1 (loss 5).
    routing = moiety.Routing(
        index=torch.tensor([[0], [0], [0], [1]]), weight=torch.ones(4, 1), experts=3, tokens=4
    )
    assert contribution(routing, None, dense=False).tolist() == [3, 1, 0]
    losses = torch.tensor([1.0, 1.0, 1.0, 5.0])
    assert contribution(routing, losses, dense=False).tolist() == [3, 5, 0]
    # Two examples of two tokens with losses 2 and 6: expert 0 has tokens of both.
    assert contribution(routing, torch.tensor([2.0, 6.0]), dense=False).tolist() == [10, 6, 0]
    with pytest.raises(ValueError, match="3 losses do not fit a call of 4 tokens"):
        contribution(routing, torch.ones(3), dense=False)


def test_the_usage_of_a_sparse_router_needs_counts_only():
    torch.manual_seed(0)
    layer = moiety.MoE("top-k", dim=8, hidden=16, experts=4, k=1)
    with moiety.watch(layer) as routes, torch.no_grad():
        layer(torch.randn(64, 8))
    assert moiety.grow(layer, routes=routes)[0].parents == [int(routes.load()["moe"].argmax())]
    dense = moiety.MoE("softmax", dim=8, hidden=16, experts=4)
    with moiety.watch(dense) as routes, torch.no_grad():
        dense(torch.randn(64, 8))
    with pytest.raises(ValueError, match="choices were not kept"):
        moiety.grow(dense, routes=routes)


def test_the_busiest_and_the_costliest_expert_are_grown():
    torch.manual_seed(0)
    layer = moiety.MoE("top-k", dim=8, hidden=16, experts=4, k=1)
    x = torch.randn(64, 8)
    with moiety.watch(layer, keep="choice") as routes, torch.no_grad():
        layer(x)
    busiest = int(routes.load()["moe"].argmax())
    assert moiety.grow(copy.deepcopy(layer), routes=routes)[0].parents == [busiest]
    chosen = routes["moe"][0].index[:, 0]
    rare = int(routes.load()["moe"].argmin())
    loss = torch.where(chosen == rare, 100.0, 0.1)
    grown = moiety.grow(copy.deepcopy(layer), routes=routes, by="loss", loss=loss, count=2)[0]
    assert grown.parents[0] == rare and len(grown.parents) == 2


@pytest.mark.parametrize("name", ["top-k", "switch", "sigmoid-balanced", "noisy-top-k"])
def test_row_copying_reports_its_gap(name):
    torch.manual_seed(0)
    layer = moiety.MoE(name, dim=16, hidden=32, experts=4)
    opt = torch.optim.Adam(layer.parameters())
    x = torch.randn(4, 8, 16)
    step(layer, opt, x)
    (growth,) = moiety.grow(layer, optimizer=opt, parents=[0], how="rows")
    assert layer.router.experts == layer.experts.experts == 5
    assert layer.router.weight.shape[0] == 5
    if name in ("top-k", "sigmoid-balanced"):  # both copies are chosen where one was
        assert growth.gap > 1e-3
    step(layer, opt, x)


def test_row_copying_needs_rows():
    layer = moiety.MoE("hash", dim=8, hidden=16, experts=4)
    with pytest.raises(ValueError, match="has no row for an expert"):
        moiety.grow(layer, parents=[0], how="rows")


@pytest.mark.parametrize("kind", ["low-rank", "modules"])
def test_other_experts_grow_too(kind):
    torch.manual_seed(0)
    if kind == "low-rank":
        experts = LowRank(nn.Linear(16, 16), experts=4, dim=16, rank=4)
        nn.init.normal_(experts.up)
    else:
        experts = ModuleExperts([nn.Linear(16, 16) for _ in range(4)], dim=16)
    router = moiety.build_router("top-k", dim=16, experts=4)
    layer = moiety.MoE(router, experts)
    opt = torch.optim.Adam([p for p in layer.parameters() if p.requires_grad], lr=1e-2)
    x = torch.randn(4, 8, 16)
    for _ in range(2):
        routes, _ = step(layer, opt, x)
    before = outputs(layer, x)
    moiety.grow(layer, routes=routes, optimizer=opt)
    torch.testing.assert_close(outputs(layer, x), before, rtol=1e-5, atol=1e-6)
    if kind == "modules":
        parent = routes.load()["moe"].argmax()
        old, new = layer.experts.members[int(parent)], layer.experts.members[4]
        assert torch.equal(opt.state[old.weight]["exp_avg"], opt.state[new.weight]["exp_avg"])
    step(layer, opt, x)


def test_a_whole_model_grows_layer_by_layer_and_compiles():
    torch.manual_seed(0)
    model = nn.Sequential(
        moiety.MoE("top-k", dim=16, hidden=32, experts=4),
        moiety.MoE("expert-choice", dim=16, hidden=32, experts=3),
    )
    x = torch.randn(24, 16)
    with moiety.watch(model, keep="choice") as routes, torch.no_grad():
        before = model(x)
    grown = moiety.grow(model, routes=routes, count=2)
    assert [g.layer for g in grown] == ["0", "1"]
    assert [m.experts.experts for m in model] == [6, 5]
    with torch.no_grad():
        torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-6)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), before, rtol=1e-5, atol=1e-6)


def test_padding_and_losses_after_growth():
    """The sibling shares make a distribution of the grown gate; padding still takes nothing."""
    torch.manual_seed(0)
    layer = moiety.MoE("top-k", dim=16, hidden=32, experts=4)
    moiety.grow(layer, parents=[1, 2])
    x = torch.randn(10, 16)
    mask = torch.arange(10) < 7
    routing = layer.route(x, mask)
    torch.testing.assert_close(routing.probs.sum(-1), torch.ones(10))
    assert routing.load().shape == (6,) and int(routing.load().sum()) == 14
    alone = layer.route(x[:7])
    for name in ("switch", "importance", "gshard", "z"):
        loss = moiety.balance.LOSSES[name]
        torch.testing.assert_close(loss(routing), loss(alone))


@pytest.mark.parametrize("name", ["top-k-static", "top-k", "expert-choice"])
def test_a_replay_after_growth_keeps_the_weight_of_the_family(name):
    """Also for tokens that a split gate would now send to the sibling, with all certainty."""
    torch.manual_seed(0)
    layer = moiety.MoE(name, dim=16, hidden=32, experts=4, balance={}).eval()
    moiety.grow(layer, parents=[0, 1, 2, 3])
    x = torch.randn(32, 16)
    with moiety.watch(layer, keep="choice") as routes:
        layer(x)
    layer.router.families.weight.data.mul_(-100)
    with moiety.replay(layer, routes), moiety.watch(layer, keep="choice") as again:
        layer(x)
    torch.testing.assert_close(again["moe"][0].dense(), routes["moe"][0].dense())


@pytest.mark.parametrize("how", ["family", "rows"])
@pytest.mark.parametrize("name", ["softmax", "softmax-static", "tree", "cosine", "top-k"])
def test_what_is_frozen_stays_frozen(name, how):
    if (name, how) == ("tree", "rows"):
        pytest.skip("a tree has no row for an expert")
    layer = moiety.MoE(name, dim=16, hidden=32, experts=4)
    for parents in ([1], [0]):  # a family's first split gate is new, and learns until it is frozen
        layer.requires_grad_(False)
        moiety.grow(layer, parents=parents, how=how)
    trained = [n for n, p in layer.named_parameters() if p.requires_grad]
    assert trained == []


def test_factored_optimizer_state_follows_too():
    torch.manual_seed(0)
    layer = moiety.MoE("top-k", dim=16, hidden=32, experts=4)
    opt = torch.optim.Adafactor(layer.parameters())
    x = torch.randn(4, 8, 16)
    step(layer, opt, x)
    before = opt.state[layer.experts.w_in]["row_var"].clone()
    moiety.grow(layer, opt, parents=[2])
    assert torch.equal(opt.state[layer.experts.w_in]["row_var"], before[[0, 1, 2, 3, 2]])
    step(layer, opt, x)


def test_experts_without_parameters_can_grow():
    router = moiety.build_router("random", dim=8, experts=2)
    layer = moiety.MoE(router, ModuleExperts([nn.Identity(), nn.Tanh()], dim=8)).eval()
    assert moiety.grow(layer, parents=[1])[0].gap == 0


@pytest.mark.parametrize("overflow", ["order", "priority"])
@pytest.mark.parametrize("name", ["top-k", "switch", "hash", "dselect-k"])
def test_growth_under_a_capacity_limit_drops_nobody_else(name, overflow):
    torch.manual_seed(0)
    router = moiety.build_router(name, dim=16, experts=4)
    experts = moiety.FeedForward(4, 16, 32)
    layer = moiety.MoE(router, experts, capacity_factor=0.7, overflow=overflow).eval()
    x, mask = torch.randn(4, 8, 16), torch.rand(4, 8) < 0.8
    before = layer(x, mask)
    assert float(layer.route(x.view(-1, 16), mask.view(-1)).drop_rate()) > 0.1
    for parents in ([0, 2], [4, 1]):
        assert moiety.grow(layer, parents=parents)[0].gap < 1e-5
        torch.testing.assert_close(layer(x, mask), before, rtol=1e-5, atol=1e-6)


def test_bad_requests_say_what_to_change():
    layer = moiety.MoE("top-k", dim=8, hidden=16, experts=4)
    with pytest.raises(ValueError, match="pass routes"):
        moiety.grow(layer)
    with moiety.watch(layer, keep="choice") as routes, torch.no_grad():
        layer(torch.randn(4, 8))
    with pytest.raises(ValueError, match="needs loss="):
        moiety.grow(layer, routes=routes, by="loss")
    with pytest.raises(ValueError, match="optimizer= takes Optimizer, got Routes"):
        moiety.grow(layer, routes)
    with pytest.raises(ValueError, match="routes= takes Routes, got dict"):
        moiety.grow(layer, routes=routes.summary())
    with pytest.raises(ValueError, match='no effect without by="loss"'):
        moiety.grow(layer, routes=routes, loss=torch.ones(4))
    with pytest.raises(ValueError, match="count = 5, but there are only 4"):
        moiety.grow(layer, routes=routes, count=5)
    with pytest.raises(ValueError, match='"usage" or "loss"'):
        moiety.grow(layer, routes=routes, by="size")
    with pytest.raises(ValueError, match="from 0 to 3"):
        moiety.grow(layer, parents=[4])
    with pytest.raises(ValueError, match="distinct"):
        moiety.grow(layer, parents=[1, 1])
    with pytest.raises(ValueError, match="holds none"):
        moiety.grow(layer, parents=[1], optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters()))
    assert layer.router.total == layer.experts.experts == 4  # nothing was half done


def test_growing_in_training_without_the_optimizer_warns():
    layer = moiety.MoE("top-k", dim=8, hidden=16, experts=4)
    layer(torch.randn(4, 8)).sum().backward()
    with pytest.warns(UserWarning, match="pass optimizer="):
        moiety.grow(layer, parents=[0])
