"""`moiety compare gates`: on a table of each form, again, and what it says of wrong ones."""

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from moiety.io import read_json
from moiety.lab.compare import study as study_file

TWO = ["--arms", "dselect-k-static", "--seeds", "2", "--workers", "1", "--budget", "5s"]
TARGETS = ["--targets", "income,single,hours:number"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(study_file, "TIMED", 0.05)  # these machines need no long calibration


@pytest.fixture
def frame():
    """People with an income, working hours, whether they are single, and what gives that away."""
    draw, rows = np.random.default_rng(0), 300
    single, age = draw.random(rows) < 0.4, draw.integers(18, 80, rows)
    return pd.DataFrame(
        {
            "age": age,
            "job": draw.choice(["clerk", "cook", "judge"], rows),
            "status": np.where(single, "never married", draw.choice(["married", "widowed"], rows)),
            "single": np.where(single, "yes", "no"),
            "hours": np.round(20 + age / 4 + draw.normal(size=rows), 2),
            "income": np.where(age + draw.integers(0, 20, rows) > 50, "high", "low"),
        }
    )


@pytest.fixture
def table(frame, tmp_path):
    frame.to_csv(tmp_path / "people.csv", index=False)
    return tmp_path / "people.csv"


def test_one_command_from_a_table_to_a_page(moiety, table, tmp_path):
    words = ["compare", "gates", "--data", table, *TARGETS, *TWO, "--out", tmp_path / "out"]
    code, out, _ = moiety(*words)
    flat = " ".join(out.split())
    assert code == 0, out
    for said in ("categories: job", "numbers: age", "income: 2 classes", "hours: a number"):
        assert said in flat
    assert "Suspected leak: status gives single away" in flat
    assert all(f" {about}: " in flat for about in ("Best", "How sure", "Cost"))
    assert "shared-bottom" in flat and "minus" in flat
    result = read_json(tmp_path / "out" / "result.json")
    assert [arm["name"] for arm in result["arms"]] == ["shared-bottom", "dselect-k-static"]
    assert result["study"] == "compare/people-csv-gates" and result["main"] == "score"
    assert {"accuracy of income", "auc of single", "r2 of hours", "rmse of hours"} <= set(
        result["metrics"]
    )
    assert list(result["gates"]) == list(result["similarity"]) == ["dselect-k-static"]
    assert list(result["gates"]["dselect-k-static"]) == ["income", "single", "hours"]
    assert result["trajectories"]["dselect-k-static"]
    assert [claim["b"] for claim in result["claims"]] == ["shared-bottom"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert '<h2 id="tasks">' in page and '<h2 id="similarity">' in page

    # The same again: nothing is left to do, and the answer is the same.
    code, again, _ = moiety(*words)
    assert code == 0 and again.splitlines()[-2:] == out.splitlines()[-2:]
    assert read_json(tmp_path / "out" / "result.json")["trials_sha256"] == result["trials_sha256"]

    # Another arm joins the run that is there.
    more = ["--arms", "dselect-k-static,softmax"]
    code, _, _ = moiety(*words, *more)
    assert code == 0
    names = [arm["name"] for arm in read_json(tmp_path / "out" / "result.json")["arms"]]
    assert names == ["shared-bottom", "dselect-k-static", "softmax"]

    # The file that was written runs as a study of its own; routers do not belong here.
    code, _, _ = moiety(
        "study", "run", tmp_path / "out" / "study.toml", "--scale", "smoke", "--out", tmp_path / "s"
    )
    assert code == 0 and (tmp_path / "s" / "result.json").exists()
    code, _, error = moiety(
        "compare", "routers", "--data", table, "--target", "income", "--out", tmp_path / "out"
    )
    assert code == 2 and "holds a comparison of gates, not of routers" in error


def test_rows_with_some_target_missing_are_kept(moiety, frame, tmp_path):
    frame.loc[:29, "income"] = None
    frame.loc[20:49, ["single", "hours"]] = None  # 20 to 29 have no target at all
    frame.to_csv(tmp_path / "gaps.csv", index=False)
    words = [*TARGETS, *TWO, "--out", tmp_path / "out"]
    code, out, _ = moiety("compare", "gates", "--data", tmp_path / "gaps.csv", *words)
    assert code == 0, out
    assert "10 rows without any target were left out" in out and "table: 290 examples" in out
    assert "income in 20, single in 20, hours in 20 of 290 rows" in out
    result = read_json(tmp_path / "out" / "result.json")
    assert not result["failures"] and result["arms"][1]["metrics"]["score"]["n"] == 2


@pytest.mark.parametrize("form", ["tsv", "jsonl", "parquet"])
def test_other_forms_of_table_in_a_dry_run(moiety, frame, tmp_path, form):
    path = tmp_path / f"people.{form}"
    if form == "parquet":
        frame.to_parquet(path)
    elif form == "tsv":
        frame.to_csv(path, sep="\t", index=False)
    else:
        frame.to_json(path, orient="records", lines=True)
    code, out, _ = moiety("compare", "gates", "--data", path, *TARGETS, *TWO, "--dry-run")
    assert code == 0, out
    assert "dselect-k-static" in out and "Nothing was written" in out
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_all_arms_are_in_a_dry_run(moiety, table):
    code, out, _ = moiety("compare", "gates", "--data", table, *TARGETS, "--dry-run")
    assert code == 0
    for arm in ("shared-bottom", "softmax", "top-k-static", "dselect-k", "ple", "single-task"):
        assert arm in out


@pytest.fixture
def images(tmp_path):
    for name in ("dark", "bright"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8), "uint8")).save(tmp_path / f"pictures/{name}/1.png")
    return tmp_path / "pictures"


@pytest.fixture
def texts(tmp_path):
    frame = pd.DataFrame({"text": [f"a long film, number {i}" for i in range(40)]})
    frame = frame.assign(label=["good", "bad"] * 20, long=["yes", "no", "no", "yes"] * 10)
    frame.to_json(tmp_path / "reviews.jsonl", orient="records", lines=True)
    return tmp_path / "reviews.jsonl"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "TABLE", "--targets", "income"], "at least two targets"),
        (["--data", "TABLE", "--targets", "income,income"], "at least two targets"),
        (["--data", "TABLE", "--targets", "income,singel"], "did you mean single"),
        (["--data", "TABLE"], "say which column to predict"),
        (["--data", "nowhere.csv", *TARGETS], "there is no file or folder"),
        (["--data", "digits", *TARGETS], "digits is image data, and gates are compared on tables"),
        (["--data", "IMAGES", *TARGETS], "pictures is image data"),
        (["--data", "TEXTS", "--targets", "label,long"], "text data"),
        (["--data", "tweeteval-emotion", *TARGETS], "text data"),
        (["--data", "TABLE", *TARGETS, "--arms", "sofmax"], "did you mean softmax"),
        (["--data", "TABLE", *TARGETS, "--k", "9"], "only 8 experts"),
        (["--data", "TABLE", *TARGETS, "--budget", "soon"], "90s, 5m or 1h30m"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(moiety, words, said, table, images, texts, tmp_path):
    known = {"TABLE": table, "IMAGES": images, "TEXTS": texts}
    given = [str(known.get(word, word)) for word in words]
    code, _, error = moiety("compare", "gates", *given, "--out", tmp_path / "out")
    assert code == 2 and said in error
    assert len(error.strip().splitlines()) == 1 and error.startswith("moiety: ")
    assert not (tmp_path / "out").exists()
