"""Watch and replay: names, records, losses, numbers by hand, and models left as they were."""

import math
import warnings
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import moiety
from helpers import D, E, F, feedforward
from moiety import MoE, balance, build_router, replay, watch
from moiety.watch import Routes


class Block(nn.Module):
    def __init__(self, times=1, **options):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.moe = MoE("top-k", dim=D, hidden=F, experts=E, **options)
        self.times = times

    def forward(self, x):
        for _ in range(self.times):
            x = x + self.moe(self.norm(x))
        return x


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.blocks = nn.ModuleList([Block(**options), Block(**options)])
        self.head = MoE("softmax", dim=D, hidden=F, experts=3, balance={"importance": 0.5})

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


NAMES = ["blocks.0.moe", "blocks.1.moe", "head"]


def tokens(n=9):
    return torch.randn(n, D)


# -- names and records ---------------------------------------------------------------------------


def test_full_names_and_unique_ends():
    model = Model()
    with watch(model, keep="choice") as routes, torch.no_grad():
        model(tokens())
    assert routes.layers == NAMES
    for name, full in (("blocks.0", NAMES[0]), ("1.moe", NAMES[1]), ("he", "head")):
        assert routes.find(name) == full
        assert len(routes[name]) == 1
    with pytest.raises(KeyError, match=r"'moe' fits blocks\.0\.moe, blocks\.1\.moe"):
        routes["moe"]
    with pytest.raises(KeyError, match="'blocks' fits"):
        routes["blocks"]
    with pytest.raises(KeyError, match=r"'tail' fits none of blocks\.0\.moe, blocks\.1"):
        routes["tail"]


def test_a_full_name_wins_over_a_longer_one():
    model = nn.ModuleDict({"a": MoE("top-k", dim=D, hidden=F, experts=E), "ab": Block()})
    with watch(model, keep="choice") as routes, torch.no_grad():
        model["a"](tokens())
    assert len(routes["a"]) == 1
    assert routes["ab"] == []


def test_a_bare_layer_has_a_name():
    layer = MoE("top-k", dim=D, hidden=F, experts=E)
    with watch(layer) as routes, torch.no_grad():
        layer(tokens())
    assert list(routes.load()) == ["moe"]


def test_several_calls_are_kept_as_several():
    block = Block(times=2)
    with watch(block, keep="choice") as routes, torch.no_grad():
        block(tokens(9))
        block(tokens(4))
    assert [r.tokens for r in routes["moe"]] == [9, 9, 4, 4]
    assert routes.summary()["moe"].calls == 4
    assert routes.summary()["moe"].tokens == 26
    assert int(routes.load()["moe"].sum()) == 26 * 2


@pytest.mark.parametrize("keep", ["load", "choice", "all"])
def test_keep(keep):
    model, x = Model(), tokens()
    with watch(model, keep=keep) as routes:
        model(x)
        routes.loss()
    want = model.blocks[0].moe.route(model.blocks[0].norm(x))
    assert torch.equal(routes.load()[NAMES[0]], want.load())
    if keep == "load":
        with pytest.raises(ValueError, match='keep="choice"'):
            routes["head"]
        return
    kept = routes[NAMES[0]][0]
    assert torch.equal(kept.index, want.index)
    assert torch.equal(kept.weight, want.weight)
    assert kept.weight.requires_grad == (keep == "all")
    assert (kept.scores is not None) == (keep == "all")


def test_wrong_arguments():
    with pytest.raises(ValueError, match='keep must be "load", "choice" or "all", got \'some\''):  # noqa: SIM117
        with watch(Model(), keep="some"):
            pass
    with pytest.raises(ValueError, match="Linear has no MoE layer"), watch(nn.Linear(2, 2)):
        pass
    with pytest.raises(ValueError, match="Linear has no MoE layer"):
        moiety.param_groups(nn.Linear(2, 2))


def test_nested_watches_both_record():
    model, x = Model(), tokens()
    with watch(model) as outer:
        model(x)
        with watch(model.blocks[1]) as inner:
            model(x)
            inner_loss = inner.loss()
        outer_loss = outer.loss()
    assert outer.summary()["head"].calls == 2
    assert list(inner.load()) == ["moe"]  # named from the module that was watched
    assert inner.summary()["moe"].calls == 1
    assert inner_loss == 0.0  # the head's loss is not in that block
    assert float(outer_loss.detach()) > 0


def test_the_same_model_watched_twice_gives_both_the_losses():
    model, x = Model(), tokens()
    with watch(model) as a, watch(model) as b:
        model(x)
        assert torch.equal(a.loss(), b.loss())


def test_an_exception_leaves_the_model_as_it_was():
    model, x = Model(), tokens()
    before = [m._watchers for m in model.modules() if isinstance(m, MoE)]
    with pytest.raises(ZeroDivisionError), watch(model) as routes:  # noqa: PT012
        model(x)
        _ = 1 / 0
    assert [m._watchers for m in model.modules() if isinstance(m, MoE)] == before
    with pytest.raises(ZeroDivisionError), watch(model, keep="choice") as routes:  # noqa: PT012
        model(x)
        routes.loss()
        with replay(model, routes):
            _ = 1 / 0
    assert all(m._replayed is None for m in model.modules() if isinstance(m, MoE))
    with torch.no_grad():
        model(x)
    assert routes.summary()["head"].calls == 1  # nothing recorded after the end


def test_clear():
    model = Model()
    with watch(model) as routes:
        model(tokens())
        routes.clear()
        assert routes.loss() == 0.0
        assert routes.summary() == {}
        assert routes.load() == {}


# -- losses ---------------------------------------------------------------------------------------


def test_loss_is_the_sum_of_each_layers_own():
    model = Model(balance={"switch": 0.1, "z": 0.01})
    x = tokens()
    with watch(model, keep="all") as routes:
        model(x)
        terms = routes.terms()
        loss = routes.loss()
    want = 0.0
    for name in NAMES[:2]:
        r = routes[name][0]
        parts = {"switch": 0.1 * balance.switch(r), "z": 0.01 * balance.z(r)}
        assert terms[name] == pytest.approx({k: float(v.detach()) for k, v in parts.items()})
        want = want + sum(parts.values())
    want = want + 0.5 * balance.importance(routes["head"][0])
    torch.testing.assert_close(loss, want)
    grads = torch.autograd.grad(loss, [m.router.weight for m in model.modules()
                                       if isinstance(m, MoE)])  # fmt: skip
    assert all(g.any() for g in grads)


def test_one_layers_collapse_does_not_hide_behind_anothers():
    # Layer 0 sends all to expert 0, layer 1 all to expert 1. Pooled, they would look balanced.
    model = nn.Sequential(*[MoE("top-k", dim=2, hidden=4, experts=2, k=1, balance={"switch": 1.0})
                            for _ in range(2)])  # fmt: skip
    for e, layer in enumerate(model):
        layer.router.weight.data.zero_()
        layer.router.weight.data[e, 0] = 50.0
    x = torch.tensor([[1.0, 0.0]] * 4)
    with watch(model) as routes, torch.no_grad():
        model[0](x), model[1](x)
        assert float(routes.loss()) == pytest.approx(4.0)  # 2 experts · 1 · 1, twice


def test_loss_is_handed_out_once():
    model = Model()
    with watch(model) as routes:
        model(tokens())
        assert float(routes.loss().detach()) > 0
        assert routes.loss() == 0.0
        model(tokens())
        assert float(routes.loss().detach()) > 0


def test_a_watch_that_collects_nothing_warns():
    model = Model()
    with pytest.warns(UserWarning, match="recorded but never collected"), watch(model):
        model(tokens())
    with warnings.catch_warnings():  # after the block is early enough
        warnings.simplefilter("error")
        with watch(model) as routes:
            model(tokens())
        routes.loss()
        del routes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with watch(model), torch.no_grad():
            model(tokens())
        model.head.balance = {}
        with watch(model):
            model(tokens())


def test_a_watch_inside_another_need_not_collect():
    layer = moiety.MoE("switch", dim=8, hidden=16, experts=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with watch(layer) as routes:
            with watch(layer) as seen:  # only to look
                layer(torch.randn(6, 8))
            assert routes.loss() > 0
    assert seen.summary()["moe"].calls == 1


def test_an_evaluation_with_gradients_need_not_collect():
    model = Model().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with watch(model):
            model(tokens().requires_grad_())  # an attack, for example


# -- numbers by hand ------------------------------------------------------------------------------


def steered(**options):
    """Scores are the tokens themselves; four experts."""
    layer = MoE("top-k", dim=4, hidden=4, experts=4, k=1, renormalise=False, **options)
    layer.router.weight.data = torch.eye(4)
    return layer.eval()


def test_summary_by_hand():
    layer = steered(capacity_factor=0.5)  # ceil(8 · 0.5 / 4) = 1 slot an expert
    big = 100.0
    wants = [0, 0, 0, 1, 1, 1, 1, 2]
    x = big * torch.eye(4)[wants]
    x[7] = 0.0  # an undecided token: entropy log 4, first of equals is expert 0
    with watch(layer) as routes, torch.no_grad():
        layer(x)
        layer(x[:2])  # expert 0, and ceil(2 · 0.5 / 4) = 1 slot
    s = routes.summary()["moe"]
    assert routes.load()["moe"].tolist() == [2, 1, 0, 0]
    assert s.load == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert s.dead == [2, 3]
    assert s.entropy == pytest.approx(math.log(4) / 10, rel=1e-5)  # one token of ten
    # 6 of 8 dropped in the first call, 1 of 2 in the second: 7 of 10.
    assert s.drop_rate == pytest.approx(0.7)
    h = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert s.effective == pytest.approx(math.exp(h))
    assert (s.tokens, s.calls) == (10, 2)


def test_summary_of_an_even_load_and_with_padding():
    layer = steered()
    x = 100 * torch.eye(4).repeat(2, 1)
    mask = torch.tensor([True] * 4 + [False] * 4)
    with watch(layer) as routes, torch.no_grad():
        layer(x, mask=mask)
    s = routes.summary()["moe"]
    assert s.load == [0.25] * 4
    assert s.effective == pytest.approx(4.0)
    assert (s.dead, s.drop_rate, s.tokens) == ([], 0.0, 4)


def test_summary_of_routers_without_a_distribution_and_of_no_token():
    layer = MoE("hash", dim=D, hidden=F, experts=E)
    with watch(layer) as routes, torch.no_grad():
        layer(tokens(0))
        layer(tokens(3))
    s = routes.summary()["moe"]
    assert s.entropy is None
    assert (s.tokens, s.calls) == (3, 2)
    assert sum(s.load) == pytest.approx(1.0)


def test_layers_that_did_not_run_are_not_in_the_summary():
    model = Model()
    with watch(model) as routes, torch.no_grad():
        model.head(tokens())
    assert list(routes.summary()) == ["head"]


# -- replay ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.6}, {"capacity_factor": 0.6,
                                     "overflow": "priority"}], ids=str)  # fmt: skip
@pytest.mark.parametrize("keep", ["choice", "all"])
def test_replay_repeats_choices_with_live_weights(options, keep):
    model, x = Model(**options).eval(), tokens()
    with watch(model, keep=keep) as routes, torch.no_grad():
        want = model(x)
    with replay(model, routes), torch.no_grad():
        torch.testing.assert_close(model(x), want, atol=0, rtol=0)
    for block in model.blocks:  # another router: other choices, if it were asked
        block.moe.router.weight.data = torch.randn_like(block.moe.router.weight)
    with watch(model, keep=keep) as free, torch.no_grad():
        model(x)
    with replay(model, routes), watch(model, keep=keep) as again:
        y = model(x)
        again.loss()
    for name in NAMES[:2]:
        old, new, other = routes[name][0], again[name][0], free[name][0]
        assert torch.equal(old.index, new.index)
        assert not torch.equal(old.index, other.index)
        assert not torch.equal(old.weight, new.weight)
        if options:
            assert torch.equal(old.active, new.active)
            assert torch.equal(old.dropped, new.dropped)
    y.sum().backward()
    assert model.blocks[0].moe.router.weight.grad.any()  # live
    with torch.no_grad():
        assert not torch.equal(model(x), y)  # free again after the end


def test_replayed_weights_by_hand():
    layer = steered()
    x = torch.tensor([[2.0, 1.0, 0.0, 0.0]])
    with watch(layer, keep="choice") as routes, torch.no_grad():
        layer(x)
    with replay(layer, routes), torch.no_grad():
        r = layer.route(x.flip(1))
    assert r.index.tolist() == [[0]]
    assert float(r.weight) == pytest.approx(float(x.flip(1).softmax(-1)[0, 0]))


def test_frozen_weights_are_the_recorded_ones_and_carry_no_gradient():
    layer = steered()
    x = torch.tensor([[2.0, 1.0, 0.0, 0.0]])
    with watch(layer, keep="all") as routes:
        layer(x)
    with replay(layer, routes, weights=True), watch(layer, keep="all") as seen:
        layer(x.flip(1)).sum().backward()
    (was,), (now,) = routes["moe"], seen["moe"]
    assert now.index.tolist() == [[0]]
    assert torch.equal(now.weight, was.weight)
    assert not now.weight.requires_grad
    assert torch.allclose(now.gate, x.flip(1).softmax(-1))  # what it would be is still seen
    assert layer.router.weight.grad is None or not layer.router.weight.grad.any()


@pytest.mark.parametrize("name", moiety.list_routers())
def test_replay_of_every_router(name):
    layer = MoE(name, dim=D, hidden=F, experts=4, balance={}).eval()
    x = tokens(8)
    with watch(layer, keep="choice") as routes, torch.no_grad():
        want = layer(x)
    with replay(layer, routes), torch.no_grad():
        torch.testing.assert_close(layer(x), want)
    with replay(layer, routes):
        y = layer(x + 0.5)
    assert torch.isfinite(y).all()
    with replay(layer, routes, weights=True), watch(layer, keep="choice") as again:
        layer(x + 0.5)
    assert torch.equal(again["moe"][0].dense(), routes["moe"][0].dense())


def test_replay_errors():
    model, x = Model().eval(), tokens()
    with watch(model, keep="choice") as routes, torch.no_grad():
        model(x)
    with torch.no_grad():
        with replay(model, routes), pytest.raises(ValueError, match="9 tokens and 5 experts"):
            model(x[:4])
        with replay(model, routes):
            model(x)
            with pytest.raises(ValueError, match="called more often than its routes"):
                model(x)
        with replay(model, routes):  # an error or a replay uses nothing up
            model(x)
        with watch(model) as counts:
            model(x)
    with pytest.raises(ValueError, match='keep="choice"'), replay(model, counts):
        pass
    with pytest.raises(ValueError, match=r"recorded on other layers: blocks\.0\.moe"):  # noqa: SIM117
        with replay(nn.Sequential(Block()), routes):
            pass


def test_padding_stays_out_of_a_replay():
    layer, x = MoE("top-k", dim=D, hidden=F, experts=E, balance={}), tokens(6)
    with watch(layer, keep="choice") as routes, torch.no_grad():
        layer(x)
    mask = torch.tensor([True] * 4 + [False] * 2)
    with replay(layer, routes), watch(layer) as again, torch.no_grad():
        y = layer(x, mask=mask)
    assert not y[4:].any()
    assert int(again.load()["moe"].sum()) == 8


# -- gradient checkpointing -----------------------------------------------------------------------


@pytest.mark.parametrize("where", ["inside the watch", "after it"])
@pytest.mark.parametrize("router", ["top-k", "switch", "sigmoid-balanced", "dselect-k", "softmax"])
@pytest.mark.parametrize("keep", ["load", "all"])
def test_checkpointing_changes_nothing(router, where, keep):
    x = tokens(12)
    found = {}
    for repeated in (False, True):
        torch.manual_seed(4)
        losses = {"entropy": 0.1} if router == "dselect-k" else {"z": 0.1, "importance": 0.2}
        layer = MoE(router, dim=D, hidden=F, experts=4, capacity_factor=2.0, balance=losses)
        leaf = x.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with watch(layer, keep=keep) as routes:
                y = checkpoint(layer, leaf, use_reentrant=False) if repeated else layer(leaf)
                loss = y.square().sum() + routes.loss()
                if where == "inside the watch":
                    loss.backward()
            if where == "after it":
                loss.backward()
        assert routes.summary()["moe"].calls == 1
        assert len(routes.records) == 1
        assert routes.loss() == 0.0  # the repeat added nothing to collect
        state = [*layer.buffers()]
        found[repeated] = (loss.detach(), leaf.grad, *[p.grad for p in layer.parameters()], *state)
    for a, b in zip(found[True], found[False]):
        torch.testing.assert_close(a, b)


def test_a_checkpointed_model_of_two_layers():
    model, x = Model(balance={"switch": 0.1}), tokens()

    def run(call):
        model.zero_grad()
        with watch(model) as routes:
            y = x
            for part in (*model.blocks, model.head):
                y = call(part, y)
            (y.sum() + routes.loss()).backward()
        assert [name for name, _ in routes.records] == NAMES
        return [p.grad.clone() for p in model.parameters()]

    plain = run(lambda part, y: part(y))
    for a, b in zip(run(lambda part, y: checkpoint(part, y, use_reentrant=False)), plain):
        torch.testing.assert_close(a, b)


def test_reentrant_checkpointing_says_that_the_gradient_is_lost():
    layer = MoE("switch", dim=D, hidden=F, experts=E)
    with watch(layer) as routes:
        y = checkpoint(layer, tokens().requires_grad_(), use_reentrant=True)
        with pytest.warns(UserWarning, match="carry no gradient"):
            loss = routes.loss()
        (y.sum() + loss).backward()
    assert len(routes.records) == 1


def test_a_layer_may_have_grown_between_two_calls():
    layer = MoE(build_router("top-k", dim=D, experts=E), feedforward(), balance={})
    with watch(layer, keep="choice") as routes, torch.no_grad():
        layer(tokens())
        moiety.grow(layer, parents=[0])
        layer(tokens())
    assert routes.load()["moe"].shape == (E + 1,)
    assert int(routes.load()["moe"].sum()) == 9 * 2 * 2


def test_a_compiled_model_keeps_its_layers_names():
    model = Model()
    compiled = torch.compile(model, backend="eager")
    with watch(compiled, keep="choice") as routes, torch.no_grad():
        compiled(tokens())
    with watch(model) as plain:
        pass
    assert routes.layers == plain.layers
    with moiety.replay(model, routes), torch.no_grad():
        model(tokens())


def test_losses_can_be_logged_after_they_were_collected():
    model = Model()
    with watch(model) as routes:
        model(tokens())
        before = routes.terms()
        assert before
        routes.loss()
    assert routes.terms() == before


def test_no_losses_are_a_zero_tensor():
    layer = moiety.MoE("top-k", dim=8, hidden=8, experts=4)
    with watch(layer) as routes:
        layer(torch.randn(3, 8))
        assert routes.loss().item() == 0.0
    assert routes.terms() == {}


@pytest.mark.parametrize("by", ["token", "expert", "all"])
@pytest.mark.parametrize("mask", [None, torch.arange(6) < 4])
def test_recording_never_waits_for_a_gpu(by, mask):
    class Waits(TorchDispatchMode):
        """Operations that read a tensor, or that copy a Python number to a device."""

        seen: ClassVar[list[str]] = []

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.overloadpacket.__name__ in ("_local_scalar_dense", "lift_fresh", "nonzero"):
                self.seen.append(op.name())
            return op(*args, **(kwargs or {}))

    with Waits() as waits:
        torch.ones(2)[0].item()
    assert waits.seen  # the net holds
    waits.seen.clear()
    shape = {"token": (6, 2), "expert": (4, 3), "all": (1, 2)}[by]
    index = torch.arange(math.prod(shape)).view(shape) % (6 if by == "expert" else 4)
    words = {"index": index, "weight": torch.ones(shape), "by": by, "mask": mask}
    routing = moiety.Routing(experts=4, tokens=6, probs=torch.rand(6, 4), **words)
    for keep in ("load", "choice"):
        with Waits():
            Routes(["a"], keep).add("a", routing, {})
    assert waits.seen == []


@pytest.mark.filterwarnings("error")
def test_losses_under_vmap_are_not_taken_for_ones_without_gradient():
    layer = MoE("top-k", dim=D, hidden=8, experts=4, k=2, balance={"switch": 0.1})

    def total(x):
        with watch(layer) as routes:
            return layer(x).square().mean() + routes.loss()

    assert torch.func.vmap(total)(torch.randn(3, 5, D)).shape == (3,)
