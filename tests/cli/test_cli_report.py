"""`moiety report`: the page again from result.json, and mistakes in one sentence."""

import json
import shutil
from pathlib import Path

import audited
import studied


def test_the_page_is_made_again_and_is_the_same(moiety, tmp_path):
    (tmp_path / "result.json").write_text(json.dumps(studied.result()))
    code, out, _ = moiety("report", tmp_path)
    assert code == 0
    assert str(tmp_path / "report.html") in out.replace("\n", "")
    first = (tmp_path / "report.html").read_text()
    assert studied.RESULT["title"] in first
    assert moiety("report", tmp_path, "--out", tmp_path / "b.html")[0] == 0
    assert (tmp_path / "b.html").read_text() == first


def test_a_folder_without_result_says_what_is_missing(moiety, tmp_path):
    code, _, err = moiety("report", tmp_path)
    assert code == 2
    assert "holds no result.json" in err
    assert "moiety study run" in err and "moiety adapt --method compare" in err
    assert err.count("\n") == 1


def test_a_folder_that_is_not_there_is_said(moiety, tmp_path):
    code, _, err = moiety("report", tmp_path / "nowhere")
    assert (code, err.count("\n")) == (2, 1) and "there is no file or folder" in err


def test_a_page_cannot_take_the_place_of_a_folder(moiety, tmp_path):
    code, _, err = moiety("report", tmp_path, "--out", tmp_path)
    assert code == 2 and f"{tmp_path} is a folder" in err and err.count("\n") == 1


def test_a_damaged_result_is_named_and_the_old_page_stays(moiety, tmp_path):
    (tmp_path / "report.html").write_text("old")
    (tmp_path / "result.json").write_text('{"schema": 1')
    code, _, err = moiety("report", tmp_path)
    assert code == 2 and "result.json is not readable JSON" in err
    (tmp_path / "result.json").write_text('{"schema": 2}')
    code, _, err = moiety("report", tmp_path)
    assert code == 2 and "schema 1" in err
    assert (tmp_path / "report.html").read_text() == "old"


def test_the_page_of_an_audit_from_its_folder_or_its_file(moiety, tmp_path):
    (tmp_path / "audit.json").write_text(json.dumps(audited.result()))
    for given in (tmp_path, tmp_path / "audit.json"):
        code, out, err = moiety("report", given)
        assert code == 0, err
        assert str(tmp_path / "audit.html") in out.replace("\n", "")
        assert "Audit of vit" in (tmp_path / "audit.html").read_text()
        (tmp_path / "audit.html").unlink()
    assert moiety("report", tmp_path, "--out", tmp_path / "b.html")[0] == 0
    assert "Audit of vit" in (tmp_path / "b.html").read_text()


def test_a_damaged_audit_is_named_and_the_old_page_stays(moiety, tmp_path):
    (tmp_path / "audit.html").write_text("old")
    (tmp_path / "audit.json").write_text(json.dumps(audited.result(clean={"error": 2})))
    code, _, err = moiety("report", tmp_path)
    assert code == 2 and "audit['clean']['error'] must be a number from 0 to 1" in err
    assert err.count("\n") == 1 and (tmp_path / "audit.html").read_text() == "old"


def test_the_page_of_a_result_file(moiety, tmp_path):
    result = Path(__file__).parents[2] / "results" / "lab-routers.json"
    copied = shutil.copy(result, tmp_path)
    assert moiety("report", copied)[0] == 0
    assert "Routers" in (tmp_path / "lab-routers.html").read_text()
