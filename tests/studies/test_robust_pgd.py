"""`robust/pgd`, and what its sisters share with it: one trial, one set of models, claims."""

import pytest
import torch

from moiety.lab.loading import load_study
from moiety.lab.store import Store, Trial
from moiety.lab.study import Running
from moiety.robust.training import attack_batch
from moiety.studies.robust import curves, zoo

SISTERS = ["robust/pgd", "robust/adversarial-training", "robust/autopgd", "robust/experts"]


def trial(name, arm, folder, seed=0, **settings):
    """A trial of a study at its smallest scale."""
    study = load_study(name)
    own = {**study.scale("smoke").settings, **study.arms[arm], **settings}
    one, store = Trial(name, arm, seed, own), Store(folder)
    cpu = torch.device("cpu")
    return Running(one, cpu, store.curve(one), store.checkpoint(one), lambda share: None)


def test_the_errors_are_those_of_the_attacked_images(tmp_path):
    one = trial("robust/pgd", "V-MoE", tmp_path)
    found, model = curves.run(one), zoo.trained(one)
    assert found.keys() == load_study("robust/pgd").metrics.keys()
    wrong = model.model(model.x).argmax(1) != model.y
    assert found["clean error"] == wrong.float().mean().item()
    last = attack_batch(model.model, model.x, model.y, eps=8 / 255, steps=one.settings["steps"])
    fooled = (model.model(last).argmax(1) != model.y) | wrong
    # The last point is one of those that count.
    assert found["error at 8/255"] >= fooled.float().mean().item()
    by_eps = [found[zoo.error_at(eps)] for eps in one.settings["grid"]]
    assert found["mean error"] == pytest.approx(sum(by_eps) / len(by_eps))
    assert min(by_eps) >= found["clean error"]


def test_the_curve_of_a_trial_is_its_error_by_eps(tmp_path):
    one = trial("robust/pgd", "ViT", tmp_path)
    found = curves.run(one)
    rows = {row["step"]: row["error"] for row in one.curve.rows()}
    assert list(rows) == [0, 5, 10, 20, 40, 80]
    assert rows == {10 * eps: found[zoo.error_at(eps)] for eps in (0, 0.5, 1, 2, 4, 8)}


def test_costs_are_told_in_those_of_a_vit(tmp_path):
    vit, larger, sparse = (
        curves.run(trial("robust/pgd", arm, tmp_path))["cost"] for arm in ("ViT", "ViT++", "V-MoE")
    )
    assert vit == 1 < sparse < larger
    assert larger == pytest.approx(2.0, abs=0.3)  # the paper's: 17.9 GFLOPs to 8.9


def test_a_model_is_attacked_alike_in_every_study(tmp_path):
    asked = [
        ("robust/pgd", "V-MoE"),
        ("robust/adversarial-training", "V-MoE"),
        ("robust/autopgd", "V-MoE / PGD"),
        ("robust/experts", "8 experts"),
    ]
    runs = [trial(name, arm, tmp_path) for name, arm in asked]
    first, *others = (curves.run(one) for one in runs)
    assert all(found == first for found in others)
    assert len({zoo.place(zoo.spec(one.settings, one.seed)) for one in runs}) == 1
    assert curves.run(trial(*asked[0], tmp_path, seed=1)) != first


def test_v_moe_has_the_papers_experts_at_full_scale():
    for name in SISTERS[:3]:
        found = {scale: each.settings["experts"] for scale, each in load_study(name).scales.items()}
        assert found == {"smoke": 8, "small": 8, "full": 32}


@pytest.mark.parametrize("name", SISTERS)
def test_every_claim_has_its_place_and_every_arm_a_claim(name):
    study = load_study(name)
    for claim in study.claims:
        assert claim.mark.startswith("1 §6") == (claim.tier == "proxy")
        assert claim.tier in ("proxy", "our own")
    assert {arm for claim in study.claims for arm in (claim.a, claim.b)} == set(study.arms)
    asked = [(claim.kind, claim.a, claim.b, claim.metric) for claim in study.claims]
    assert len(set(asked)) == len(asked)
    assert study.paper == load_study("robust/theory").paper
