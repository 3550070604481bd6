"""Bad input on a stream: one sentence each, the run goes on or can go on, and nothing is lost."""

import errno
import gzip
import io
import json
import os

import numpy as np
import pytest
import torch
from learning import METER, examples, mlp

from moiety import cli
from moiety.anytime.fitting import Training
from moiety.anytime.learners import learner
from moiety.anytime.ledger import read_ledger, timeless
from moiety.anytime.run import run_stream
from moiety.anytime.stream import cut
from moiety.anytime.versions import read_current

SMALL = ("--width", 6, "--epochs", 2, "--target", "label", "--method", "adam")


def rows(seed, count=20):
    """Lines of two numbers and the class that the first one tells."""
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed)).tolist()
    return [f"{a},{b},{'yes' if a > 0 else 'no'}" for a, b in x]


def put(path, lines, head="a,b,label"):
    path.write_bytes(gzip.compress("\n".join([head, *lines, ""]).encode()))


def arrays():
    held = io.BytesIO()
    np.savez(held, x=np.zeros((4, 2), np.float32), y=np.zeros(4, int))
    return held.getvalue()


def table(lines, head="a,b,label"):
    return gzip.compress("\n".join([head, *lines, ""]).encode())


@pytest.fixture
def place(tmp_path):
    """An inbox with the files 1 and 3, and a test file."""
    (tmp_path / "inbox").mkdir()
    for number in (1, 3):
        put(tmp_path / "inbox" / f"{number}.csv.gz", rows(number))
    put(tmp_path / "test.csv.gz", rows(9, 60))
    return tmp_path


@pytest.fixture
def moiety(capsys):
    def run(place, *words, out="out"):
        asked = ["--stream", place / "inbox", "--out", place / out, *SMALL, *words]
        with pytest.raises(SystemExit) as ended:
            cli.main(["anytime", *map(str, asked)])
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


def names(place, out="out"):
    return [line["name"] for line in read_ledger(place / out / "ledger.jsonl")]


# -- files -----------------------------------------------------------------------------------------

BAD = {
    "nothing at all": ("2.csv.gz", b"", "it is empty"),
    "no row": ("2.csv.gz", table([]), "holds no example; a mega-batch needs some"),
    "one row": ("2.csv.gz", table(rows(2, 1)), "a mega-batch needs 2 examples or more, got 1"),
    "a new class": ("2.csv.gz", table([*rows(2), "1,1,maybe"]), "has the class 'maybe' of label"),
    "a new column": (
        "2.csv.gz",
        table([f"7,{line}" for line in rows(2)], "c,a,b,label"),
        "has the new column 'c'; give it the columns of mega-batch 1",
    ),
    "a renamed column": (
        "2.csv.gz",
        table(rows(2), "a,B,label"),
        "it has the new column 'B' and lacks 'b'; give it the columns of mega-batch 1",
    ),
    "a lost column": ("2.csv.gz", table(["1,yes", "2,no"], "a,label"), "lacks the column 'b'"),
    "words for numbers": ("2.csv.gz", table(["x,1,yes", "y,1,no"]), "'a' was a number in mega"),
    "arrays": ("2.npz", arrays(), "is arrays, and mega-batch 1 is a table; give one kind of file"),
    "a picture": ("2.png.gz", gzip.compress(b"x"), "is no kind of file that can be learned from"),
    "half a file": ("2.csv.gz", table(rows(2))[:-9], "damaged (Compressed file ended"),
    "the test set": ("2.csv.gz", table(rows(9, 60)[:20]), "20 of the 20 rows of 2.csv.gz are in"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_file_is_named_and_passed_over_until_it_is_put_right(place, moiety, bad):
    name, data, said = BAD[bad]
    (place / "inbox" / name).write_bytes(data)
    code, _, err = moiety(place, "--test", place / "test.csv.gz")
    assert code == 0, err
    (sentence,) = err.strip().splitlines()
    assert sentence.strip().startswith(f"{name} is not taken: ") and said in sentence
    assert sentence.count("damaged") <= 1
    assert names(place) == ["1.csv.gz", "3.csv.gz"]
    (place / "inbox" / name).unlink()
    put(place / "inbox" / "2.csv.gz", rows(2))
    code, _, err = moiety(place, "--test", place / "test.csv.gz")
    assert (code, err) == (0, "")
    assert names(place) == ["1.csv.gz", "3.csv.gz", "2.csv.gz"]


# -- the test set ----------------------------------------------------------------------------------


def test_an_overlap_that_is_allowed_is_taken(place, moiety):
    put(place / "inbox" / "2.csv.gz", [*rows(2, 18), *rows(9, 60)[:2]])
    asked = ("--test", place / "test.csv.gz")
    code, _, err = moiety(place, *asked)
    assert (code, "or allow more than 0.01 of them: --overlap" in err) == (0, True)
    code, _, err = moiety(place, *asked, "--overlap", 0.1)
    assert (code, err, names(place)[-1]) == (0, "", "2.csv.gz")


def test_a_row_of_the_test_set_counts_as_often_as_it_comes(place, moiety):
    put(place / "inbox" / "2.csv.gz", rows(9, 60)[:1] * 20)
    code, _, err = moiety(place, "--test", place / "test.csv.gz")
    assert code == 0
    assert "2.csv.gz is not taken: 20 of the 20 rows" in err


def test_a_first_file_that_overlaps_does_not_set_the_form(place, moiety):
    put(place / "inbox" / "0.csv.gz", rows(9, 60)[:20])
    code, _, err = moiety(place, "--test", place / "test.csv.gz")
    assert (code, names(place)) == (0, ["1.csv.gz", "3.csv.gz"]), err
    assert err.count("are in the test set, too") == 1


def test_a_test_file_that_cannot_be_used_is_no_fault_of_the_stream(place, moiety):
    put(place / "odd.csv.gz", [*rows(9), "1,1,maybe"])
    code, _, err = moiety(place, "--test", place / "odd.csv.gz")
    assert code == 2
    assert "the test set cannot be used: odd.csv.gz has the class 'maybe'" in err
    assert moiety(place, "--test", place / "test.csv.gz")[0] == 0
    assert len(names(place)) == 2


def test_an_overlap_within_a_data_set_does_not_end_a_run_for_good(tmp_path):
    """Its rows are in the stream for good; whoever allows the share goes on to the same bits."""
    data, training = cut(examples(60), 3), Training(epochs=2)
    words = {"test": data[2].train}

    def single():
        return learner("single", mlp, training=training, meter=METER)

    with pytest.raises(ValueError, match=r"18 of the 20 rows of mega-batch 2 .* 0\.01 .*overlap"):
        run_stream(data, single(), out=tmp_path / "a", **words)
    again = run_stream(data, single(), out=tmp_path / "a", overlap=1.0, **words)
    whole = run_stream(data, single(), out=tmp_path / "b", overlap=1.0, **words)
    assert timeless(again.lines) == timeless(whole.lines)


# -- a full disk -----------------------------------------------------------------------------------


def weights(out):
    return [value.tolist() for value in read_current(out).state["models"][0].values()]


@pytest.mark.parametrize("at", [2, 6, 13, 22])
def test_a_full_disk_is_one_sentence_and_the_same_command_goes_on(place, moiety, monkeypatch, at):
    assert moiety(place, out="whole")[0] == 0
    real, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) >= at:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        code, _, err = moiety(place)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("moiety: No space left on device: what ")
    assert "nothing is lost; make room, and start again" in err
    code, _, err = moiety(place)
    assert code == 0, err
    both = [timeless(read_ledger(place / out / "ledger.jsonl")) for out in ("out", "whole")]
    assert both[0] == both[1]
    assert weights(place / "out") == weights(place / "whole")


# -- other words -----------------------------------------------------------------------------------


def test_a_command_with_other_words_takes_nothing_into_the_journal(place, moiety):
    """What it took, such as rows of the test set that it did not know of, would end the run."""
    asked = ("--test", place / "test.csv.gz")
    assert moiety(place, *asked)[0] == 0
    put(place / "inbox" / "4.csv.gz", rows(9, 60)[:20])
    before = (place / "out" / "journal.jsonl").read_bytes()
    assert moiety(place)[0] == 2
    assert (place / "out" / "journal.jsonl").read_bytes() == before
    put(place / "inbox" / "5.csv.gz", rows(5))
    assert moiety(place, *asked)[0] == 0
    assert names(place) == ["1.csv.gz", "3.csv.gz", "5.csv.gz"]


def test_what_a_run_was_asked_is_kept_beside_it(place, moiety):
    assert moiety(place, "--learner", "ensemble", "--option", "members=2")[0] == 0
    kept = json.loads((place / "out" / "run.json").read_text())
    asked = {"learner": "ensemble", "members": 2, "width": 6, "model": "mlp", "wait": "1"}
    asked |= {"epochs": 2, "method": "adam", "target": "label", "replay": "none", "seed": 0}
    assert asked.items() <= kept.items()


# With a wait of 5 there is no version yet that could refuse.
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (("--epochs", 3), "a run with epochs = 2, not 3"),
        (("--lr", 0.5), "a run with lr = None, not 0.5"),
        (("--width", 7), "a run with width = 6, not 7"),
        (("--option", "start=scratch"), "a run with start = warm, not scratch"),
        (("--learner", "ensemble"), "a run with learner = single, not ensemble"),
        (("--classes", "no,yes"), "a run with classes = None, not no,yes"),
        (("--replay", 0.5), "a run with replay = none, not 0.5"),
    ],
)
def test_a_run_goes_on_with_the_same_words_only(place, moiety, other, said):
    wait = 1 if "--replay" in other else 5
    assert moiety(place, "--wait", wait)[0] == 0
    before = (place / "out" / "ledger.jsonl").read_bytes()
    put(place / "inbox" / "4.csv.gz", rows(4))
    code, _, err = moiety(place, "--wait", wait, *other)
    assert (code, err.count("\n"), said in err) == (2, 1, True), err
    assert (place / "out" / "ledger.jsonl").read_bytes() == before
    assert moiety(place, "--wait", wait)[0] == 0
    assert names(place)[-1] == "4.csv.gz"
