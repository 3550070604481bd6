"""The life of one model in the demo: experts, a stream and its ledgers, a new domain, an attack."""

import pytest
import torch

from moiety.anytime import read_ledger, summary
from moiety.cli import demo
from moiety.cli.demo import attacked, life, stream, tasks
from moiety.data import digits


@pytest.fixture(scope="module")
def lived():
    return life.run(*digits(), 1, 0, torch.device("cpu"))


def test_experts_change_nothing_at_first(lived):
    dense, upcycled = lived.upcycled.rows
    assert dense["active"] < upcycled["active"] < upcycled["parameters"]
    assert 0 <= upcycled["gap"] < 1e-4


def test_every_learner_has_a_row_a_line_and_a_ledger(lived, tmp_path):
    found = lived.arrived
    assert [row["arm"] for row in found.rows] == ["at once", "wait for 5"]
    at_once, waited = found.errors.values()
    assert waited[:4] == pytest.approx([0.9] * 4) and at_once[3] < 0.9
    found.write(tmp_path)
    lines = read_ledger(tmp_path / "wait-for-5.jsonl")
    assert [line["trained"] for line in lines] == ([False] * 4 + [True]) * 2
    assert summary(lines).average == found.rows[1]["average"]


def test_the_model_of_the_stream_is_the_one_that_moves(lived):
    before, *ways = lived.adapted.rows
    assert before["old"] == pytest.approx(1 - lived.arrived.rows[0]["final"])
    assert before["distance"] == 0 and len(ways) == 3
    assert all(way["distance"] > 0 for way in ways)
    assert len({way["distance"] for way in ways}) == 3


def test_the_page_has_every_step_and_no_time(lived, monkeypatch):
    monkeypatch.setattr(attacked, "EXAMPLES", 16)
    before = {name: value.clone() for name, value in lived.model.state_dict().items()}
    part = attacked.run(lived.model, lived.test, 0)
    error = part.result["union"]["error"]
    assert error == sorted(error) and part.result["data"]["examples"] == 16
    after = lived.model.state_dict()
    assert all(torch.equal(before[name], value) for name, value in after.items())
    page = demo.page([{"arm": "dense"}], {"dense": {}}, {}, "x", tasks.Found(), lived, part)
    titles = [lived.upcycled.title, stream.TITLE, lived.adapted.title, attacked.TITLE]
    places = [page.index(f">{title}<") for title in titles]
    assert places == sorted(places) and page.count('<svg class="chart"') == 2
    assert attacked.sentence(part) in page


def test_turned_images_are_the_upright_ones_by_a_quarter():
    upright = life.upright(digits()[1])
    x = upright.tensors[0]
    assert x.shape == (450, 1, 8, 8)
    assert torch.equal(life.turned(upright).tensors[0][0, 0, 7], x[0, 0, :, 0])


def test_the_command_tells_of_tasks_and_the_life_of_the_model(moiety, lived, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "ARMS", [arm for arm in demo.ARMS if arm.name == "dense"])
    monkeypatch.setattr(tasks, "GATES", tasks.GATES[-1:])
    monkeypatch.setattr(life, "run", lambda *_: lived)
    monkeypatch.setattr(attacked, "EXAMPLES", 8)
    code, out, err = moiety("demo", "--epochs", 1, "--out", tmp_path)
    assert code == 0, err
    assert "Three tasks on the same images" in out and "dselect-k-static" in out
    assert stream.TITLE in out and "self-distilled" in out and f"{attacked.TITLE}: " in out
    assert "The ledger of each learner on the stream" in out and "the life of the model: " in out
    assert len(read_ledger(tmp_path / "stream" / "at-once.jsonl")) == stream.BATCHES
    page = (tmp_path / "index.html").read_text()
    assert lived.adapted.title in page and "Experts at work" in " ".join(page.split())


def test_who_asks_for_a_router_gets_no_life(moiety, tmp_path, monkeypatch):
    monkeypatch.setattr(life, "run", lambda *_: pytest.fail("it lived"))
    code, out, _ = moiety("demo", "--epochs", 1, "--arm", "dense", "--out", tmp_path)
    assert code == 0 and "stream" not in out.replace(str(tmp_path), "")
