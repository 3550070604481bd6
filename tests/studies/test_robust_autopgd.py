"""`robust/autopgd`: which attack an arm is for, and that AutoPGD is the stronger one."""

import pytest
from test_robust_pgd import trial

from moiety.robust import APGD, PGD
from moiety.studies.robust import curves, zoo
from moiety.studies.robust.autopgd import study


@pytest.mark.parametrize(("scale", "steps"), [("smoke", (3, 5)), ("small", (40, 100))])
def test_an_arm_runs_its_attack_with_the_papers_steps(scale, steps, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(zoo, "errors", lambda found, attack, grid, run: seen.append(attack) or {})
    asked = study.scale(scale).settings
    wanted = {word: asked[word] for word in ("steps", "apgd_steps")}
    for arm in ("ViT / PGD", "ViT / AutoPGD"):
        curves.run(trial(study.name, arm, tmp_path, **wanted))
    assert seen == [PGD(steps=steps[0]), APGD(steps=steps[1])]


def test_autopgd_fools_at_least_as_often_on_a_trained_model(tmp_path):
    longer = {"epochs": 20, "dim": 32, "batch": 32, "images": 200}
    longer |= {"grid": [16, 32], "steps": 10, "apgd_steps": 25}
    by_eps = {}
    for arm in ("V-MoE / PGD", "V-MoE / AutoPGD"):
        one = trial(study.name, arm, tmp_path, **longer)
        curves.run(one)
        by_eps[arm] = [row["error"] for row in one.curve.rows()]
    weak, strong = by_eps.values()
    assert weak[0] == strong[0] < 0.5  # the same images and the same model, which has learned
    assert weak[1] <= strong[1] and weak[2] < strong[2]
