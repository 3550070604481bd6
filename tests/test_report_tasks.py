"""Gates and similarity of tasks on the page: every number there, for two tasks as for 128."""

import re

import pytest

import studied
from moiety.report import study_page
from moiety.report.lines import trajectories
from moiety.report.tasks import LIKENESS, SHOWN, TABLED, gate_tables, likeness, similarity


def square(count):
    names = [f"task {i}" for i in range(count)]
    rows = [
        [1.0 if i == j else abs(i - j) / (2 * count) for j in range(count)] for i in range(count)
    ]
    return {"tasks": names, "values": rows}


@pytest.mark.parametrize("count", [2, 8, TABLED, TABLED + 1, 128])
def test_a_picture_of_any_number_of_tasks(count):
    (figure,) = similarity({"similarity": {"arm": square(count)}})
    (trace,) = figure.data
    assert len(trace["z"]) == count and all(len(row) == count for row in trace["z"])
    assert trace["z"][0][0] == len(LIKENESS) - 1
    assert trace["text"][1][0] == f"{1 / (2 * count):.2f}"
    assert len(figure.layout["xaxis"]["ticktext"]) <= TABLED
    assert len(figure.rows) == count and (figure.matrix is None) == (count > TABLED)
    assert bool(figure.layout["annotations"]) == (count <= 8)


def test_the_nearest_tasks_by_hand():
    values = [[1.0, 0.2, 0.9], [0.2, 1.0, 0.4], [0.9, 0.4, 1.0]]
    (figure,) = similarity({"similarity": {"arm": {"tasks": ["a", "b", "c"], "values": values}}})
    assert figure.rows[0] == ["a", "c 0.90, b 0.20", "0.55"]
    assert figure.rows[1] == ["b", "c 0.40, a 0.20", "0.30"]


def test_shades_follow_their_bounds():
    assert [likeness(v) for v in (-0.2, 0.0, 0.1, 0.39, 0.4, 0.94, 0.95, 1.0)] == [
        0, 0, 1, 2, 3, 5, 6, 6,
    ]  # fmt: skip


def test_long_names_keep_both_ends():
    found = square(2) | {"tasks": ["accuracy of the first", "accuracy of the second"]}
    (figure,) = similarity({"similarity": {"arm": found}})
    assert figure.layout["yaxis"]["ticktext"] == ["accuracy…e first", "accuracy… second"]
    assert figure.matrix["tasks"] == found["tasks"]


def test_gates_by_hand():
    dense, sparse = gate_tables(studied.RESULT["gates"])
    assert not dense["binary"] and dense["summary"] == "8.0 experts a task."
    assert sparse["summary"] == (
        "2.5 experts a task; 80% of the gates binary, from step 320 on average."
    )
    first, second = sparse["rows"]
    assert (first["selected"], first["binary"], first["step"]) == ("2.0", "100%", "320")
    assert (second["selected"], second["binary"], second["step"]) == ("3.0", "60%", "–")
    assert [bar["height"] for bar in first["bars"]] == [100, 100, 0, 0, 0, 0, 0, 0]
    assert second["bars"][0]["height"] == 67  # one scale for all tasks of an arm
    assert first["spoken"] == "expert 0: 0.500, expert 1: 0.500"


def test_many_gates_are_counted_not_shown():
    gate = studied.RESULT["gates"]["dselect-k"]["digit"]
    (table,) = gate_tables({"arm": {f"task {i}": gate for i in range(40)}})
    assert len(table["rows"]) == SHOWN and table["hidden"] == 40 - SHOWN
    (bare,) = gate_tables({"arm": {"a": gate | {"weights": []}}})
    assert bare["rows"][0]["bars"] == []


def test_the_page_has_both_and_one_without_has_neither(monkeypatch):
    monkeypatch.setattr("moiety.report.study.plotly_script", lambda: "")
    page = study_page(studied.result())
    assert '<h2 id="tasks">' in page and '<h2 id="similarity">' in page
    assert 'href="#tasks"' in page and 'href="#similarity"' in page
    assert '<span class="unseen">expert 0: 0.500, expert 1: 0.500</span>' in page
    assert re.search(r'<td class="shade-0">0\.07</td>', page)  # in the table, not only in a plot
    none = study_page(studied.smallest())
    assert 'id="tasks"' not in none and 'id="similarity"' not in none


def test_names_of_tasks_are_escaped(monkeypatch):
    monkeypatch.setattr("moiety.report.study.plotly_script", lambda: "")
    gates = {"<b>": {"<i>x": studied.RESULT["gates"]["softmax"]["digit"]}}
    page = study_page(
        studied.result(gates=gates, similarity={"<b>": square(2) | {"tasks": ["<i>x", "&"]}})
    )
    assert "<i>x" not in page and "&lt;i&gt;x" in page
    (figure,) = similarity({"similarity": {"<b>": square(2) | {"tasks": ["<i>x", "&"]}}})
    assert figure.layout["xaxis"]["ticktext"] == ["&lt;i&gt;x", "&amp;"]  # plotly reads tags


def test_trajectories_of_several_arms_are_told_apart():
    gate = studied.RESULT["trajectories"]["dselect-k"]["gate of task 1"]
    found = trajectories({"trajectories": {arm: {"digit": gate} for arm in ("one", "two")}})
    assert [figure.title for figure in found] == ["one: digit", "two: digit"]
    assert found[0].height > 340  # a legend of eight experts takes its part
