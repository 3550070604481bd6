"""`robust/models`: which models there are, and what is said of each."""

import pytest
import torch

from moiety.lab.loading import list_studies, load_study
from moiety.lab.store import Store, Trial
from moiety.lab.study import Running
from moiety.studies.robust import models, zoo

STUDIES = [
    name for name in list_studies() if name.startswith("robust/") and name != "robust/theory"
]


@pytest.fixture(autouse=True)
def _models(tmp_path, monkeypatch):
    monkeypatch.setenv("MOIETY_MODELS", str(tmp_path / "models"))


def trial(arm, folder, scale="smoke"):
    settings = {**models.study.scale(scale).settings, **models.study.arms[arm]}
    one, store = Trial(models.study.name, arm, 0, settings), Store(folder)
    cpu = torch.device("cpu")
    return Running(one, cpu, store.curve(one), store.checkpoint(one), lambda share: None)


def specs(study, scale):
    settings = study.scale(scale).settings
    return [zoo.spec({**settings, **arm}, 0) for arm in study.arms.values()]


@pytest.mark.parametrize("name", STUDIES)
def test_every_model_of_a_study_is_among_these(name):
    made = specs(models.study, "full")
    asked = specs(load_study(name), "full")
    assert [spec for spec in asked if spec not in made] == []


def test_no_model_is_there_twice():
    places = [zoo.place(spec) for spec in specs(models.study, "full")]
    assert len(set(places)) == len(places) == 22


@pytest.mark.parametrize("arm", ["vit++", "v-moe 8", "v-moe 8, adversarial"])
def test_a_trial_tells_accuracy_and_cost_and_draws_the_training(arm, tmp_path):
    running = trial(arm, tmp_path)
    found = models.run(running)
    assert found.keys() == models.study.metrics.keys()
    images = len(zoo.pictures(running.settings, running.device).test)
    assert found["accuracy"] * images == pytest.approx(round(found["accuracy"] * images))
    assert found["parameters"] == running.extra["parameters"] > 5000
    assert [row["step"] for row in running.curve.rows()] == [1, 2, 3, 4]
    assert all("loss" in row for row in running.curve.rows())
    again = trial(arm, tmp_path / "again")
    assert models.run(again) == found  # found, not trained: its seconds are those of then
    assert again.curve.rows() == running.curve.rows()
