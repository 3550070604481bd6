"""The journal: synced before use, whole after any crash, and never in doubt about a file."""

import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from moiety.anytime import journal as module
from moiety.anytime.journal import Begun, Journal


def add(journal, folder, name, data=b"data"):
    (folder / name).write_bytes(data)
    return journal.append(name, size=len(data), sha256=hashlib.sha256(data).hexdigest(), rows=3)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "out" / "journal.jsonl")


def test_numbers_count_from_one_and_come_back(journal, folder):
    entries = [add(journal, folder, name) for name in ("b.csv", "a.csv", "tab\tnew\nline é.csv")]
    assert [entry.number for entry in entries] == [1, 2, 3]
    again = Journal(journal.path)
    assert list(again) == entries and again[2].name == "a.csv" and len(again) == 3
    line = json.loads(journal.path.read_text().splitlines()[0])
    sha256 = hashlib.sha256(b"data").hexdigest()
    assert line == {"number": 1, "name": "b.csv", "size": 4, "sha256": sha256, "rows": 3}


def test_a_name_that_is_no_text_survives(journal, folder):
    name = os.fsdecode(b"caf\xe9.csv")  # Latin-1: not UTF-8
    add(journal, folder, name)
    assert Journal(journal.path)[1].name == name


def test_numbers_outside_are_refused(journal, folder):
    add(journal, folder, "a.csv")
    for number in (0, 2, -1):
        with pytest.raises(IndexError, match="the journal holds 1"):
            journal[number]


def test_a_line_torn_at_any_byte_does_not_count_and_is_written_again(journal, folder):
    add(journal, folder, "a.csv")
    first = journal.path.read_bytes()
    second = add(journal, folder, "b.csv")
    whole = journal.path.read_bytes()
    for end in range(len(first), len(whole)):
        journal.path.write_bytes(whole[:end])
        torn = Journal(journal.path)
        assert len(torn) == 1
        assert torn.append("b.csv", size=4, sha256=second.sha256, rows=3) == second
        assert journal.path.read_bytes() == whole


def test_a_name_that_comes_again_is_refused(journal, folder):
    add(journal, folder, "a.csv")
    before = journal.path.read_bytes()
    with pytest.raises(ValueError, match=r"a.csv came again: mega-batch 1 has that name"):
        add(journal, folder, "a.csv")
    assert journal.path.read_bytes() == before


def test_a_stale_journal_appends_after_what_another_process_did(journal, folder):
    stale = Journal(journal.path)
    first = add(journal, folder, "a.csv")
    with pytest.raises(Begun, match=r"journal.jsonl has begun meanwhile with a.csv"):
        stale.append("b.csv", size=4, sha256="x", rows=3, first=True)
    stale = Journal(journal.path)
    add(journal, folder, "b.csv")
    assert add(stale, folder, "c.csv").number == 3
    assert list(stale) == list(Journal(journal.path)) and stale[1] == first
    assert add(journal, folder, "d.csv").number == 4


def test_what_another_process_took_is_taken_as_it_is_or_refused(journal, folder):
    stale, other = Journal(journal.path), Journal(journal.path)
    entry = add(journal, folder, "a.csv")
    assert add(stale, folder, "a.csv") == entry
    with pytest.raises(ValueError, match=r"a.csv came again: mega-batch 1 has that name"):
        add(other, folder, "a.csv", b"other data")
    assert list(stale) == list(other) == list(Journal(journal.path)) == [entry]


def test_many_that_append_at_once_give_each_number_once(journal):
    def fill(own):
        mine = Journal(journal.path)
        for number in range(20):
            for name in (f"{own}-{number}", f"all-{number}"):
                if mine.find(name) is None:
                    mine.append(name, size=4, sha256="x", rows=3)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fill, range(4)))
    assert len(Journal(journal.path)) == 4 * 20 + 20


def test_a_journal_that_lost_entries_is_not_added_to(journal, folder):
    add(journal, folder, "a.csv")
    journal.path.unlink()
    with pytest.raises(ValueError, match="no longer begins with the 1 mega-batches that it held"):
        add(journal, folder, "b.csv")
    assert journal.path.read_bytes() == b""


def test_an_entry_is_synced_before_it_can_be_used(journal, folder, monkeypatch):
    add(journal, folder, "a.csv")
    synced, fsync = [], os.fsync

    def spy(handle):
        fsync(handle)
        synced.append((len(journal), journal.path.read_bytes().count(b"\n")))

    monkeypatch.setattr(os, "fsync", spy)
    add(journal, folder, "b.csv")
    assert synced == [(1, 2)]  # the line was on disk, and the journal did not show it yet


@pytest.mark.parametrize("written", [True, False])
def test_a_full_disk_leaves_the_journal_as_the_file_is(journal, folder, monkeypatch, written):
    add(journal, folder, "a.csv")

    def full(path, line):
        if written:  # the sync failed after the write
            with open(path, "a") as file:
                file.write(line + "\n")
        else:
            with open(path, "a") as file:
                file.write(line[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "append_line", full)
    with pytest.raises(OSError, match="No space left"):
        add(journal, folder, "b.csv")
    monkeypatch.undo()
    assert list(journal) == list(Journal(journal.path)) and len(journal) == 1 + written
    assert add(journal, folder, "c.csv").number == 2 + written
    assert list(journal) == list(Journal(journal.path))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "not JSON",
        "[1]",
        '{"number": 2}',
        '{"number": 3, "name": "b", "size": 1, "sha256": "x", "rows": 1}',
        '{"number": "2", "name": "b", "size": 1, "sha256": "x", "rows": 1}',
        '{"number": 2, "name": "b", "size": 1, "sha256": "x", "rows": 1, "more": 1}',
    ],
)
def test_a_damaged_line_is_named(journal, folder, line):
    add(journal, folder, "a.csv")
    with open(journal.path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(
        ValueError, match=r"journal.jsonl, line 2, is not the entry of mega-batch 2"
    ):
        Journal(journal.path)


def test_a_journal_that_holds_a_name_twice_is_refused(journal, folder):
    add(journal, folder, "a.csv")
    with open(journal.path, "a") as file:
        file.write(journal.path.read_text().replace('"number": 1', '"number": 2'))
    with pytest.raises(ValueError, match=r"holds a.csv twice"):
        Journal(journal.path)


def test_a_file_that_changed_or_vanished_is_refused(journal, folder):
    entry = add(journal, folder, "a.csv", b"data")
    assert journal.check(entry, folder) == folder / "a.csv"
    for other in (b"datb", b"data and more", b""):
        (folder / "a.csv").write_bytes(other)
        with pytest.raises(ValueError, match=r"a.csv changed since it became mega-batch 1"):
            journal.check(entry, folder)
    (folder / "a.csv").unlink()
    with pytest.raises(ValueError, match=r"a.csv vanished, which is mega-batch 1"):
        journal.check(entry, folder)
    (folder / "a.csv").write_bytes(b"data")
    journal.check(entry, folder)


def test_a_file_is_read_again_only_after_it_was_touched(journal, folder, monkeypatch):
    entry = add(journal, folder, "a.csv")
    reads, sha256 = [], module.file_sha256
    monkeypatch.setattr(module, "file_sha256", lambda path: reads.append(path) or sha256(path))
    for _ in range(2):  # fresh: another write could leave the times as they are
        journal.check(entry, folder)
    assert len(reads) == 2
    now = time.time_ns()
    monkeypatch.setattr(module.time, "time_ns", lambda: now + 10 * module.TICK)
    for _ in range(3):
        journal.check(entry, folder)
    assert len(reads) == 3
    # A tool that sets the time of modification back does not hide a change.
    old = os.stat(folder / "a.csv")
    time.sleep(0.02)
    (folder / "a.csv").write_bytes(b"datb")
    os.utime(folder / "a.csv", ns=(old.st_atime_ns, old.st_mtime_ns))
    with pytest.raises(ValueError, match="changed"):
        journal.check(entry, folder)
