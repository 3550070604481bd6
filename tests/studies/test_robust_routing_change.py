"""`robust/routing-change`: what a changed route counts, against routes made by hand."""

import pytest
import torch

from moiety.lab.store import Store, Trial
from moiety.lab.study import Running
from moiety.robust import PGD, run_attack
from moiety.robust.routes import routing_change as by_library
from moiety.studies.robust import routed, zoo
from moiety.studies.robust import routing_change as study_file

study = study_file.study
CPU = torch.device("cpu")


def trial(folder, arm, seed=0, of=study, **settings):
    own = {**of.scale("smoke").settings, **of.arms[arm], **settings}
    one, store = Trial(of.name, arm, seed, own), Store(folder)
    return Running(one, CPU, store.curve(one), store.checkpoint(one), lambda share: None)


def test_without_an_attack_only_tokens_that_nobody_took_count_as_changed(tmp_path):
    running = trial(tmp_path, "no attack")
    found = study_file.run(running)
    trained = zoo.trained(running)
    (routes,) = routed.routes_of(trained.model, trained.x)
    (layer,) = routes.layers
    empty = ~routes[layer][0].choice().any(1)
    assert found["change without attack"] == pytest.approx(float(empty.double().mean()))
    assert {found[f"change at {e}/255"] for e in study_file.EPS} == {found["change without attack"]}
    assert found["growth, layer 1"] == 0 and found["moved at 16/255"] == 0
    assert found["growth, layer 2"] is None  # one MoE layer at this scale


def test_the_change_is_that_of_the_last_points_of_the_attack(tmp_path):
    running = trial(tmp_path, "pgd")
    found = study_file.run(running)
    trained = zoo.trained(running)
    steps = running.settings["attack_steps"]["pgd"]
    last = run_attack(PGD(steps=steps), trained.model, trained.x, trained.y, 16 / 255, keep="last")
    (before,), (after,) = (routed.routes_of(trained.model, x) for x in (trained.x, last.x))
    (change,) = by_library(before, after, examples=len(trained.x)).values()
    assert found["change at 16/255"] == pytest.approx(change)
    assert found["error at 16/255"] == float(last.fooled.double().mean())
    assert found["growth, layer 1"] > 0 and found.keys() == study.metrics.keys()
    rows = running.curve.rows()
    assert [row["step"] for row in rows] == [0, 10, 40, 160]
    assert rows[-1]["change, layer 1"] == pytest.approx(change)


def test_batches_do_not_change_what_is_measured(tmp_path, monkeypatch):
    trained = zoo.trained(trial(tmp_path, "pgd"))
    whole = routed.look(trained, "pgd", [8], 3)
    monkeypatch.setattr(routed, "BATCH", 5)  # does not divide the 32 images
    parts = routed.look(trained, "pgd", [8], 3)
    for one, other in zip(whole, parts, strict=True):
        assert one.change == pytest.approx(other.change, abs=2e-3)
        assert one.dropped == pytest.approx(other.dropped, abs=2e-3)


def test_noise_moves_every_pixel_by_all_of_eps(tmp_path):
    trained = zoo.trained(trial(tmp_path, "noise"))
    _, one = routed.look(trained, "random-search", [8], 1)
    moved = (one.attacked.x - trained.x).abs()
    inside = (trained.x >= 8 / 255) & (trained.x <= 1 - 8 / 255)
    assert torch.allclose(moved[inside], torch.tensor(8 / 255), atol=1e-6) and bool(inside.any())


def test_the_least_growth_is_that_of_the_flattest_step():
    def at(*change):
        return routed.Found(None, 0.0, 0.0, 0.0, list(change), 0.0)

    course = [at(0.0, 0.1), at(0.2, 0.2), at(0.25, 0.15)]
    assert study_file._growth(course, 1) == pytest.approx(0.05)
    assert study_file._growth(course, 2) == pytest.approx(-0.05)  # a fall is no growth
    assert study_file._growth(course, 3) is None


def test_claims_say_where_in_the_digest_they_are():
    for claim in study.claims:
        assert (claim.tier == "our own") != claim.mark.startswith("1 §6")
    assert study.metrics["change at 4/255"].better == "lower"  # "better" is fewer changed routes
