"""The Switch transformer of the language studies: what it sees, how it grows, how it is trained."""

import copy
import math

import pytest
import torch

from moiety.anytime.base import Phase
from moiety.anytime.data import token_blocks
from moiety.anytime.learners import learner
from moiety.studies.anytime.switch import Schedule, SwitchTransformer
from moiety.watch import moe_layers, watch

V, L = 30, 12


def model(seed=0, experts=4, depth=4):
    torch.manual_seed(seed)
    shape = {"vocabulary": V, "length": L, "dim": 16, "depth": depth, "heads": 2}
    return SwitchTransformer(experts=experts, **shape).eval()


def text(rows=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    return token_blocks(torch.randint(V, (rows * L + 1,), generator=g).cumsum(0) % V, L)


def phase(number=1):
    return Phase(train=text(seed=number), validation=text(4, seed=100 + number), number=number)


# -- the model -------------------------------------------------------------------------------------


def test_a_token_sees_none_that_comes_later():
    x = text().x[:3]
    later = x.clone()
    later[1, 7:] = (later[1, 7:] + 1) % V
    first, second = model()(x), model()(later)
    torch.testing.assert_close(first[0], second[0])  # nor one of a later sequence
    torch.testing.assert_close(first[1, :7], second[1, :7])
    assert not torch.allclose(first[1, 7:], second[1, 7:])


def test_every_second_block_has_experts_one_a_token_within_capacity():
    made = model(experts=6)
    layers = moe_layers(made)
    assert list(layers) == ["blocks.1.feedforward", "blocks.3.feedforward"]
    with watch(made, keep="choice") as routes:
        made(text().x)
    for name, layer in layers.items():
        assert layer.balance == {"switch": 0.01}
        (routing,) = routes[name]
        tokens = text().x.numel()
        assert routing.index.shape == (tokens, 1)
        load = routing.load()
        assert load.max() <= math.ceil(tokens / 6) and load.sum() < tokens  # some are dropped


def test_the_position_of_a_token_counts():
    x = torch.full((1, L), 3)
    logits = model()(x)
    assert not torch.allclose(logits[0, 0], logits[0, 5], atol=1e-3)


# -- growth ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["families", "rows"])
def test_growth_by_families_changes_nothing_and_by_rows_something(how):
    made = learner("growing-switch", model, how=how, training=Schedule(batch=8, epochs=2))
    made.train(phase())
    report = made.train(phase(2))
    gap = report.growth["gap"]
    assert made.exact == (how == "families")
    assert gap < 1e-6 if made.exact else gap > 1e-4
    assert [layer.experts.experts for layer in moe_layers(made.models[0]).values()] == [6, 6]


def test_copies_grow_apart():
    made = learner("growing-switch", model, training=Schedule(batch=8, epochs=10, lr=5e-3))
    made.train(phase())
    grown = made.train(phase(2)).growth["layers"]
    for one, layer in zip(grown, moe_layers(made.models[0]).values()):
        for parent, child in zip(one["parents"], one["children"]):
            for weights in layer.experts.parameters():
                assert not torch.allclose(weights[parent], weights[child], atol=1e-3)


# -- training --------------------------------------------------------------------------------------


def test_the_rate_rises_then_falls_along_a_cosine():
    schedule = Schedule(warmup=0.2)
    rates = [schedule.rate(step, 10) for step in range(1, 11)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[2:] == pytest.approx([(1 + math.cos(math.pi * i / 9)) / 2 for i in range(1, 9)])
    assert rates[-1] > 0


@pytest.mark.parametrize("carried", [False, True])
def test_a_fit_follows_the_rate_of_its_schedule(carried):
    schedule, made = Schedule(lr=0.01, batch=8, epochs=3, warmup=0.5), model()
    now = phase()
    fit = schedule.begin(made, now.train, now.validation, seed=0)
    if carried:  # the rate of the last step is none to begin with
        fit.run()
        state = fit.optimizer.state_dict()
        fit = schedule.begin(made, now.train, now.validation, 0, state)
    seen = []
    update = fit._update
    fit._update = lambda rows: (seen.append(fit.optimizer.param_groups[0]["lr"]), update(rows))[1]
    fit.run()
    assert seen == pytest.approx([0.01 * schedule.rate(step, 6) for step in range(1, 7)])


def test_the_schedule_is_part_of_what_a_state_goes_on_under():
    state = learner("single", model, training=Schedule()).state()
    with pytest.raises(ValueError, match=r"warmup = 0.1, not 0.3"):
        learner("single", model, training=Schedule(warmup=0.3)).load(state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("grown", [False, True])
def test_a_captured_step_trains_as_an_eager_one(grown, monkeypatch):
    from moiety.studies.anytime import switch

    made = learner("growing-switch", model, device="cuda", training=Schedule(batch=8, epochs=6))
    made.train(phase())
    if grown:
        made.grow(phase(2))
    losses, now = [], phase(2)
    for warm in (switch.WARM, 10**6):
        monkeypatch.setattr(switch, "WARM", warm)
        twin = copy.deepcopy(made.models[0])
        fit = made.training.begin(twin, now.train, now.validation, 0)
        fit.run()
        assert (fit.graph is not None) == (warm < 10**6)
        losses.append(fit.best)
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
