"""`moiety compare routers`: one command on each kind of data, and what it says of wrong ones."""

import json

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from moiety.io import read_json
from moiety.lab.compare import study as study_file

TWO = ["--router", "top-k", "--seeds", "2", "--workers", "1", "--budget", "5s"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(study_file, "TIMED", 0.05)  # these machines need no long calibration


@pytest.fixture
def images(tmp_path):
    """Dark and bright pictures in two folders."""
    draw = np.random.default_rng(0)
    for name, level in (("dark", 40), ("bright", 200)):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for i in range(40):
            pixels = draw.integers(0, 50, (8, 8)) + level
            Image.fromarray(pixels.astype("uint8")).save(tmp_path / f"pictures/{name}/{i}.png")
    return tmp_path / "pictures"


@pytest.fixture
def table(tmp_path):
    """People with an income, whether they are single, and a column that gives that away."""
    draw, rows = np.random.default_rng(0), 240
    single = draw.random(rows) < 0.4
    age = draw.integers(18, 80, rows)
    frame = pd.DataFrame(
        {
            "age": age,
            "job": draw.choice(["clerk", "cook", "judge"], rows),
            "status": np.where(single, "never married", draw.choice(["married", "widowed"], rows)),
            "single": np.where(single, "yes", "no"),
            "income": np.where(age + draw.integers(0, 20, rows) > 50, "high", "low"),
        }
    )
    frame.to_csv(tmp_path / "people.csv", index=False)
    return tmp_path / "people.csv"


@pytest.fixture
def texts(tmp_path):
    """Short reviews, a JSON object a line."""
    words = {"good": ["fine", "great", "lovely"], "bad": ["poor", "awful", "sad"]}
    lines = [
        json.dumps({"text": f"a {word} film number {i}", "label": label})
        for i in range(40)
        for label, own in words.items()
        for word in own
    ]
    (tmp_path / "reviews.jsonl").write_text("\n".join(lines))
    return tmp_path / "reviews.jsonl"


def check(code, out, folder, main="accuracy"):
    assert code == 0, out
    result = read_json(folder / "result.json")
    assert [arm["name"] for arm in result["arms"]] == ["dense", "top-k"]
    assert not result["failures"] and result["main"] == main
    assert all(arm["examples"] and arm["cost"]["memory"] for arm in result["arms"])
    assert result["command"].startswith("moiety compare routers --data")
    flat = " ".join(out.split())
    assert all(f" {about}: " in flat for about in ("Best", "How sure", "Cost"))
    assert str(folder / "report.html") in out.replace("\n", "")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<dt>How sure</dt>" in page and "learning rate" in page
    return result, flat


def test_a_built_in_name(moiety, tmp_path):
    folder = tmp_path / "out"
    code, out, _ = moiety(
        "compare", "routers", "--data", "digits", *TWO, "--max-examples", 300, "--out", folder
    )
    result, flat = check(code, out, folder)
    assert "10 classes" in flat
    one, other = (arm["cost"]["flops"] for arm in result["arms"])
    assert other == pytest.approx(one, rel=0.05)  # equal active FLOPs
    text = (folder / "study.toml").read_text()
    assert 'data = "digits"' in text and "moiety study run" in text

    # The same again: nothing is left to do, and the answer is the same.
    again = moiety(
        "compare", "routers", "--data", "digits", *TWO, "--max-examples", 300, "--out", folder
    )
    assert again[0] == 0 and again[1].splitlines()[-2:] == out.splitlines()[-2:]
    assert read_json(folder / "result.json")["trials_sha256"] == result["trials_sha256"]

    # The file that was written runs as a study of its own.
    code, out, _ = moiety(
        "study", "run", folder / "study.toml", "--scale", "smoke", "--out", tmp_path / "smoke"
    )
    assert code == 0 and (tmp_path / "smoke" / "result.json").exists()

    # Other settings do not belong into this folder.
    code, _, error = moiety(
        "compare", "routers", "--data", "digits", *TWO, "--lr", "0.1", "--out", folder
    )
    assert code == 2 and "--out" in error and "\n" not in error.strip()


def test_a_folder_of_images(moiety, images, tmp_path):
    code, out, _ = moiety("compare", "routers", "--data", images, *TWO, "--out", tmp_path / "out")
    result, _ = check(code, out, tmp_path / "out")
    assert result["arms"][0]["metrics"]["accuracy"]["mean"] > 0.8


def test_a_table_with_two_targets_and_a_leak(moiety, table, tmp_path):
    words = ["--target", "income,single", "--out", tmp_path / "out"]
    code, out, _ = moiety("compare", "routers", "--data", table, *TWO, *words)
    result, flat = check(code, out, tmp_path / "out")
    assert "Suspected leak: status gives single away" in flat
    assert any("Suspected leak: status" in note for note in result["notes"])
    assert {"accuracy of income", "accuracy of single", "macro_f1"} <= set(result["metrics"])


def test_texts(moiety, texts, tmp_path):
    words = ["--text", "text", "--target", "label", "--out", tmp_path / "out"]
    code, out, _ = moiety("compare", "routers", "--data", texts, *TWO, *words)
    check(code, out, tmp_path / "out")


def test_a_number_is_a_target_too(moiety, table, tmp_path):
    words = ["--target", "age", "--out", tmp_path / "out", "--equal", "examples"]
    code, out, _ = moiety("compare", "routers", "--data", table, *TWO, *words)
    result, _ = check(code, out, tmp_path / "out", main="r2")
    assert result["metrics"]["rmse of age"]["better"] == "lower"
    assert len({arm["examples"] for arm in result["arms"]}) == 1


def test_a_dry_run_shows_the_cost_and_writes_nothing(moiety, images, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    code, out, _ = moiety("compare", "routers", "--data", images, "--dry-run", "--budget", "60s")
    assert code == 0
    for arm in ("dense", "top-k", "switch", "sigmoid-balanced", "dselect-k", "perturbed-cosine"):
        assert arm in out
    assert "Nothing was written" in out and "Parameters" in out and "Memory" in out
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "digitz"], "digits"),
        (["--data", "digits", "--router", "topk"], "did you mean top-k"),
        (["--data", "digits", "--k", "9"], "only 8 experts"),
        (["--data", "digits", "--model", "mlp"], "take the model vit-tiny"),
        (["--data", "digits", "--model", "./nowhere"], "there is no folder"),
        (["--data", "digits", "--budget", "soon"], "90s, 5m or 1h30m"),
        (["--data", "digits", "--budget", "0s"], "longer than nothing"),
        (["--data", "digits", "--margin", "0"], "margin must be positive"),
        (["--data", "digits", "--device", "abacus"], "no device 'abacus'"),
        (["--data", "digits", "--lr", "-1"], "lr must be positive"),
        (["--data", "digits", "--seeds", "1"], "2"),
        (["--data", "TABLE", "--target", "salary"], "salary"),
        (["--data", "TABLE", "--target", "income", "--text", "essay"], "essay"),
        (["--data", "IMAGES", "--target", "x"], "no columns"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(moiety, words, said, table, images, tmp_path):
    given = [{"TABLE": str(table), "IMAGES": str(images)}.get(word, word) for word in words]
    code, _, error = moiety("compare", "routers", *given, "--out", tmp_path / "out")
    assert code == 2 and said in error
    assert len(error.strip().splitlines()) == 1 and error.startswith("moiety: ")
    assert not (tmp_path / "out").exists()


def test_an_arm_that_fails_is_told_and_the_others_go_on(moiety, images, tmp_path, monkeypatch):
    train = study_file.Comparison.train

    def fail(self, model, task, settings, running=None):
        if running is not None and settings["router"] == "top-k":
            raise ValueError("out of luck")
        train(self, model, task, settings, running)

    monkeypatch.setattr(study_file.Comparison, "train", fail)
    code, out, _ = moiety("compare", "routers", "--data", images, *TWO, "--out", tmp_path / "out")
    assert code == 1 and "out of luck" in out and "2 trials failed (of top-k)" in out
    assert "Found: dense: Accuracy" in out


def test_a_folder_that_cannot_be_written_is_found_before_training(moiety, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, error = moiety(
        "compare", "routers", "--data", "digits", *TWO, "--out", tmp_path / "file"
    )
    assert code == 2 and "cannot be written" in error
