"""`anytime/adaptive-wait`: policies, and the best fixed waiting time."""

import pytest
import torch
from test_lab_studies import running

from moiety.anytime import summary
from moiety.studies.anytime import adaptive_wait
from moiety.studies.anytime.adaptive_wait import BEST, FIXED, study

CPU = torch.device("cpu")


def settings(name):
    return {**study.scale("smoke").settings, **study.arms[name], "scale": "smoke"}


def average(lines):
    return sum(summary(one).average for one in lines) / len(lines)


def test_the_best_fixed_one_is_the_best_of_all_in_the_mean():
    fixed = {
        name: average(adaptive_wait.lines_of(settings(f"{name}, large"), (0, 1), CPU))
        for name in FIXED
    }
    best = adaptive_wait.lines_of(settings(f"{BEST}, large"), (0, 1), CPU)
    assert average(best) == min(fixed.values()) < max(fixed.values())


def test_a_budget_is_what_the_middle_one_spends():
    own = settings("budget, small")
    each = [adaptive_wait.lines_of({**own, **wait}, (0, 1), CPU) for wait in FIXED.values()]
    words = adaptive_wait.policy_of(own, each)
    spent = [summary(lines).comp + summary(lines).comp_validation for lines in each[2]]
    assert float(words.removeprefix("budget:")) == pytest.approx(sum(spent) / 2 / 4, rel=1e-4)
    for lines in adaptive_wait.lines_of(own, (0, 1), CPU):
        assert lines[0]["trained"] and lines[-1]["trained"]


def test_a_plateau_waits_at_most_an_eighth_of_the_stream():
    assert adaptive_wait.policy_of(settings("plateau, small"), []) == "plateau:0.02:1"
    full = {**study.scale("full").settings, **study.arms["plateau, small"]}
    assert adaptive_wait.policy_of(full, []) == "plateau:0.02:64"


def test_a_block_reports_its_phases(tmp_path):
    runs = [running(study, "w = 500, small", tmp_path, seed) for seed in range(3)]
    first, _, none = adaptive_wait.run_block(runs)
    assert first["phases"] == 1 and none["phases"] is None
    assert first.keys() == study.metrics.keys()
