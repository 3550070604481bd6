"""The stream of the demo: sums, a picture, and a ledger for each learner."""

import pytest
import torch

from moiety.anytime import read_ledger, summary
from moiety.cli import demo
from moiety.cli.demo import attacked, stream, tasks
from moiety.data import digits

TWO = [stream.LEARNERS[0], stream.LEARNERS[1]]


@pytest.fixture(scope="module")
def found():
    return stream.run(TWO, *digits(), 1, 0, torch.device("cpu"))


def test_every_learner_has_a_row_a_line_and_a_ledger(found, tmp_path):
    assert [row["arm"] for row in found.rows] == ["at once", "wait for 5"]
    at_once, waited = found.errors.values()
    assert waited[:4] == pytest.approx([0.9] * 4) and at_once[3] < 0.8
    found.write(tmp_path)
    lines = read_ledger(tmp_path / "wait-for-5.jsonl")
    assert [line["trained"] for line in lines] == ([False] * 4 + [True]) * 2
    assert summary(lines).average == found.rows[1]["average"]


def test_the_page_shows_it(found):
    part = found.part()
    page = demo.page([{"arm": "dense"}], {"dense": {}}, {}, "x", tasks.Found(), arrived=part)
    assert stream.TITLE in page and page.count('<svg class="chart"') == 1
    assert "wait for 5" in page
    again = stream.run(TWO, *digits(), 1, 0, torch.device("cpu"))
    assert again.part().view() == part.view()  # no time is on the page


def test_the_command_says_where_the_ledgers_are(moiety, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "ARMS", [arm for arm in demo.ARMS if arm.name == "dense"])
    monkeypatch.setattr(tasks, "GATES", [])
    monkeypatch.setattr(stream, "LEARNERS", TWO[:1])
    monkeypatch.setattr(attacked, "ARM", "none")
    code, out, err = moiety("demo", "--epochs", 1, "--out", tmp_path)
    assert code == 0, err
    assert stream.TITLE in out and "at once" in out
    assert "The ledger of each learner on the stream" in out and ", the stream: " in out
    assert len(read_ledger(tmp_path / "stream" / "at-once.jsonl")) == stream.BATCHES


def test_who_asks_for_a_router_gets_no_stream(moiety, tmp_path):
    code, out, _ = moiety("demo", "--epochs", 1, "--arm", "dense", "--out", tmp_path)
    assert code == 0 and "stream" not in out.replace(str(tmp_path), "")
