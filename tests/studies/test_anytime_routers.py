"""anytime/routers: twice the same run but for growth, and the zero beside it."""

import pytest
import torch

from moiety.lab.store import Store, Trial
from moiety.lab.study import Running
from moiety.studies.anytime import routers
from moiety.studies.anytime.routers import GAIN, PLAIN, ROUTERS, study
from moiety.watch import moe_layers

CPU = torch.device("cpu")
TRAINING = {**routers.SMOKE["training"], "batch": 200, "save_every": 0.0}


def running(arm, folder, **settings):
    own = {**routers.SMOKE, **study.arms[arm], "training": TRAINING, "batches": 2, **settings}
    trial, store = Trial(study.name, arm, 0, own), Store(folder)
    return Running(trial, CPU, store.curve(trial), store.checkpoint(trial), lambda share: None)


def settings_of(router):
    return {**routers.SMOKE, "router": router}


@pytest.mark.parametrize("router", ROUTERS)
def test_growth_adds_an_expert_a_layer_and_leaves_the_function(router):
    batches, test = routers.stream_of("digits", 2, 0, CPU)
    fixed, grown = (routers.make(settings_of(router), grows, test, 0) for grows in (False, True))
    assert torch.equal(fixed.predict(test.x), grown.predict(test.x))  # the same first weights
    assert grown.exact
    phases = [routers.walk(one, batches, test, seed=0, metric="error") for one in (fixed, grown)]
    assert phases[0][0]["error"] == phases[1][0]["error"]  # growth begins with the second phase
    assert phases[1][1]["growth"]["gap"] < 1e-5 and phases[0][1]["growth"] is None
    for one, experts in ((fixed, 4), (grown, 5)):
        layers = moe_layers(one.models[0]).values()
        assert [layer.experts.experts for layer in layers] == [experts, experts]


@pytest.mark.parametrize("router", ["tree", "cosine"])
def test_a_gain_is_what_growth_saves_and_a_kill_changes_nothing(router, tmp_path):
    whole = running(router, tmp_path / "whole")
    want, rows = routers.run(whole), whole.curve.rows()
    saved = sum(row["not_grown"] - row["error"] for row in rows) / len(rows)
    assert want[GAIN] == pytest.approx(saved)
    assert want[routers.END_GAIN] == pytest.approx(rows[-1]["not_grown"] - rows[-1]["error"])
    assert want["memory"] > want["memory, no growth"]

    def die(share):
        if share > 0.8:
            raise KeyboardInterrupt

    first = running(router, tmp_path / "killed")
    first.tick = die
    with pytest.raises(KeyboardInterrupt):
        routers.run(first)
    again, ticks = running(router, tmp_path / "killed"), []
    again.tick = ticks.append
    assert routers.run(again) == want and again.curve.rows() == rows
    assert min(ticks) > 0.7


def test_a_plain_model_has_nothing_to_grow(tmp_path):
    trial = running(PLAIN, tmp_path)
    found = routers.run(trial)
    assert found[GAIN] == 0 and found.keys() == routers.METRICS.keys()
    assert found["gap"] is None and found["error"] == found["error, no growth"]
    assert len(trial.curve.rows()) == 2


def test_the_stream_of_a_seed_is_its_own():
    one, other = (routers.stream_of("digits", 2, seed, CPU)[0][0].train for seed in (0, 1))
    assert not torch.equal(one.x, other.x)
