"""`moiety data`: list, get, show."""

import numpy as np
import pandas
import pytest


@pytest.fixture(autouse=True)
def _nothing_here(monkeypatch, tmp_path):
    monkeypatch.delenv("MOIETY_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def people(tmp_path):
    draw = np.random.default_rng(0)
    frame = pandas.DataFrame({"age": draw.integers(18, 80, 300)})
    frame["label"] = np.where(frame["age"] + draw.normal(0, 20, 300) > 45, "old", "young")
    frame["alt"] = frame["label"].map({"old": "vieux", "young": "jeune"})
    frame.to_csv(tmp_path / "people.csv", index=False)
    return tmp_path / "people.csv"


def test_list_says_where_each_set_is_or_how_to_get_it(moiety, tmp_path):
    code, out, _ = moiety("data", "list")
    assert code == 0
    assert "digits: image, 1797 examples" in out
    assert "comes with scikit-learn" in out
    assert "get it with: moiety data get mnist" in out
    assert "take census-income.data and census-income.test from https://archive" in out
    folder = tmp_path / "mine" / "tweeteval-emotion"
    folder.mkdir(parents=True)
    for name in ("train", "val", "test"):
        for what in ("text", "labels"):
            (folder / f"{name}_{what}.txt").touch()
    (folder / "mapping.txt").touch()
    assert f"in {folder}" in moiety("data", "list", "--data-dir", tmp_path / "mine")[1]


def test_show_prints_what_was_worked_out_with_leaks(moiety, people):
    code, out, err = moiety("data", "show", people)
    assert (code, err) == (0, "")
    assert "table: 300 examples" in out
    assert "LEAK: alt gives label away: alone it gets 100.0% right" in out
    assert "left out of the inputs" in out
    kept = moiety("data", "show", people, "--keep-leaks")[1]
    assert "still among the inputs" in kept
    other = moiety("data", "show", people, "--target", "age", "--seed", 3, "--max-examples", 60)[1]
    assert "age: a number" in other
    assert "by seed 3" in other


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "PEOPLE", "--target", "lable"], "did you mean label?"),
        (["show", "nowhere.csv"], "there is no file or folder nowhere.csv"),
        (["show", "PEOPLE", "--target", "age", "--target", "lable"], "did you mean label?"),
        (["show", "mnist"], "get it with: moiety data get mnist"),
        (["get", "mnits"], "did you mean mnist?"),
        (["get", "digits"], "nothing to get"),
        (["get", "census-income"], "census-income has no download with a published checksum"),
    ],
)
def test_what_is_wrong_is_one_sentence(moiety, people, arguments, said):
    code, out, err = moiety("data", *(people if a == "PEOPLE" else a for a in arguments))
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
