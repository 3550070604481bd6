"""`robust/attribution`: one expert re-routes nothing; frozen routes are the clean ones."""

import pytest
import torch
from test_robust_routing_change import trial

from moiety.robust import PGD, Target, attribute, freeze
from moiety.studies.robust import attribution, routed, zoo

study = attribution.study


def test_one_expert_has_no_route_to_change(tmp_path):
    found = attribution.run(trial(tmp_path, "1 expert", of=study))
    assert found.keys() == study.metrics.keys()
    for eps in attribution.EPS:
        assert found[f"routes at {eps}/255"] == pytest.approx(0, abs=1e-6)
        assert found[f"routes and weights at {eps}/255"] == pytest.approx(0, abs=1e-6)
        assert found[f"frozen at {eps}/255"] == found[f"error at {eps}/255"]
        assert found[f"change at {eps}/255"] == 0


def test_the_share_is_that_of_the_mean_rise(tmp_path, monkeypatch):
    trained = zoo.trained(trial(tmp_path, "8 experts", of=study))
    _, one = routed.look(trained, "pgd", [32], 5)
    x_adv = one.attacked.x
    parts = attribute(Target(trained.model), trained.x, x_adv, trained.y)
    want = float(parts.routes.mean() / parts.total.mean())
    assert want != 0
    assert attribution.routes_share(trained, x_adv, weights=False) == pytest.approx(want)
    assert attribution.routes_share(trained, x_adv, weights=True) != pytest.approx(want)
    monkeypatch.setattr(zoo, "BATCH", 7)  # batches of other sizes, the same mean
    assert attribution.routes_share(trained, x_adv, weights=False) == pytest.approx(want, abs=1e-4)
    assert attribution.routes_share(trained, trained.x, weights=False) is None  # nothing rose


def test_who_is_wrong_with_frozen_routes_is_asked_with_the_clean_routes(tmp_path):
    trained = zoo.trained(trial(tmp_path, "8 experts", of=study))
    wrong = attribution.wrong_when_frozen(trained, PGD(steps=5), 32)
    clean = attribution.wrong_when_frozen(trained, PGD(steps=5), 0)
    with torch.no_grad():
        frozen = freeze(Target(trained.model), trained.x)
        assert torch.equal(clean, frozen(trained.x).logits.argmax(-1) != trained.y)
    assert wrong.sum() > clean.sum()


def test_models_are_compared_with_the_one_that_cannot_re_route():
    halves = [claim for claim in study.claims if claim.margin == 0.5]
    assert {claim.b for claim in halves} == {"1 expert"}
    assert {claim.a for claim in halves} | {"1 expert"} == set(study.arms)
