"""`moiety anytime`: a folder once and again, a data set that is cut, mistakes in one sentence."""

import gzip
import os
import re
import shutil

import pytest
import torch

from moiety import cli
from moiety.anytime.ledger import read_ledger
from moiety.anytime.versions import read_current


@pytest.fixture
def moiety(capsys):
    """Run `moiety anytime …`; return exit code, stdout, stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(["anytime", *map(str, arguments)])
        return ended.value.code, *capsys.readouterr()

    return run


def table(path, seed, rows=24):
    """Two columns, of which the first tells the class; packed, so that it proves itself whole."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, generator=draw)
    lines = ["a,b,label", *(f"{a},{b},{'yes' if a > 0 else 'no'}" for a, b in x.tolist())]
    text = "\n".join(lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


@pytest.fixture
def inbox(tmp_path):
    folder = tmp_path / "inbox"
    folder.mkdir()
    for number in (1, 2, 3):
        table(folder / f"{number}.csv.gz", number)
    return folder


SMALL = ("--width", 8, "--epochs", 2)


def test_a_folder_is_learned_from_once_and_again_when_more_has_arrived(moiety, inbox, tmp_path):
    table(inbox / "4.csv", 4)  # plain, and nothing proves that it is whole
    table(tmp_path / "test.csv", 9, rows=60)
    asked = ("--stream", inbox, "--out", tmp_path / "out", "--wait", 2, "--replay", 0.5, *SMALL)
    asked += ("--target", "label", "--test", tmp_path / "test.csv")
    code, said, warned = moiety(*asked)
    assert (code, said.count("t = ")) == (0, 3), warned
    assert "1 mega-batch waits for more: [3]" in said
    assert "4.csv is not taken: " in warned and "or give --settle" in warned
    assert os.readlink(tmp_path / "out" / "current") == "versions/0001"
    table(inbox / "5.csv.gz", 5)
    code, said, warned = moiety(*asked)
    assert (code, re.findall(r"t = \d", said)) == (0, ["t = 4"]), warned
    lines = read_ledger(tmp_path / "out" / "ledger.jsonl")
    assert [line["name"] for line in lines] == [f"{n}.csv.gz" for n in (1, 2, 3, 5)]
    assert [line["phase"] for line in lines] == [0, 1, 1, 2]
    assert lines[0]["error"] == 0.5
    assert read_current(tmp_path / "out").card["rows"] == 96


def test_what_a_file_lacks_or_repeats_is_said(moiety, inbox, tmp_path):
    shutil.copy(inbox / "1.csv.gz", inbox / "4.csv.gz")
    rows = gzip.decompress((inbox / "2.csv.gz").read_bytes()).decode().splitlines()
    rows[3:5] = ["0.5,0.5,", "0.1,0.2,"]
    (inbox / "2.csv.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    out = tmp_path / "out"
    code, _, warned = moiety("--stream", inbox, "--out", out, "--target", "label", *SMALL)
    warned = " ".join(warned.split())
    assert code == 0
    assert "2.csv.gz is mega-batch 2: 2 of its rows have no target and are left out" in warned
    assert "4.csv.gz is mega-batch 4: it has the same bytes as mega-batch 1, 1.csv.gz" in warned
    assert [line["rows"] for line in read_ledger(out / "ledger.jsonl")] == [24, 22, 24, 24]


def test_a_data_set_is_cut_and_scored_on_its_own_test_split(moiety, tmp_path):
    asked = ("--stream", "digits", "--batches", 3, "--out", tmp_path, "--wait", 2, *SMALL)
    code, said, _ = moiety(*asked, "--learner", "ensemble", "--option", "members=2")
    assert code == 0
    train, validation = map(int, re.search(r"(\d+) train, (\d+) validation", said).groups())
    rows = train + validation
    assert f"stream: {rows} examples, train and validation together, in 3 mega-batches" in said
    assert sum(map(int, re.findall(r"(\d+) rows", said))) == rows
    assert re.search(r"CER [\d.]+ over 3 mega-batches", said)
    lines = read_ledger(tmp_path / "ledger.jsonl")
    assert [line["phase"] for line in lines] == [0, 1, 2]
    assert lines[0]["error"] == pytest.approx(0.9)
    assert len(read_current(tmp_path).state["models"]) == 2


def test_a_growing_mixture_gets_a_model_that_can_grow(moiety, inbox, tmp_path):
    asked = ("--stream", inbox, "--out", tmp_path / "out", *SMALL, "--learner", "growing-moe")
    code, said, _ = moiety(*asked)
    assert (code, said.count("grown (gap")) == (0, 2)


def test_a_dry_run_writes_nothing(moiety, inbox, tmp_path):
    code, said, _ = moiety("--stream", inbox, "--out", tmp_path / "out", "--dry-run", *SMALL)
    assert code == 0
    assert "2.csv.gz is mega-batch 2" in said
    assert "3 mega-batches have arrived" in said
    assert not (tmp_path / "out").exists()


def test_a_dry_run_goes_on_from_the_journal_of_the_run(moiety, inbox, tmp_path):
    asked = ("--stream", inbox, "--out", tmp_path / "out", *SMALL)
    assert moiety(*asked)[0] == 0
    table(inbox / "0.csv.gz", 4)  # comes last, although its name is the first
    _, said, _ = moiety(*asked, "--dry-run")
    assert "0.csv.gz is mega-batch 4" in said
    assert "4 mega-batches have arrived" in said
    assert len((tmp_path / "out" / "journal.jsonl").read_text().splitlines()) == 3


def test_the_help_says_what_advice_takes_by_default(moiety):
    said = moiety("--help")[1]
    assert "Default: 10m" in said and "Default: 0.01" in said


def test_columns_without_use_are_said(moiety, tmp_path):
    (tmp_path / "inbox").mkdir()
    lines = [f"{n % 7},number {n} of all the words,{'no' if n % 2 else 'yes'}" for n in range(24)]
    text = "\n".join(["a,note,label", *lines, ""])
    (tmp_path / "inbox" / "1.csv.gz").write_bytes(gzip.compress(text.encode()))
    asked = ("--stream", tmp_path / "inbox", "--out", tmp_path / "out", *SMALL)
    assert "Columns that are not used: note (running text)" in moiety(*asked)[1]


def test_settling_is_warned_of_in_one_line(moiety, inbox, tmp_path):
    asked = ("--stream", inbox, "--out", tmp_path / "out", *SMALL, "--settle", 60)
    (line,) = moiety(*asked)[2].splitlines()
    assert line.strip().startswith(
        "--settle 60 (in Python, settle=…): a file whose writer pauses longer"
    )


def test_watching_takes_what_arrives_until_it_is_interrupted(moiety, tmp_path, monkeypatch):
    inbox, looks = tmp_path / "inbox", iter((1, 2))
    inbox.mkdir()

    def sleep(seconds):
        number = next(looks, None)
        if number is None:
            raise KeyboardInterrupt
        table(inbox / f"{number}.csv.gz", number)

    monkeypatch.setattr("moiety.anytime.run.time.sleep", sleep)
    code, said, err = moiety("--stream", inbox, "--out", tmp_path / "out", *SMALL, "--watch")
    assert said.startswith(f"Watching {inbox}; Ctrl-C stops")
    assert (code, re.findall(r"t = \d", said)) == (130, ["t = 1", "t = 2"])
    assert "interrupted" in err
    assert os.readlink(tmp_path / "out" / "current") == "versions/0002"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--wait", "soon"), "wait 'soon' is not known"),
        (("--replay", "2"), "at most 1"),
        (("--learner", "singel"), "did you mean single?"),
        (("--option", "members=3"), "has no option 'members'; it has start, optimizer"),
        (("--option", "meter=3"), "--option meter is none of the learner"),
        (("--option", "members"), "name=value"),
        (("--model", "vgg19"), "vgg19 takes images"),
        (("--method", "adamax"), "method must be one of"),
        (("--test", "nowhere.csv"), "--test nowhere.csv is no file"),
        (("--device", "abacus"), "no device"),
        (("--target", "colour"), "colour"),
        (("--stream", "nowhere"), "--stream nowhere is no folder"),
        (("--batches", "2", "--settle", "3"), "--settle is for a folder"),
        (("--batches", "2", "--target", "label"), "--batches cuts a data set, and"),
        (("--lr", "0"), "lr must be a positive number, got 0.0"),
        (("--lr", "-1"), "lr must be a positive number, got -1.0"),
        (("--lr", "nan"), "lr must be a positive number, got nan"),
        (("--overlap", "7"), "overlap must be a share from 0 to 1, got 7"),
        (("--overlap", "0.1"), "--overlap goes with --test"),
        (("--classes", "yes"), "has the class 'no' of label, which --classes (in Python"),
        (("--classes", "yes,no,yes"), "classes has 'yes' twice"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_trained(moiety, inbox, tmp_path, words, said):
    code, _, err = moiety("--stream", inbox, "--out", tmp_path / "out", *SMALL, *words)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
    assert not (tmp_path / "out" / "current").exists()
    assert not (tmp_path / "out" / "journal.jsonl").exists()  # so that no file has a number


def test_text_takes_no_number_where_no_model_can_learn_it(moiety, tmp_path):
    (tmp_path / "inbox").mkdir()
    (tmp_path / "inbox" / "1.txt.gz").write_bytes(gzip.compress(b"some words " * 99))
    code, _, err = moiety("--stream", tmp_path / "inbox", "--out", tmp_path / "out")
    assert (code, "no language model" in err) == (2, True)
    assert not (tmp_path / "out" / "journal.jsonl").exists()


def test_the_names_of_learners_are_those_that_the_command_takes(moiety, inbox, tmp_path):
    asked = ("--stream", inbox, "--out", tmp_path / "out", "--learner", "growing-swich")
    code, _, err = moiety(*asked)
    assert (code, "Names: " in err, "growing-switch" in err) == (2, True, False), err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--target", "colour"), "it has no column 'colour' to predict; it has one, two"),
        ((), "say which column to predict, of one, two: --target"),
    ],
)
def test_what_is_wrong_with_all_files_is_said_once(moiety, tmp_path, words, said):
    (tmp_path / "inbox").mkdir()
    for number in (1, 2, 3):
        text = "one,two\n" + "1,2\n" * number
        (tmp_path / "inbox" / f"{number}.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "inbox" / "2.csv").write_text("one,two\n")
    asked = ("--stream", tmp_path / "inbox", "--out", tmp_path / "out", *words)
    code, _, err = moiety(*asked)
    first, second, last = err.splitlines()
    assert code == 2
    assert first.startswith(f"  1.csv.gz is not taken, nor are 2 more: {said}")
    assert second.startswith("  2.csv is not taken: nothing proves that it is whole")
    assert last.endswith("nothing has arrived yet that can be learned from; 4 files are not taken")
    code, out, _ = moiety(*asked, "--dry-run")
    assert (code, out.splitlines()[:2]) == (0, [first, second])


def test_once_there_is_a_mega_batch_each_file_is_named(moiety, inbox, tmp_path):
    for number in (4, 5):
        (inbox / f"{number}.csv.gz").write_bytes(b"")
    _, _, err = moiety("--stream", inbox, "--out", tmp_path / "out", *SMALL)
    assert err.splitlines() == [f"  {number}.csv.gz is not taken: it is empty" for number in (4, 5)]


def test_an_empty_folder_is_said_with_reasons(moiety, tmp_path):
    (tmp_path / "inbox").mkdir()
    table(tmp_path / "inbox" / "1.csv", 1)
    code, _, err = moiety("--stream", tmp_path / "inbox", "--out", tmp_path / "out")
    assert code == 2
    assert "nothing has arrived yet" in err
    assert "1.csv" in err


def test_other_words_in_the_same_folder_are_refused(moiety, inbox, tmp_path):
    asked = ("--stream", inbox, "--out", tmp_path / "out", *SMALL)
    assert moiety(*asked)[0] == 0
    code, _, err = moiety(*asked, "--wait", 3)
    assert (code, "a run with wait = 1, not 3" in err) == (2, True)
    code, _, err = moiety(*asked, "--width", 9)
    assert (code, "a run with width = 8, not 9" in err) == (2, True)
