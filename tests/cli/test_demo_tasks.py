"""The multi-task step of the demo: three gates side by side, and the picture of the tasks."""

import re

import pytest
import torch

from moiety.cli import demo
from moiety.cli.demo import tasks
from moiety.data import digits
from moiety.report import Column, TaskPart, routing_page

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def found():
    return tasks.run(tasks.GATES, *digits(), 2, 0, CPU)


def test_labels_by_hand():
    made = tasks.questions(torch.tensor([0, 4, 5, 9]))
    assert made["odd"].tolist() == [0, 0, 1, 1]
    assert made["5 or more"].tolist() == [0, 0, 1, 1]
    assert made["digit"].tolist() == [0, 4, 5, 9]


def test_gates_are_trained_and_differ_in_what_they_select(found):
    rows = {row["arm"]: row for row in found.rows}
    assert list(rows) == ["softmax", "top-k-static", "dselect-k-static"]
    for row in rows.values():
        # far above guessing; how far is a matter of which experts a static gate drew
        assert row["digit"] > 0.7 and min(row["odd"], row["5 or more"]) > 0.7
        assert row["selected"] <= row["work"] <= tasks.EXPERTS
    assert rows["softmax"]["work"] == tasks.EXPERTS
    assert rows["top-k-static"]["selected"] == tasks.K
    for sparse in ("top-k-static", "dselect-k-static"):  # what no task selects is not computed
        assert rows[sparse]["work"] < tasks.EXPERTS
        assert rows[sparse]["kflops"] < rows["softmax"]["kflops"]
    gates = found.gates["dselect-k-static"]
    assert all(gate["binary"] == 1.0 and gate["selected"] <= tasks.K for gate in gates.values())
    assert all(0 < gate["binary_step"] < 84 for gate in gates.values())
    assert all(gate["binary"] is None for gate in found.gates["softmax"].values())


def test_a_seed_repeats_itself(found):
    one = [("top-k-static", {"k": 2})]
    again, other = (tasks.run(one, *digits(), 2, seed, CPU) for seed in (0, 1))
    assert again.gates["top-k-static"] == found.gates["top-k-static"]
    assert other.gates["top-k-static"] != found.gates["top-k-static"]


def test_the_page_has_gates_and_the_picture(found):
    page = demo.page([{"arm": "dense"}], {"dense": {}}, {}, "moiety demo", found)
    assert "Several tasks, a gate for each" in page
    assert len(re.findall(r'class="bars', page)) == 3 * 3
    table = page.split('class="loads likeness"')
    assert len(table) == 1 + 3
    for part, (_, alike) in zip(table[1:], found.similarity.items(), strict=True):
        numbers = re.findall(r'<td class="shade-\d">([^<]+)</td>', part.split("</table>")[0])
        assert numbers == [f"{value:.2f}" for row in alike["values"] for value in row]


def test_without_tasks_the_page_is_as_before():
    bare = demo.page([{"arm": "dense"}], {"dense": {}}, {}, "moiety demo", tasks.Found())
    assert "likeness" not in bare.split("</style>")[1] and 'id="tasks"' not in bare


def test_names_are_escaped():
    gate = {"selected": 1.0, "binary": None, "binary_step": None, "weights": [1.0, 0.0]}
    part = TaskPart(
        title="<b>",
        summary="<b>",
        rows=[{"arm": "<b>"}],
        columns=[Column("arm", "<b>")],
        gates={"<b>": {"<b>": gate}},
        similarity={"<b>": {"tasks": ["<b>"], "values": [[1.0]]}},
        notes={"<b>": "<b>"},
    )
    about = {"title": "T", "summary": "", "rows": [], "columns": [], "loads": {}}
    page = routing_page(**about, settings={}, command="", tasks=part)
    assert "<b>" not in page and "&lt;b&gt;" in page


def test_who_asks_for_a_router_gets_no_tasks(moiety, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "_run_one", lambda *_: pytest.fail("it trained"))
    code, out, _ = moiety("demo", "--epochs", "1", "--arm", "dense", "--out", tmp_path)
    assert code == 0 and "Three tasks" not in out
