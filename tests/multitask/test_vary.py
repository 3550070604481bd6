"""Settings that differ between the copies of `fit_many`, and codes ranked by a warm-up."""

import pytest
import torch
from samples import DIM, feedforward
from test_many_tasks import ALIKE, alike_problem, same
from torch.utils.data import TensorDataset

from moiety import MoE, build_router
from moiety.multitask import MultiGate, packed_loss
from moiety.multitask.together import decide_apart, decide_together
from moiety.routing import dselect
from moiety.train import fit_many

SEEDS = [3, 3, 0]
WIDTHS, STRENGTHS = [1.0, 4.0, 0.5], [0.0, 0.25, 0.125]


def fitted(make, seeds, steps=6):
    x, y = alike_problem()
    words = {"steps": steps, "batch": 16, "lr": 3e-2, "loss": packed_loss(ALIKE)}
    return fit_many(make, TensorDataset(x, y), seeds=seeds, **words)


@pytest.mark.parametrize("name", ["dselect-k-static", "dselect-k"])
def test_width_and_strength_of_each_copy_as_if_it_were_alone(name):
    order = iter(range(-1, 3))  # the first model is built once more, to look at it

    def vary(seed):
        i = max(next(order), 0)
        width, strength = torch.tensor([WIDTHS[i], STRENGTHS[i]]).double()
        balance = {"entropy": strength}
        return MultiGate(ALIKE, feedforward(), router=name, width=width, balance=balance).double()

    many = fitted(vary, SEEDS)
    for i, seed in enumerate(SEEDS):
        balance = {"entropy": STRENGTHS[i]}
        words = {"router": name, "width": WIDTHS[i], "balance": balance}
        alone = fitted(lambda seed: MultiGate(ALIKE, feedforward(), **words).double(), [seed])  # noqa: B023
        assert many.history[i].loss == pytest.approx(alone.history[0].loss, rel=1e-6)
        same(many.models()[i], alone.models()[0])


def test_a_number_as_a_tensor_is_a_buffer_that_is_not_saved():
    router = build_router("dselect-k-static", dim=4, experts=8, width=torch.tensor(2.0))
    assert dict(router.named_buffers())["width"] == 2 and "width" not in router.state_dict()
    assert router.options == {"width": 2.0}
    with pytest.raises(ValueError, match="width must be a number, at least"):
        build_router("dselect-k-static", dim=4, experts=8, width=torch.tensor(-1.0))
    with pytest.raises(ValueError, match=r"k cannot be a tensor of torch\.int64: give a plain"):
        build_router("dselect-k-static", dim=4, experts=8, k=torch.tensor(2))
    with pytest.raises(ValueError, match=r"width must be one number, got a tensor of shape \[2\]"):
        build_router("dselect-k-static", dim=4, experts=8, width=torch.ones(2))


def test_a_strength_as_a_tensor_is_one_number_and_of_a_multi_gate_only():
    with pytest.raises(ValueError, match=r"weight of 'entropy' must be one number, got .* \[2\]"):
        MultiGate(ALIKE, feedforward(), balance={"entropy": torch.ones(2)})
    with pytest.raises(ValueError, match="balance must be weights by name"):
        MultiGate(ALIKE, feedforward(), balance=0.1)
    # A layer has no buffer for it: all copies of fit_many would silently have the first one's.
    with pytest.raises(ValueError, match="weight of 'entropy' must be a finite number, got tensor"):
        MoE("dselect-k", dim=4, hidden=8, experts=4, balance={"entropy": torch.tensor(0.1)})


@pytest.mark.parametrize("name", ["dselect-k-static", "dselect-k"])
def test_the_best_experts_of_the_warm_up_get_the_first_codes(name):
    router = build_router(name, dim=3, experts=6, k=2, codes="ranked", warm_steps=2)
    x = torch.randn(5, 3)
    with torch.no_grad():
        router.warm.copy_(torch.tensor([0.1, 3.0, -1.0, 2.0, 0.0, -2.0]))
    for _ in range(2):
        routing = router(x)
        torch.testing.assert_close(routing.dense(), router.warm.softmax(0).expand(5, 6))
        assert routing.choice().all() and routing.penalties["entropy"] == 0
    assert router.codes_at(router.calls).tolist() == [2, 0, 4, 1, 3, 5, 6, 7]
    routing = router(x)
    assert routing.penalties["entropy"] > 0
    (slope,) = torch.autograd.grad(routing.dense().pow(2).sum(), router.warm)
    assert not slope.any()  # the order stays
    z = router.z if name == "dselect-k-static" else router.z_bias
    with torch.no_grad():  # digits 1 0 0, lowest first: code 1, which is expert 3's
        for parameter in router.parameters():
            parameter.zero_() if parameter is not router.warm else None
        z.copy_(torch.tensor([9.0, -9.0, -9.0]).repeat(2).view_as(z))
    assert router.eval()(x).dense().argmax(1).tolist() == [3] * 5


def test_the_order_of_codes_outlives_what_weight_decay_does_to_the_warm_up(monkeypatch):
    monkeypatch.setattr(dselect, "SETTLE", 3)
    words = {"dim": 3, "experts": 8, "codes": "ranked", "warm_steps": 2}
    router, x = build_router("dselect-k-static", **words), torch.randn(5, 3)
    for _ in range(6):  # the warm-up, and until the order is settled
        router(x)
    order = router.codes_at(router.calls)
    gate = router(x).dense()
    with torch.no_grad():
        router.warm.neg_()
    torch.testing.assert_close(router(x).dense(), gate)
    torch.testing.assert_close(router.eval()(x).dense(), gate)
    other = build_router("dselect-k-static", **words)
    other.load_state_dict(router.state_dict())
    assert other.codes_at(other.calls).equal(order)


def test_a_run_resumed_within_the_warm_up_goes_on_as_if_it_had_not_stopped():
    words = {"dim": 3, "experts": 8, "codes": "ranked", "warm_steps": 4}
    whole, x = build_router("dselect-k-static", **words), torch.randn(5, 3)
    for _ in range(2):
        whole(x)
    resumed = build_router("dselect-k-static", **words)
    resumed.load_state_dict(whole.state_dict())
    for _ in range(4):
        torch.testing.assert_close(resumed(x).dense(), whole(x).dense())
    assert not whole(x).dense().allclose(whole.warm.softmax(0))


def test_ranked_codes_need_a_warm_up():
    with pytest.raises(ValueError, match='codes="ranked" needs warm_steps > 0'):
        build_router("dselect-k-static", dim=3, experts=8, codes="ranked")


def test_ranked_codes_in_many_copies_as_alone():
    words = {"router": "dselect-k-static", "codes": "ranked", "warm_steps": 3}

    def make(seed):
        return MultiGate(ALIKE, feedforward(), **words).double()

    many = fitted(make, [3, 0])
    for i, seed in enumerate([3, 0]):
        same(many.models()[i], fitted(make, [seed]).models()[0])


def test_a_strength_that_one_task_was_given_by_hand_is_its_own_in_many_copies_too():
    model, x = MultiGate(ALIKE, feedforward(), balance={"entropy": 0.1}), torch.randn(4, DIM)
    model.balance[1]["entropy"] = 5.0

    def terms(x):
        return torch.stack([own["entropy"] for own in model(x).terms.values()])

    torch.testing.assert_close(torch.func.vmap(terms)(x[None])[0], terms(x))


def test_gates_that_draw_are_asked_together_each_with_its_own_numbers():
    torch.manual_seed(0)
    routers = [build_router("gumbel-static", dim=DIM, experts=64) for _ in range(3)]
    x, weights = torch.randn(4, DIM), {"sparsity": 0.1}
    kept = torch.stack([decide_together(routers, weights, x).weight_GTE[:, 0] for _ in range(50)])
    share = (kept > 0).float().mean((0, 2))
    assert share.tolist() == pytest.approx([0.9] * 3, abs=0.02)
    assert not (kept[:, 0] > 0).equal(kept[:, 1] > 0)
    apart = decide_apart(routers, [weights] * 3, x)
    for own, other in zip(decide_together(routers, weights, x).terms, apart.terms, strict=True):
        torch.testing.assert_close(own, other)


def test_gates_that_draw_together_in_many_copies(monkeypatch):
    def together(routers, weights, x):
        return decide_together(routers, weights[0], x)

    monkeypatch.setattr("moiety.multitask.model.decide_apart", together)

    def make(seed):
        return MultiGate(ALIKE, feedforward(), router="gumbel-static", log=(6, 1)).double()

    kept = {}
    for seeds in ([3, 0], [3]):
        for seed, model in zip(seeds, fitted(make, seeds).models(), strict=True):
            kept.setdefault(seed, []).append(model.log.weights() > 0)
    assert kept[3][0].equal(kept[3][1])  # whatever its neighbours draw
    assert not kept[3][0].equal(kept[0][0])
    steps_PGE = kept[3][0]
    assert not steps_PGE[:, 0].equal(steps_PGE[:, 1]) and not steps_PGE[0].equal(steps_PGE[1])
