"""`anytime/mnist`: its grid, its metrics, and what a cell of settings is."""

import pytest
import torch
from test_lab_studies import running

from moiety.anytime import summary
from moiety.report import figures
from moiety.studies.anytime import projection, vision
from moiety.studies.anytime.mnist import LADDER, TWO, WAITS, WIDTHS, study
from moiety.studies.anytime.statements import arm

CPU = torch.device("cpu")


def settings(name, scale="smoke", **words):
    return {**study.scale(scale).settings, **study.arms[name], "scale": scale, **words}


def block(name, folder, seeds=3):
    """The runs of a block, of which the smallest scale trains two."""
    return [running(study, name, folder, seed) for seed in range(seeds)]


def test_the_grid_is_the_issue_s():
    assert (WAITS, WIDTHS) == ((1, 5, 10, 50, 100, 500), (4, 64))
    for name in ("SM", "Ens", "gEns"):
        assert all(arm(name, c, w) in study.arms for c in WIDTHS for w in WAITS)
    assert all(arm("gMoE", c, w) in study.arms for c in WIDTHS for w in TWO)
    full = study.scale("full")
    assert full.settings["batches"] == 500 and full.seeds >= 5 == full.seeds // 2
    assert (full.settings["epochs"], full.settings["patience"]) == (100, 25)


def test_waiting_times_and_growth_scale_with_the_stream():
    waits = [vision.wait_of(settings(arm("SM", 4, w), "full")) for w in WAITS]
    assert waits == ["1", "5", "10", "50", "100", "500"]
    assert [vision.period_of(settings(arm("SM", 4, w), "full")) for w in WAITS] == [
        50,
        10,
        5,
        1,
        1,
        1,
    ]
    waits = [vision.wait_of(settings(arm("SM", 4, w), "small")) for w in WAITS]
    assert waits == ["1", "1", "1", "2", "4", "20"]


def test_metrics_are_those_of_the_ledger(tmp_path):
    runs = block(arm("Ens", 64, 10), tmp_path)
    first, second, none = vision.run_block(runs)
    assert none == dict.fromkeys(study.metrics) and first.keys() == study.metrics.keys()
    course = vision.course_of(runs[0].settings, (0, 1), CPU)
    lines = course.lines["ensemble"][0]
    found = summary(lines)
    assert first["average error"] == found.average and first["final error"] == found.final
    assert first["compute"] == found.comp / 1e12 and first["memory"] == found.mem / 1e6
    assert first["early error"] == lines[0]["error"]
    assert first["relative compute"] == pytest.approx(3, rel=0.3)  # each stops by itself
    assert first != second
    assert runs[0].curve.rows()[-1]["error"] == first["final error"]
    assert runs[0].extra["parameters"] == lines[-1]["parameters"]


def test_a_single_model_of_the_ladder_saves_nothing_against_itself(tmp_path):
    for width in LADDER:
        one, *_ = vision.run_block(block(arm("SM", width, 50), tmp_path))
        assert one["gain at equal compute"] == pytest.approx(0, abs=1e-12)
        assert one["gain at equal memory"] == pytest.approx(0, abs=1e-12)
        assert one["relative compute"] == 1


def test_errors_between_two_costs():
    points = [(100.0, 0.1), (1.0, 0.5)]
    assert vision.interpolate(points, 10.0) == pytest.approx(0.3)
    assert vision.interpolate(points, 0.95) == 0.5 and vision.interpolate(points, 105.0) == 0.1
    assert vision.interpolate(points, 0.5) is None and vision.interpolate(points, 150.0) is None


def test_arms_of_a_cell_are_computed_once(tmp_path):
    courses = {
        name: vision.course_of(settings(arm(name, 4, 500)), (0, 1), CPU)
        for name in ("SM", "Ens", "gEns")
    }
    assert courses["SM"] is courses["Ens"] is courses["gEns"]
    other = vision.course_of(settings(arm("SM", 4, 1)), (0, 1), CPU)
    assert other is not courses["SM"]


def test_a_large_model_is_looked_at_after_a_tenth():
    lines = [{"error": 1 - t / 20, "parameters": 1, "steps": 1} for t in range(20)]
    flops = {"train": 1.0, "forward": 1.0, "validation": 0.0, "growth": 0.0}
    lines = [{**line, "flops": flops, "seconds": {}} for line in lines]
    small, large = (
        vision.metrics_of(lines, {"width": width, "widths": WIDTHS})["tenth or end"]
        for width in WIDTHS
    )
    assert small == lines[-1]["error"] and large == lines[1]["error"]


def test_a_pilot_says_what_every_cell_will_take():
    found = {one.cell: one for one in projection.project("mnist", "smoke", CPU)}
    cells = [f"{kind} c={c} w=1" for kind in ("mixture", "growing-moe", "firefly") for c in WIDTHS]
    cells += [f"stack c={c} w={w}" for c in WIDTHS for w in (1, 4)]
    cells += [f"stack c={c} w=1" for c in LADDER if c not in WIDTHS]
    assert sorted(found) == sorted(cells)
    assert found["stack c=4 w=1"].steps == 8  # 4 phases of 2 epochs of 1 batch
    assert all(one.seconds >= one.steps * one.milliseconds / 1000 > 0 for one in found.values())


def test_the_page_draws_the_error_against_compute_and_memory():
    def point(mean):
        return {"mean": mean, "low": mean, "high": mean}

    metrics = {name: {**vars(one)} for name, one in study.metrics.items()}
    costs = {"average error": point(0.2), "compute": point(3.0), "memory": point(0.5)}
    arms = [
        {"name": "SM", "cost": {}, "metrics": costs},
        {"name": "Ens", "cost": {}, "metrics": {"average error": point(0.1)}},
    ]
    drawn = figures.costs({"main": study.main, "metrics": metrics, "arms": arms})
    places = [(one.data[0]["x"], one.data[0]["y"]) for one in drawn]
    assert places == [([3], [0.2]), ([0.5], [0.2])]
    assert all(len(one.data) == 1 and one.layout["xaxis"]["type"] == "log" for one in drawn)
