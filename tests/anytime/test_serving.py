"""What a version can do by itself: answer new rows in another process, without the first file."""

import csv
import gzip
import io
import json
import shutil

import numpy as np
import pandas
import pytest
import torch

from moiety import cli
from moiety.anytime import (
    MLP,
    Examples,
    Folder,
    Reader,
    Training,
    cut,
    learner,
    load_current,
    problem_examples,
    run_stream,
)
from moiety.anytime.readers import read_form, write_form
from moiety.anytime.versions import Versions, read_current
from moiety.data import load_problem

SHORT = Training(epochs=2, batch=16)


@pytest.fixture
def moiety(capsys):
    """Run `moiety …`; return exit code, stdout, stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main([*map(str, arguments)])
        return ended.value.code, *capsys.readouterr()

    return run


def table(seed, rows=40):
    """Numbers with gaps, words, and a state that the numbers tell."""
    draw = np.random.default_rng(seed)
    load = draw.normal(3, 2, rows)
    frame = pandas.DataFrame({"load": load, "town": draw.choice(["Bern", "Rome", "Oslo"], rows)})
    frame["state"] = np.where(load > 3, "hot", "fine")
    frame.loc[0, "load"] = np.nan
    return frame


def pack(path, frame):
    path.write_bytes(gzip.compress(frame.to_csv(index=False).encode()))


def fill(folder):
    (folder / "inbox").mkdir()
    for number in (1, 2):
        pack(folder / "inbox" / f"{number}.csv.gz", table(number))
    return folder


@pytest.fixture
def place(tmp_path):
    return fill(tmp_path)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder of a run that is over, without the files that it learned from."""
    folder = fill(tmp_path_factory.mktemp("run"))
    with pytest.raises(SystemExit, match="0"):
        cli.main([str(word) for word in asked(folder)])
    shutil.rmtree(folder / "inbox")
    return folder / "out"


def asked(place, *more):
    words = ("--stream", place / "inbox", "--out", place / "out", "--target", "state")
    return ("anytime", *words, "--width", 8, "--epochs", 2, *more)


def answers(text):
    return list(csv.DictReader(io.StringIO(text)))


# -- a version alone -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--learner", "ensemble", "--option", "members=2", "--option", "start=scratch"),
        ("--learner", "mixture", "--option", "optimizer=carry"),
        ("--learner", "growing-ensemble", "--option", "new=fresh"),
        ("--learner", "growing-moe", "--option", "count=1", "--method", "adam", "--lr", "0.01"),
    ],
)
def test_a_version_answers_as_the_run_does_without_the_files_of_the_run(moiety, place, more):
    assert moiety(*asked(place, *more))[0] == 0
    stream = Folder(place / "inbox", place / "out" / "journal.jsonl", Reader(target="state"))
    stream.poll()
    path = place / "inbox" / "2.csv.gz"
    x = stream.read(path).x
    shutil.copytree(place / "out" / "current", place / "alone" / "versions" / "0002")
    (place / "alone" / "current").symlink_to("versions/0002")
    new = table(2).drop(columns="state")
    shutil.rmtree(place / "inbox")
    current = load_current(place / "alone")
    found = current.predict(new)
    assert torch.equal(found.probabilities, current.learner.predict(x))
    state = read_current(place / "out").state
    models = [model.state_dict() for model in current.learner.models]
    for mine, kept in zip(models, state["models"], strict=True):
        assert all(torch.equal(mine[name], kept[name]) for name in kept)
    assert found.classes == ["fine", "hot"]
    assert found.names == [found.classes[n] for n in found.probabilities.argmax(1)]
    assert found.probability == found.probabilities.amax(1).tolist()


def test_forms_come_back_from_their_plain_values(place):
    np.savez(place / "a.npz", x=np.zeros((4, 3), np.uint8), y=np.array([0, 1, 2, 1]))
    (place / "a.txt").write_text("some words " * 40)
    for path in (place / "inbox" / "1.csv.gz", place / "a.npz", place / "a.txt"):
        read = Reader(target="state", length=8)
        one = read(path)
        form = read_form(json.loads(json.dumps(write_form(read.form))))
        two = form.read(path)
        assert torch.equal(one.x, two.x) and torch.equal(one.y, two.y)
        assert tuple(one.x.shape[1:]) == form.shape and form.classes == read.form.classes


# -- learners made in Python -----------------------------------------------------------------------


def make(shape, classes, width=6):
    def model(seed):
        return MLP(width, inputs=shape[0], classes=classes)

    return learner("ensemble", model, members=2, training=SHORT)


@pytest.fixture
def made(place):
    stream = Folder(place / "inbox", place / "journal", Reader(target="state"))
    run_stream(
        stream, lambda first: make(first.train.x.shape[1:], stream.classes), out=place / "out"
    )
    return place / "out"


def test_what_made_a_learner_in_python_makes_it_again(moiety, made, place):
    current = load_current(made, lambda form: make(form.shape, len(form.classes)))
    assert current.card["t"] == 2
    assert len(current.predict(table(9).drop(columns="state"))) == 40
    with pytest.raises(ValueError, match="was made in Python; give what makes it"):
        load_current(made)
    table(9).to_csv(place / "new.csv")
    code, _, err = moiety("anytime", "predict", "--out", made, place / "new.csv")
    assert code == 2 and "was made in Python" in err and err.count("\n") == 1


def test_another_learner_is_refused(made):
    with pytest.raises(ValueError, match="does not have the weights of"):
        load_current(made, lambda form: make(form.shape, 2, width=7))
    single = learner("single", lambda seed: MLP(6, inputs=5, classes=2), training=SHORT)
    with pytest.raises(ValueError, match="a learner with learner = 'ensemble', not 'single'"):
        load_current(made, single)


def test_examples_that_were_cut_are_answered_as_arrays(tmp_path):
    x = torch.randn(40, 3)
    data = Examples(x, (x[:, 0] > 0).long())
    run_stream(cut(data, 2), make((3,), 2), out=tmp_path)
    current = load_current(tmp_path, make((3,), 2))
    assert torch.equal(current.predict(x).probabilities, current.learner.predict(x))
    assert set(current.predict(x.numpy()).names) <= {"0", "1"}
    with pytest.raises(ValueError, match=r"the shape \[2\], and those of mega-batch 1 \[3\]"):
        current.predict(x[:, :2])


def test_a_version_without_a_form_is_one_sentence(tmp_path):
    Versions(tmp_path).add(1, {"a": 1}, {"t": 1})
    with pytest.raises(ValueError, match="has no form of its rows"):
        load_current(tmp_path)
    (tmp_path / "current" / "form.json").unlink()
    with pytest.raises(ValueError, match="is not whole"):
        load_current(tmp_path)


def test_a_version_that_was_copied_answers_as_the_run_does(moiety, out, tmp_path):
    shutil.copytree(out / "current", tmp_path / "copy")
    shutil.copytree(out, tmp_path / "all")  # and its link became a folder
    new, found = table(9), load_current(out).predict(table(9))
    for folder in (tmp_path / "copy", tmp_path / "all", out / "current"):
        assert torch.equal(load_current(folder).predict(new).probabilities, found.probabilities)
    new.to_csv(tmp_path / "new.csv", index=False)
    code, said, _ = moiety("anytime", "predict", "--out", tmp_path / "copy", tmp_path / "new.csv")
    assert code == 0 and [row["predicted"] for row in answers(said)] == found.names
    (tmp_path / "copy" / "card.json").unlink()
    with pytest.raises(ValueError, match="copy is not whole"):
        load_current(tmp_path / "copy")


# -- moiety anytime predict ------------------------------------------------------------------------


def test_the_command_answers_every_row_with_or_without_a_target(moiety, out, tmp_path):
    new = table(9)
    new.loc[3, "state"] = None  # a row without a class is answered, too
    new.assign(id=range(40)).to_csv(tmp_path / "new.csv", index=False)
    code, said, err = moiety("anytime", "predict", "--out", out, tmp_path / "new.csv")
    found = load_current(out).predict(new.drop(columns="state"))
    assert code == 0 and "40 rows answered by version 2 (t = 2)" in err
    assert [row["row"] for row in answers(said)] == [str(n) for n in range(1, 41)]
    assert [row["predicted"] for row in answers(said)] == found.names
    shown = [float(row["probability"]) for row in answers(said)]
    assert shown == pytest.approx(found.probability, rel=1e-5)


def test_all_probabilities_go_to_a_file(moiety, out, tmp_path):
    to, new = tmp_path / "p.csv", tmp_path / "new.csv.gz"
    pack(new, table(9))
    words = ("anytime", "predict", new, "--out", out, "--to", to, "--all")
    code, said, err = moiety(*words)
    assert (code, said) == (0, "") and str(to) in err.replace("\n", "")
    for row in answers(to.read_text()):
        values = {name: float(row[f"p({name})"]) for name in ("fine", "hot")}
        assert sum(values.values()) == pytest.approx(1, abs=1e-5)
        assert row["predicted"] == max(values, key=values.get)


def test_images_are_standardised_as_those_of_the_run():
    problem = load_problem("digits")
    form = read_form(cut(problem, 2).form())
    images = problem.test.inputs["images"]
    assert torch.equal(form.inputs(images), problem_examples(problem, problem.test).x)
    assert form.classes == problem.targets[0].classes


def test_images_that_were_cut_are_answered_from_a_file(moiety, tmp_path):
    words = ("--batches", 2, "--out", tmp_path, "--width", 8, "--epochs", 2)
    assert moiety("anytime", "--stream", "digits", *words)[0] == 0
    shape = load_current(tmp_path).form.shape
    np.savez(tmp_path / "new.npz", x=np.full((3, *shape), 200, np.uint8))
    code, said, _ = moiety("anytime", "predict", tmp_path / "new.npz", "--out", tmp_path)
    assert code == 0 and len(answers(said)) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"load": None}, "new.csv lacks the column 'load', which the model looks at"),
        ({"town": None}, "new.csv lacks the column 'town'"),
        ({"load": "much"}, "'load' was a number in mega-batch 1, and here is 'much'"),
        ({"town": 7}, "'town' held words in mega-batch 1, such as 'Bern', and here is '7'"),
    ],
)
def test_a_column_that_is_missing_or_of_another_kind_is_one_sentence(
    moiety, out, tmp_path, change, said
):
    new = table(9).assign(**change).dropna(axis=1, how="all")
    new.to_csv(tmp_path / "new.csv", index=False)
    code, out, err = moiety("anytime", "predict", tmp_path / "new.csv", "--out", out)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_dates_and_numbers_are_told_apart(place):
    pytest.importorskip("pyarrow")
    dated = table(1).assign(load=pandas.date_range("2024-01-01", periods=40, freq="h"))
    dated.to_parquet(place / "a.parquet")
    read = Reader(target="state")
    read(place / "a.parquet")
    assert len(read.form.inputs(dated)) == 40
    with pytest.raises(ValueError, match="'load' held dates in mega-batch 1, and here none"):
        read.form.inputs(table(1))


def test_a_word_that_is_new_counts_as_unseen_and_no_row_is_lost(out):
    current = load_current(out)
    new = table(9).assign(town="Lima", state=None)
    assert len(current.predict(new)) == 40
    assert current.form.inputs(new)[:, 1:].tolist() == [[1, 0, 0, 0]] * 40


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("predict", "nowhere.csv"), "nowhere.csv is no file"),
        (("predict", "FILE", "--out", "nowhere"), "there is no folder nowhere"),
        (("--out", "a", "predict", "FILE"), "--out stands before predict"),
        ((), "give --stream"),
        (("--stream", "inbox", "--learner", "growing-switch"), "growing-switch is Python only"),
    ],
)
def test_mistakes_are_one_sentence(moiety, place, words, said):
    file = str(place / "inbox" / "1.csv.gz")
    code, _, err = moiety("anytime", *(file if word == "FILE" else word for word in words))
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


def test_another_kind_of_file_or_none_of_its_rows_is_one_sentence(moiety, out, tmp_path):
    np.savez(tmp_path / "new.npz", x=np.zeros((2, 5)))
    table(9)[:0].to_csv(tmp_path / "new.csv", index=False)
    reasons = {"new.npz": "is arrays, and the run learned from a table", "new.csv": "holds no row"}
    for name, reason in reasons.items():
        code, _, err = moiety("anytime", "predict", tmp_path / name, "--out", out)
        assert code == 2 and reason in err and err.count("\n") == 1


# -- what else is said -----------------------------------------------------------------------------


def test_advice_says_what_it_leaves_aside(moiety, place):
    words = ("--advise", "--wait", 1, "--watch", "--first", 3)
    code, _, err = moiety(*asked(place, *words))
    assert "--advise leaves --wait and --watch aside" in err
    assert "leaves" not in moiety(*asked(place, "--advise", "--first", 3))[2]
    assert code == 2  # two mega-batches are too few to try on


def test_a_table_that_is_cut_is_described(moiety, place):
    frame = pandas.concat([table(n) for n in range(4)]).assign(note="the same")
    noise = np.random.default_rng(0).normal(0, 2, len(frame))
    frame["state"] = np.where(frame["load"] + noise > 3, "hot", "fine")  # else load is a leak
    frame.to_csv(place / "all.csv", index=False)
    words = ("--stream", place / "all.csv", "--target", "state", "--batches", 1, "--epochs", 1)
    code, said, _ = moiety("anytime", *words, "--out", place / "out")
    assert code == 0
    assert "not used: note: the same in all rows" in said and "over 1 mega-batch (" in said
    code, said, err = moiety("anytime", "predict", place / "all.csv", "--out", place / "out")
    assert code == 0 and len(answers(said)) == len(frame), err


def test_a_table_that_was_cut_has_the_form_of_its_rows(tmp_path):
    path = tmp_path / "all.csv"
    pandas.concat([table(n) for n in range(4)]).to_csv(path, index=False)
    problem = load_problem(path, targets="state", leaks="keep")
    form = read_form(cut(problem, 2).form())
    whole = torch.cat([problem_examples(problem, part).x for part in problem.splits.values()])
    assert whole.shape[1:] == form.shape and form.classes == problem.targets[0].classes
    rows = [{tuple(row) for row in x.tolist()} for x in (form.inputs(path), whole)]
    assert rows[0] == rows[1]  # of all splits together, whatever their order


def test_a_report_of_the_ledger(moiety, out, tmp_path):
    page = tmp_path / "page.html"
    code, said, err = moiety("report", out, "--out", page)
    assert code == 0, err
    assert str(page) in said.replace("\n", "")
    text = page.read_text()
    assert "A stream, up to t = 2" in text and "trained 2 times" in text
    assert "1.csv.gz" in text and "50.0%" in text and "Spent so far, in" in text
    assert "each arrival, before it is trained on" in text
    assert "http" not in text.replace("http-equiv", "")
    assert moiety("report", out)[0] == 0
    assert (out / "report.html").is_file()
