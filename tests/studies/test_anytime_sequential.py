"""anytime/sequential: equal data, equal compute, and the zero that a cost is compared with."""

import math

import pytest
import torch

from moiety.lab.store import Store, Trial
from moiety.lab.study import Running
from moiety.studies.anytime import sequential
from moiety.studies.anytime.sequential import BIG, COST, IID, ORDER, SMALL_ONE, study
from moiety.studies.anytime.text import corpus_of

CPU = torch.device("cpu")


def running(arm, folder, **settings):
    scale = study.scale("smoke").settings
    own = {**scale, **study.arms[arm], "save_every": 0.0, "passes": 1, **settings}
    trial, store = Trial(study.name, arm, 0, own), Store(folder)
    return Running(trial, CPU, store.curve(trial), store.checkpoint(trial), lambda share: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A trial that was left alone: its metrics and its curve."""
    trial = running(SMALL_ONE, tmp_path_factory.mktemp("whole"))
    return sequential.run(trial), trial.curve.rows()


def test_both_ways_cost_the_same_and_see_the_same(whole):
    found, _ = whole
    for k in (3, 4):
        once, stream = found[f"training i.i.d., k = {k}"], found[f"training sequential, k = {k}"]
        assert once == pytest.approx(stream, rel=0.05)  # the capacity drops other tokens
    assert found["training with restarts"] == pytest.approx(stream, rel=0.05)
    corpus = corpus_of(study.scale("smoke").settings, CPU)
    joined = corpus.joined(3).train
    assert torch.equal(joined.x, torch.cat([batch.train.x for batch in corpus.batches[:3]]))
    assert torch.equal(joined.y[-1], corpus.batches[2].train.y[-1])


def test_a_cost_is_the_difference_of_losses_in_nats(whole):
    found, rows = whole
    assert [row["step"] for row in rows] == [3, 4]
    for k, row in zip((3, 4), rows):
        once, stream = found[f"i.i.d., k = {k}"], found[f"sequential, k = {k}"]
        assert found[COST[k]] == pytest.approx(math.log(stream) - math.log(once))
        assert row["loss"] == found[COST[k]]
    restarts = math.log(found[sequential.RESTARTS])
    assert found[ORDER] == pytest.approx(math.log(stream) - restarts)


def test_iid_costs_nothing_beside_itself(tmp_path):
    trial = running(IID, tmp_path)
    found = sequential.run(trial)
    assert [found[COST[k]] for k in (3, 4)] == [0, 0] and found[ORDER] == 0
    assert found.keys() == sequential.METRICS.keys()
    assert [row["loss"] for row in trial.curve.rows()] == [0, 0]


def test_arms_and_claims_are_those_of_table_1():
    full = study.scale("full")
    assert full.settings["batches"] == 4 and full.seeds >= 5
    for size in (SMALL_ONE, BIG):
        assert study.arms[size]["learner"] == "ensemble" and study.arms[size]["experts"] == 4
        assert study.arms[size]["options"] == {"members": 2}
    assert sum(claim.tier == "proxy" for claim in study.claims) == 6


@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])  # sequential, i.i.d. with k = 4, restarts
def test_a_killed_trial_goes_on_to_the_same_bits(share, whole, tmp_path):
    def die(done):
        if done > share:
            raise KeyboardInterrupt

    first = running(SMALL_ONE, tmp_path)
    first.tick = die
    with pytest.raises(KeyboardInterrupt):
        sequential.run(first)
    again, ticks = running(SMALL_ONE, tmp_path), []
    again.tick = ticks.append
    assert (sequential.run(again), again.curve.rows()) == whole
    assert min(ticks) >= int(4 * share) / 4  # what was over stayed over
