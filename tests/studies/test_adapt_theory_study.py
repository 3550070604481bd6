"""`adapt/theory`: true statements are never broken, wrong ones are, on the same problems."""

import pytest
import torch

from moiety.adapt.theory import Linear
from moiety.lab.loading import load_study
from moiety.lab.store import Store, Trial
from moiety.lab.study import Running
from moiety.studies.adapt import theory

WRONG = {"power inside", "times t", "printed zeta bounds", "printed psi bounds", "the norm falls"}


def trial(arm, folder, seed=0, draws=15):
    settings = {**theory.study.arms[arm], "draws": draws}
    one, store = Trial(theory.study.name, arm, seed, settings), Store(folder)
    cpu = torch.device("cpu")
    return Running(one, cpu, store.curve(one), store.checkpoint(one), lambda share: None)


@pytest.mark.parametrize("arm", theory.study.arms)
def test_a_statement_is_broken_if_and_only_if_it_is_wrong(arm, tmp_path):
    running = trial(arm, tmp_path)
    found = theory.run(running)
    assert (found["broken"] > 0) == (arm in WRONG)
    assert found.keys() == theory.study.metrics.keys()
    rows = running.curve.rows()
    assert len(rows) == 10 and (rows[-1]["loss"] > 1e-6) == (arm in WRONG)


def test_two_trials_of_a_seed_are_the_same_and_arms_see_the_same_problems(tmp_path):
    one, again, other = (theory.run(trial("lemma 1", tmp_path, seed)) for seed in (0, 0, 1))
    assert one == again != other
    printed = theory.run(trial("times t", tmp_path))
    assert printed["tight"] == one["tight"] and printed["broken"] > one["broken"]


def test_a_smoke_run_has_points_of_a_curve(tmp_path):
    draws = load_study("adapt/theory").scale("smoke").settings["draws"]
    running = trial("lemma 1", tmp_path, draws=draws)
    theory.run(running)
    assert len(running.curve.rows()) >= 2


@pytest.mark.parametrize(
    ("part", "error", "arms"),
    [
        ("b", lambda self, t: 0.0, ["safe zeta bounds", "safe psi bounds"]),
        ("tuned", lambda self, t, time: self.start(t), ["flow"]),
        ("distil", lambda self, w: 0.9 * w, ["lemma 1", "outside the span"]),
    ],
)
def test_an_error_in_the_library_would_be_seen(part, error, arms, tmp_path, monkeypatch):
    monkeypatch.setattr(Linear, part, error)
    for arm in arms:
        assert theory.run(trial(arm, tmp_path))["broken"] > 0.5


def test_every_claim_stands_on_the_paper_with_the_digests_place():
    assert theory.study.paper and all(claim.mark.startswith("3 §") for claim in theory.study.claims)
    assert {claim.tier for claim in theory.study.claims} == {"exact"}
    compared = {arm for claim in theory.study.claims for arm in (claim.a, claim.b)}
    assert compared == set(theory.study.arms)  # no arm without a question
