"""`robust/theory`: true statements are never broken, wrong ones are, on the same draws."""

import pytest
import torch

from moiety.lab.store import Store, Trial
from moiety.lab.study import Running
from moiety.studies.robust import statements, theory

WRONG = {
    "lemma 1 without the router",
    "orthogonal parts as printed",
    "opposite values as printed",
    "theorem 1 without eps",
}


def trial(arm, folder, seed=0, draws=40):
    settings = {**theory.study.arms[arm], "draws": draws}
    one, store = Trial(theory.study.name, arm, seed, settings), Store(folder)
    cpu = torch.device("cpu")
    return Running(one, cpu, store.curve(one), store.checkpoint(one), lambda share: None)


@pytest.mark.parametrize("arm", theory.study.arms)
def test_a_statement_is_broken_if_and_only_if_it_is_wrong(arm, tmp_path):
    running = trial(arm, tmp_path, draws=20 if "16" in arm else 40)
    found = theory.run(running)
    assert (found["broken"] > 0) == (arm in WRONG)
    assert found.keys() == theory.study.metrics.keys()
    rows = running.curve.rows()
    assert len(rows) == 10 and (rows[-1]["loss"] > 1e-6) == (arm in WRONG)


def test_two_trials_of_a_seed_are_the_same_and_of_two_seeds_are_not(tmp_path):
    one, again, other = (theory.run(trial("theorem 1", tmp_path, seed)) for seed in (0, 0, 1))
    assert one == again != other


def test_a_wrong_statement_is_checked_on_the_draws_of_the_true_one(tmp_path):
    for true, wrong in (
        ("orthogonal parts", "orthogonal parts as printed"),
        ("theorem 1", "theorem 1 without eps"),
    ):
        one, other = (theory.run(trial(arm, tmp_path)) for arm in (true, wrong))
        assert one["gain"] == other["gain"] and one["eps 1"] == other["eps 1"]


def test_a_smoke_run_has_points_of_a_curve(tmp_path):
    running = trial("lemma 1", tmp_path, draws=theory.study.scale("smoke").settings["draws"])
    theory.run(running)
    assert len(running.curve.rows()) >= 2


def test_an_error_in_lemma_1_would_be_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(statements, "router_term", lambda p, f, rows: torch.zeros(len(p)))
    assert theory.run(trial("lemma 1", tmp_path))["broken"] > 0.5
    assert theory.run(trial("two experts", tmp_path))["broken"] == 1


def test_an_error_in_theorem_1_would_be_seen(tmp_path, monkeypatch):
    from moiety.robust import theory as library

    monkeypatch.setattr(library, "_eps_1", lambda parts: 0.0)
    monkeypatch.setattr(library, "_eps_2", lambda parts: 0.0)
    assert theory.run(trial("theorem 1", tmp_path))["broken"] > 0.1


def test_every_claim_stands_on_the_paper_with_the_digests_place():
    assert theory.study.paper and all(claim.mark.startswith("1 §") for claim in theory.study.claims)
    assert {claim.tier for claim in theory.study.claims} == {"exact"}
    compared = {arm for claim in theory.study.claims for arm in (claim.a, claim.b)}
    assert compared == set(theory.study.arms)  # no arm without a question
