"""Studies are found by name and in files, and a wrong one is explained in one sentence."""

import pytest

from moiety.lab import loading
from moiety.lab.loading import list_studies, load_study
from moiety.lab.study import Study

FILE = '''
"""First line of the file."""
from dataclasses import dataclass
from moiety.lab.study import Metric, Scale, Study

@dataclass
class Thing:
    x: "int" = 1

study = Study(
    name="mine/own", title="Mine", question="Why?", run=lambda running: {"x": Thing().x},
    arms={"a": {}}, metrics={"x": Metric("X")}, scales={"smoke": Scale(seeds=1)},
)
'''


def test_every_built_in_study_loads_under_its_name():
    titles = list_studies()
    assert {"lab/routers", "lab/optimizers"} <= titles.keys()
    for name, title in titles.items():
        assert load_study(name).title == title


def test_a_file_is_loaded(tmp_path):
    path = tmp_path / "own-study.py"
    path.write_text(FILE)
    assert load_study(str(path)).name == "mine/own"


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("lab/router", "did you mean lab/routers"),
        ("nothing", "`moiety study list` names them all"),
        ("../lab/routers", "there is no study"),
        ("nowhere.py", "there is no file nowhere.py"),
        ("nowhere.toml", "there is no file nowhere.toml"),
    ],
)
def test_a_name_that_is_wrong(reference, said):
    with pytest.raises(ValueError, match=said) as caught:
        load_study(reference)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 1\ny = x +", r"line 2: SyntaxError"),
        ("import torch\n\n1 / 0", r"line 3: ZeroDivisionError"),
        ("import no_such_module", r"line 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1", "holds no study; give it a value `study = Study"),
        ("study = 1", "holds no study"),
        (FILE.replace('{"a": {}}', "{}"), "at least one arm"),
    ],
)
def test_a_file_that_is_wrong(tmp_path, code, said):
    path = tmp_path / "study.py"
    path.write_text(code)
    with pytest.raises(ValueError, match=said) as caught:
        load_study(str(path))
    assert "\n" not in str(caught.value)


def test_the_list_reads_titles_without_running_files(tmp_path, monkeypatch):
    folder = tmp_path / "a_room"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "first_one.py").write_text(f"raise SystemExit\n{FILE}")
    (folder / "second.py").write_text('"""Told here.\n\nMore."""\nstudy = make()')
    (folder / "typed.py").write_text("study: Study = Study(title='Typed')")
    (folder / "helper.py").write_text("x = 1")
    monkeypatch.setattr(loading, "BUILT_IN", tmp_path)
    assert list_studies() == {
        "a-room/first-one": "Mine",
        "a-room/second": "Told here.",
        "a-room/typed": "Typed",
    }


def test_a_study_that_names_what_it_has_not_is_refused():
    study = load_study("lab/routers")
    with pytest.raises(ValueError, match="has no scale 'tiny'"):
        study.scale("tiny")
    assert isinstance(study, Study)
