"""A folder that fills: nothing lost, nothing used twice, whatever arrives and who is killed."""

import gzip
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from moiety.anytime import Examples, Folder
from moiety.anytime import stream as module
from moiety.anytime.journal import Journal
from moiety.io import read_lines


def read(path):
    """Numbers of a packed text, whose sign says the class."""
    values = torch.tensor([float(word) for word in gzip.decompress(path.read_bytes()).split()])
    return Examples(values[:, None], (values < 0).long())


def put(folder, name, values):
    text = " ".join(map(str, values)) + " " * ord(name[0])  # other names, other bytes
    data = gzip.compress(text.encode())
    (folder / name).write_bytes(data)
    return data


@pytest.fixture
def inbox(tmp_path):
    (tmp_path / "inbox").mkdir()
    return tmp_path / "inbox"


@pytest.fixture
def journal(tmp_path):
    return tmp_path / "out" / "journal.jsonl"


def seen(stream):
    return {each.name: (each.number, each.reason) for each in stream.poll()}


def values_of(batch):
    return sorted(torch.cat([batch.train.x, batch.validation.x])[:, 0].int().tolist())


def test_files_are_numbered_by_name_within_a_scan_and_by_scan(inbox, journal):
    put(inbox, "b.txt.gz", range(10))
    put(inbox, "c.txt.gz", range(10, 30))
    stream = Folder(inbox, journal, read)
    assert stream.known() == 0 and stream.batches is None
    assert seen(stream) == {"b.txt.gz": (1, ""), "c.txt.gz": (2, "")}
    put(inbox, "a.txt.gz", range(30, 40))
    assert seen(stream) == {"a.txt.gz": (3, "")}
    assert seen(stream) == {}
    assert [batch.name for batch in stream] == ["b.txt.gz", "c.txt.gz", "a.txt.gz"]
    assert [values_of(batch) for batch in stream] == [
        list(range(10)), list(range(10, 30)), list(range(30, 40))
    ]  # fmt: skip
    assert [stream.rows(number) for number in (1, 2, 3)] == [10, 20, 10]
    assert [len(batch.validation) for batch in stream] == [1, 2, 1]


def test_the_journal_not_the_folder_is_the_stream(inbox, journal):
    for name in "ab":
        put(inbox, f"{name}.txt.gz", range(10))
    Folder(inbox, journal, read).poll()
    put(inbox, "0.txt.gz", range(50))
    again = Folder(inbox, journal, read)
    assert again.known() == 2 and [batch.name for batch in again] == ["a.txt.gz", "b.txt.gz"]


def test_the_same_journal_gives_the_same_rows_whenever_they_are_read(inbox, journal):
    put(inbox, "a.txt.gz", range(100))
    put(inbox, "b.txt.gz", range(100))
    stream = Folder(inbox, journal, read, seed=3)
    stream.poll()
    first, again = stream[2], Folder(inbox, journal, read, seed=3)[2]
    assert torch.equal(first.train.x, again.train.x)
    assert torch.equal(first.validation.x, again.validation.x)
    assert not torch.equal(first.validation.x, stream[1].validation.x)
    assert not torch.equal(first.validation.x, Folder(inbox, journal, read)[2].validation.x)


def test_half_written_and_corrupt_files_are_listed_and_looked_at_again(inbox, journal):
    stream = Folder(inbox, journal, read)
    whole = put(inbox, "a.txt.gz", range(10))
    (inbox / "a.txt.gz").write_bytes(whole[:20])
    (inbox / "b.txt.gz").write_bytes(whole[:-8] + b"damaged!")
    (inbox / "c.txt.gz.part").write_bytes(whole)
    (inbox / ".d.txt.gz").write_bytes(whole)
    (inbox / "e.txt").write_bytes(b"1 2 3")
    found = seen(stream)
    assert found.keys() == {"a.txt.gz", "b.txt.gz", "e.txt"}
    assert all(number is None for number, _ in found.values())
    assert "cut off" in found["a.txt.gz"][1] and "damaged" in found["b.txt.gz"][1]
    assert "e.txt.done" in found["e.txt"][1]
    assert stream.known() == 0 and read_lines(journal) == []
    (inbox / "a.txt.gz").write_bytes(whole)
    os.rename(inbox / "c.txt.gz.part", inbox / "c.txt.gz")
    found = seen(stream)
    assert [found[name][0] for name in ("a.txt.gz", "b.txt.gz", "c.txt.gz")] == [1, None, 2]
    (inbox / "b.txt.gz").write_bytes(whole)
    twin = "it has the same bytes as mega-batch 1, a.txt.gz"
    assert seen(stream)["b.txt.gz"] == (3, twin) and twin == found["c.txt.gz"][1]


def test_what_was_refused_is_read_again_only_after_it_was_touched(inbox, journal, monkeypatch):
    whole = put(inbox, "a.txt.gz", range(10))
    (inbox / "a.txt.gz").write_bytes(whole[:20])
    looks, prove = [], module.prove
    monkeypatch.setattr(module, "prove", lambda path, **w: looks.append(1) or prove(path, **w))
    monkeypatch.setattr("moiety.anytime.journal.TICK", 0)
    stream = Folder(inbox, journal, read)
    first = seen(stream)
    assert seen(stream) == seen(stream) == first and len(looks) == 1
    (inbox / "a.txt.gz").write_bytes(whole[:30])
    assert seen(stream)["a.txt.gz"][0] is None and len(looks) == 2
    (inbox / "a.txt.gz").write_bytes(whole)
    assert seen(stream) == {"a.txt.gz": (1, "")}


def test_a_done_that_comes_later_is_noticed(inbox, journal, monkeypatch):
    monkeypatch.setattr("moiety.anytime.journal.TICK", 0)
    (inbox / "a.csv").write_bytes(data := gzip.compress(b"1 2 3"))
    stream = Folder(inbox, journal, read)
    assert seen(stream)["a.csv"][0] is None
    (inbox / "a.csv.done").write_text(f"{len(data)} {hashlib.sha256(data).hexdigest()}\n")
    assert seen(stream) == {"a.csv": (1, "")}


def test_settle_takes_plain_files_with_a_warning(inbox, journal, monkeypatch):
    monkeypatch.setattr("moiety.anytime.journal.TICK", 0)  # a refusal is remembered at once
    (inbox / "a.csv").write_bytes(gzip.compress(b"1 2 3"))
    with pytest.warns(UserWarning, match="taken half-written"):
        stream = Folder(inbox, journal, read, settle=0.05)
    later = time.time() + 3600
    os.utime(inbox / "a.csv", (later, later))  # the clock of its writer may be wrong
    assert "touched less than" in seen(stream)["a.csv"][1]
    os.utime(inbox / "a.csv")
    assert "touched less than" in seen(stream)["a.csv"][1]
    time.sleep(0.06)
    ((name, (number, reason)),) = seen(stream).items()
    assert (name, number) == ("a.csv", 1) and "does not prove" in reason
    with pytest.raises(ValueError, match="settle must be more than 0"):
        Folder(inbox, journal, read, settle=0)


@pytest.mark.parametrize("fresh", [True, False])
def test_a_journalled_file_that_changes_is_listed_and_nothing_reads_it(inbox, journal, fresh):
    put(inbox, "a.txt.gz", range(10))
    put(inbox, "b.txt.gz", range(10))
    stream = Folder(inbox, journal, read)
    stream.poll()
    old = (inbox / "b.txt.gz").read_bytes()
    put(inbox, "b.txt.gz", range(20))  # a name that comes again
    if fresh:
        stream = Folder(inbox, journal, read)
    ((name, (number, reason)),) = seen(stream).items()
    assert (name, number) == ("b.txt.gz", None)
    assert "changed since it became mega-batch 2" in reason
    assert "not taken" not in str(stream.poll()[0])  # for it was
    with pytest.raises(ValueError, match="changed since it became mega-batch 2"):
        stream[2]
    assert values_of(stream[1]) == list(range(10)) and stream.known() == 2
    (inbox / "b.txt.gz").unlink()
    assert "vanished" in seen(stream)["b.txt.gz"][1]
    with pytest.raises(ValueError, match=r"b.txt.gz vanished, which is mega-batch 2"):
        stream[2]
    put(inbox, "c.txt.gz", range(5))  # what comes later still gets its number
    assert seen(stream)["c.txt.gz"] == (3, "")
    (inbox / "b.txt.gz").write_bytes(old)
    assert seen(stream) == {} and values_of(stream[2]) == list(range(10))


def test_a_file_that_changes_while_it_is_read_is_refused(inbox, journal):
    put(inbox, "a.txt.gz", range(10))
    Folder(inbox, journal, read).poll()

    def meanwhile(path):
        examples = read(path)
        put(inbox, "a.txt.gz", range(20))
        return examples

    with pytest.raises(ValueError, match="changed since it became mega-batch 1"):
        Folder(inbox, journal, meanwhile)[1]


def test_a_file_that_changes_before_it_is_journalled_is_not(inbox, journal):
    put(inbox, "a.txt.gz", range(10))

    def meanwhile(path):
        examples = read(path)
        put(inbox, "a.txt.gz", range(20))
        return examples

    stream = Folder(inbox, journal, meanwhile)
    assert seen(stream) == {"a.txt.gz": (None, "it is still being written")}
    assert stream.known() == 0


def test_what_cannot_be_read_takes_no_number(inbox, journal):
    put(inbox, "a.txt.gz", ["word"])
    put(inbox, "b.txt.gz", [])
    put(inbox, "c.txt.gz", [1])
    put(inbox, "d.txt.gz", [1, 2])
    found = seen(Folder(inbox, journal, read))
    assert "could not convert" in found["a.txt.gz"][1]
    assert "needs 2 examples or more, got 0" in found["b.txt.gz"][1]
    assert "needs 2 examples or more, got 1" in found["c.txt.gz"][1]
    assert found["d.txt.gz"] == (1, "")


class FirstDecides:
    """A reader that wants all files to be as long as the first."""

    length = None

    def __call__(self, path):
        examples = read(path)
        if self.length not in (None, len(examples)):
            raise ValueError(f"{path.name} has {len(examples)} rows, not {self.length}")
        self.length = len(examples)
        return examples


def test_the_first_mega_batch_sets_the_form_also_after_a_restart(inbox, journal):
    put(inbox, "b.txt.gz", range(10))
    stream = Folder(inbox, journal, FirstDecides())
    stream.poll()
    put(inbox, "a.txt.gz", range(20))
    put(inbox, "c.txt.gz", range(10))
    again = Folder(inbox, journal, FirstDecides())
    found = seen(again)
    assert found == {"a.txt.gz": (None, "a.txt.gz has 20 rows, not 10"), "c.txt.gz": (2, "")}
    assert Folder(inbox, journal, FirstDecides())[2].rows == 10


def test_a_file_that_was_refused_does_not_set_the_form(inbox, journal):
    put(inbox, "a.txt.gz", [1])  # too short to be split
    put(inbox, "b.txt.gz", range(10))
    put(inbox, "c.txt.gz", range(10))
    found = seen(Folder(inbox, journal, FirstDecides()))
    assert [number for number, _ in found.values()] == [None, 1, 2]


def test_two_that_look_at_one_folder_share_a_journal(inbox, journal):
    one, two = (Folder(inbox, journal, read) for _ in range(2))
    put(inbox, "a.txt.gz", range(10))
    assert (seen(one), seen(two)) == ({"a.txt.gz": (1, "")}, {})
    put(inbox, "b.txt.gz", range(10))
    assert (seen(two), seen(one)) == ({"b.txt.gz": (2, "")}, {})
    assert [entry.name for entry in Journal(journal)] == ["a.txt.gz", "b.txt.gz"]


def test_a_first_file_that_another_process_took_meanwhile_sets_the_form(inbox, journal):
    class Slow(FirstDecides):
        def __call__(self, path):
            if path.name == "a.txt.gz" and not journal.exists():
                os.rename(path, inbox / "a.part")
                Folder(inbox, journal, FirstDecides()).poll()
                os.rename(inbox / "a.part", path)
            return super().__call__(path)

    put(inbox, "a.txt.gz", range(20))
    put(inbox, "b.txt.gz", range(10))
    put(inbox, "c.txt.gz", range(10))
    stream = Folder(inbox, journal, Slow())
    stream.poll()
    assert [entry.name for entry in Journal(journal)] == ["b.txt.gz", "c.txt.gz"]
    assert seen(stream) == {"a.txt.gz": (None, "a.txt.gz has 20 rows, not 10")}


def test_a_name_that_is_not_utf_8_is_listed_and_the_others_are_taken(inbox, journal):
    put(inbox, "a.txt.gz", range(10))
    put(inbox, "z.txt.gz", range(10))
    name = os.fsdecode(b"caf\xe9.txt.gz")  # Latin-1
    try:
        put(inbox, name, range(10))
    except OSError:
        pytest.skip("this file system takes only UTF-8")
    stream = Folder(inbox, journal, read)
    first, bad, last = stream.poll()
    assert (first.number, bad.number, last.number) == (1, None, 2)
    assert str(bad) == "caf\\udce9.txt.gz is not taken: its name is not UTF-8; rename it"
    os.rename(inbox / name, inbox / "café.txt.gz")
    assert seen(stream) == {"café.txt.gz": (3, "")}


def test_a_reader_without_classes_is_asked_for_them(inbox, journal):
    reader = FirstDecides()
    with pytest.raises(ValueError, match="how many classes there are"):
        _ = Folder(inbox, journal, reader).classes
    reader.classes = 2
    assert Folder(inbox, journal, reader).classes == 2


def test_a_full_disk_stops_the_poll_and_nothing_is_lost(inbox, journal, monkeypatch):
    put(inbox, "a.txt.gz", range(10))
    put(inbox, "b.txt.gz", range(10))
    stream = Folder(inbox, journal, read)

    def full(path, line):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("moiety.anytime.journal.append_line", full)
        with pytest.raises(OSError, match="No space"):
            stream.poll()
    assert stream.known() == 0
    assert seen(stream) == {"a.txt.gz": (1, ""), "b.txt.gz": (2, "")}


def test_a_journal_among_the_data_and_a_folder_that_is_not_there_are_refused(inbox):
    with pytest.raises(ValueError, match="lies among the data"):
        Folder(inbox, inbox / "journal.jsonl", read)
    with pytest.raises(ValueError, match="is no folder"):
        Folder(inbox / "nowhere", inbox.parent / "journal.jsonl", read)


def test_kills_lose_no_mega_batch_and_use_none_twice(inbox, journal):
    """25 children are killed, 12 of them inside the write of a line, while files arrive."""
    kills, out = 25, journal.parent
    out.mkdir()
    script = Path(__file__).with_name("polls.py")
    command = [sys.executable, script, inbox, out, str(kills)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    before = list(Journal(journal))
    stream = Folder(inbox, journal, read)
    stream.poll()
    entries = list(stream.journal)
    assert entries[: len(before)] == before and len(before) > 5
    whole = {path.name for path in inbox.iterdir() if path.name[0].isdigit()}
    whole |= {f"half-{n - 3}.txt.gz" for n in range(6, 2 * kills + 2, 6)}
    assert sorted(entry.name for entry in entries) == sorted(whole)
    # What a killed process has used is what the journal says today, in the same order.
    names = {entry.number: entry.name for entry in entries}
    totals = {batch.number: sum(values_of(batch)) for batch in stream}
    used = [line.split() for line in read_lines(out / "used")]
    assert len({process for process, *_ in used}) >= 13  # of those that were not killed inside
    assert len(read_lines(out / "inside")) == 12
    for _, number, name, total in used:
        assert names[int(number)] == name and totals[int(number)] == int(total)
