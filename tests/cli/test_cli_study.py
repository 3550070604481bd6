"""`moiety study`: lists, runs, shows, and says what is wrong in one sentence."""

import os
from pathlib import Path

import pytest

from moiety import io
from moiety.lab.loading import list_studies

TOY = Path(__file__).parents[1] / "lab" / "toy.py"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


def test_the_list_has_one_study_a_line_name_first(moiety):
    code, out, _ = moiety("study", "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(list_studies())
    assert "Routers on handwritten digits" in out


def test_a_run_from_nothing_to_its_verdicts(moiety):
    code, out, err = moiety("study", "run", TOY, "--scale", "smoke", "--seeds", 2)
    assert (code, err) == (0, "")
    folder = Path("runs/tests--toy/smoke")
    assert (folder / "report.html").exists() and (folder / "result.json").exists()
    assert "4/4 wide, seed 1: Error" in out
    assert "wide > narrow (error, δ 0.2)" in out
    assert len(list((folder / "trials").iterdir())) == 4
    code, out, _ = moiety("study", "show", TOY)
    assert code == 0
    assert "2/2" in out and "All trials are done." in out and "wide > narrow" in out
    assert f"Command: moiety study run {TOY} --scale smoke" in out


def test_metrics_are_shown_once_they_are_known_and_as_many_as_fit(moiety, tmp_path, monkeypatch):
    text = (
        TOY.read_text()
        .replace(
            'metrics={"error": Metric("Error", better="lower")}',
            'metrics={"error": Metric("Error", better="lower"), "size": Metric("Size")}',
        )
        .replace('return {"error":', 'return {"size": 3.0, "error":')
    )
    study = tmp_path / "two.py"
    study.write_text(text)
    words = ("study", "run", study, "--scale", "smoke", "--seeds", 2, "--out", "out")
    _, out, _ = moiety(*words, "--dry-run")
    assert "Error" not in out and "Size" not in out
    assert moiety(*words)[0] == 0
    _, out, _ = moiety("study", "show", "out")
    assert "Size" in out and "metrics fit" not in out
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = moiety("study", "show", "out")
    assert "Size" not in out
    assert "1 of 2 metrics fit; all are on the page." in out


def test_a_dry_run_shows_what_is_done_and_writes_nothing(moiety):
    words = ("study", "run", TOY, "--scale", "smoke", "--dry-run")
    code, out, _ = moiety(*words)
    assert code == 0 and os.listdir() == []
    assert "narrow" in out and "0/3" in out and "6 trials to run: time not known" in out
    code, out, _ = moiety(*words, "--budget", "10s", "--equal", "examples")
    assert "examples=" in out and "6 trials to run: about 8." in out
    assert os.listdir() == []
    moiety(*words[:-1], "--seeds", 2)
    stored = io.read_json("runs/tests--toy/smoke/plan.json")
    code, out, _ = moiety(*words, "--seeds", 4)
    assert "2/4" in out and "4 trials to run: about" in out
    assert io.read_json("runs/tests--toy/smoke/plan.json") == stored


def test_show_works_while_a_run_is_going_on(moiety):
    moiety("study", "run", TOY, "--scale", "smoke", "--seeds", 2, "--out", "here")
    next(Path("here/trials").glob("wide-s1-*")).unlink()
    with io.lease("here"):
        code, out, _ = moiety("study", "show", "here")
    assert code == 0
    assert "1/2" in out and "1 trials to run" in out
    assert "Verdicts of before, without the trials to run:" in out


def test_show_of_a_study_without_runs_says_what_it_asks(moiety):
    code, out, _ = moiety("study", "show", "lab/routers")
    assert code == 0
    assert "Not run yet: moiety study run lab/routers" in out
    assert "claim: top-k greater dense, margin 0.01" in out


def test_failed_trials_are_exit_code_1(moiety):
    text = TOY.read_text().replace(
        "    return {", "    1 / (running.seed - 1)\n        return {", 1
    )
    assert "running.seed - 1" in text
    Path("bad.py").write_text(text)
    code, out, err = moiety("study", "run", "bad.py", "--scale", "smoke")
    assert code == 1 and err == ""
    assert "2 trials failed (of narrow, wide); their tracebacks are in" in out
    assert "failed: ZeroDivisionError" in out
    code, out, _ = moiety("study", "show", "bad.py")
    assert code == 0 and "2/3" in out and "The tracebacks of failed trials are in runs" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "nothing"], "there is no study 'nothing'"),
        (["run", TOY, "--scale", "huge"], "has no scale 'huge'; it has smoke, small, full"),
        (["run", TOY, "--arm", "deep"], "has no arm 'deep'; it has narrow, wide"),
        (["run", TOY, "--seeds", "0"], "the number of seeds must be at least 1, not 0"),
        (["run", TOY, "--seeds", "x"], "--seeds"),
        (["run", TOY, "--workers", "0"], "--workers"),
        (["run", TOY, "--device", "quantum"], "there is no device 'quantum' here"),
        (["run", TOY, "--budget", "10"], "a time is written like 90s, 5m or 1h30m, not '10'"),
        (["run", TOY, "--budget", "1m", "--equal", "steps"], "flops, examples, time, not 'steps'"),
        (["run", TOY, "--equal", "time"], "made equal in time by a time budget: give one too"),
        (["run", TOY, "--ray", "auto", "--workers", "2"], "local workers or a Ray cluster"),
        (["run", TOY, "--budget", "10ms"], "a time is written like"),
        (["run", TOY, "--budget", "0.01s"], "leave no time to train"),
        (["run", TOY, "--pilot", "1"], "a pilot needs at least 2 seeds, not 1"),
        (["run", TOY, "--pilot", "3", "--seeds", "3"], "not both"),
        (["run", TOY, "--ray", "127.0.0.1:9", "--scale", "smoke"], "Ray"),
        (["run", TOY, "--ray", "127.0.0.1:9", "--device", "cuda"], "Ray"),  # it is not needed here
        (["run", TOY, "--ray", "auto", "--device", "quantum"], "on cpu or cuda, not 'quantum'"),
        (["show", "nothing"], "there is no study 'nothing'"),
        (["show", "."], ". is not the folder of a run: it holds no study.json"),
        (["sing"], "sing"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(moiety, words, said):
    code, _, err = moiety("study", *words)
    assert code == 2
    assert err.startswith("moiety: ") and said in err and err.count("\n") == 1


def test_a_folder_in_use_is_told(moiety):
    with io.lease("here"):
        code, _, err = moiety("study", "run", TOY, "--out", "here", "--wait", "0.1")
    assert code == 2
    assert f"here is in use by process {os.getpid()}" in err and err.count("\n") == 1


def test_the_ledger_is_printed_and_written(moiety):
    code, out, err = moiety("study", "claims")
    assert code == 0 and "lab/routers 1" in out and "not run" in out and "adapt/text 1" in out
    assert err.startswith("moiety: there is no folder results, so no claim counts as run; --res")
    code, some, _ = moiety("study", "claims", "adapt/text", "lab")
    assert "lab/routers 1" in some and "adapt/text 1" in some and "adapt/images" not in some
    code, _, err = moiety("study", "claims", "adapt/tex")
    assert code == 2 and "adapt/tex is no study, nor a group, that has claims" in err
    code, _, err = moiety("study", "claims", "adapt/text", "--out", "some.md")
    assert code == 2 and "--out writes the claims of all studies: leave the names out" in err
    code, said, _ = moiety("study", "claims", "--write", "docs/claims.md")
    assert code == 0 and said == "The ledger: docs/claims.md\n"
    assert Path("docs/claims.md").read_text().startswith("# Claims")


def test_a_study_that_was_measured_elsewhere_tells_its_verdicts(moiety):
    committed = Path(__file__).parents[2] / "results" / "adapt-weight.json"
    Path("results").mkdir()
    Path("results", committed.name).write_bytes(committed.read_bytes())
    code, out, _ = moiety("study", "show", "adapt/weight")
    assert code == 0 and "Measured: results/adapt-weight.json" in out
    assert out.count("adapt/weight") > 3 and "undecided" in out and "(−" in out


SEARCH = """    search=Search(space={"rate": Choice([1, 2])}, trials=2, metric="error",
                  rule=lambda record: "too wide" if record["arm"] == "wide" else None),
    paper="A paper",
"""


def test_what_a_search_left_out_and_who_corrects_over_a_paper_is_told(moiety):
    text = TOY.read_text().replace("    speed=lambda", f"{SEARCH}    speed=lambda")
    text = text.replace('better="lower"', 'better="lower", split="validation"')
    Path("toy.py").write_text("from moiety.lab.tuning import Choice, Search\n" + text)
    lost = "wide is not measured: no setting of wide is left of 2 (2 × too wide)"
    for words in (["run", "toy.py", "--scale", "smoke", "--seeds", 2], ["show", "toy.py"]):
        code, out, err = moiety("study", *words)
        assert (code, err) == (0, "")
        assert out.count(lost) == 1
        assert "wide > narrow" in out and "undecided" in out
        assert "corrected over all of its claims: moiety study claims" in out


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("result.json", '"word": "undecided"', '"word": "holds"', "and follows as 'undecided'"),
        ("result.json", '"schema": 1', '"schema": 2', "a result has schema 1, got 2"),
        ("study.json", '"name"', '"nom"', "is not as a run wrote it (study.json has other names"),
        ("plan.json", "{", "[] and {", "is not readable JSON"),
        ("looks.json", '"look": 1', '"look": 0', "is not as a run wrote it (looks.json[0].look"),
    ],
)
def test_a_file_that_was_edited_is_told(moiety, file, old, new, said):
    moiety("study", "run", TOY, "--scale", "smoke", "--seeds", 2, "--out", "here")
    path = Path("here", file)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    code, _, err = moiety("study", "show", "here")
    assert code == 2 and err.count("\n") == 1
    assert str(path) in err and said in err


@pytest.mark.parametrize("verb", ["compare", "data", "study"])
def test_a_verb_with_verbs_of_its_own_shows_its_help(moiety, verb):
    _, out, err = moiety(verb)
    assert f"moiety {verb}" in out + err and "moiety: \n" not in err and "Missing" not in err
