"""From the settings of an arm to the program that runs: each once, with the arm's own period."""

import json

import pytest
import torch

from moiety.anytime.ledger import Summary
from moiety.lab.loading import load_study
from moiety.studies.anytime import vision


@pytest.fixture
def asked(monkeypatch):
    """The programs that a study's arms ask for at full scale; none is run."""

    def of(name):
        study, found = load_study(f"anytime/{name}"), []
        monkeypatch.setattr(
            vision, "_course", lambda words, names, *_: found.append((words, names))
        )
        for arm in study.arms.values():
            settings = {**study.scale("full").settings, **arm}
            vision.course_of(settings, (0,), torch.device("cpu"))
            vision.ladder_of(settings, (0,), torch.device("cpu"))
        return [{**json.loads(words), "names": names} for words, names in found]

    return of


@pytest.mark.parametrize(
    ("name", "periods"), [("mnist", {1: 50, 5: 10, 10: 5, 50: 1}), ("cifar", {2: 5, 10: 2, 50: 1})]
)
def test_the_period_of_an_arm_reaches_its_program(asked, name, periods):
    for cell in asked(name):
        wait = int(cell["wait"])
        if cell["learner"] != "firefly" and wait in periods:
            assert cell["every"] == periods[wait]


@pytest.mark.parametrize(("name", "programs"), [("mnist", 28), ("cifar", 23)])
def test_arms_and_ladders_share_their_programs(asked, name, programs):
    cells = asked(name)
    assert len({json.dumps(cell, sort_keys=True) for cell in cells}) == programs
    assert not any({"replay", "capped"} & cell.keys() for cell in cells)


def test_what_growing_costs_is_compute():
    words = dict.fromkeys(Summary.__dataclass_fields__, 0.0)
    assert vision.spent(Summary(**{**words, "comp": 3.0, "comp_growth": 2.0})) == 5.0
