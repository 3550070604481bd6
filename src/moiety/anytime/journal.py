"""The journal of a stream: which file is which mega-batch, synced before anything uses it.

    journal = Journal("out/journal.jsonl")
    entry = journal.append("monday.csv.gz", size=81920, sha256="9f86…", rows=5000)
    entry.number                                 # 1, 2, 3, … in the order of arrival
    journal.check(entry, folder)                 # raises where the file is not what it was

The journal, not the folder, is the stream. One line each:
{"number": 1, "name": "monday.csv.gz", "size": 81920, "sha256": "9f86…", "rows": 5000}. A process
may be killed at any moment: half a last line does not count, and is cut off by the next append.
Others may append meanwhile: numbers are given under a lock, by what the file holds then.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..io import append_line, read_lines, sync_folder

TICK = 2 * 10**9  # ns; the times of a file are no finer than this on some file systems


@dataclass(frozen=True)
class Entry:
    """One mega-batch of the journal."""

    number: int  # from 1, without gaps
    name: str
    size: int  # of the file, in bytes
    sha256: str
    rows: int  # examples in it


@dataclass(frozen=True)
class Stamp:
    """What tells, without reading a file, that it was touched."""

    inode: int
    size: int
    modified: int  # in ns; a tool may set it back,
    changed: int  # but not this one

    @property
    def fresh(self) -> bool:
        """Whether a further write now could leave the stamp as it is: clocks of files tick."""
        return time.time_ns() - self.changed < TICK

    @staticmethod
    def of(path: Path) -> Stamp:
        """The stamp of a file as it is now."""
        found = os.stat(path)
        return Stamp(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class Begun(ValueError):
    """Another process has given number 1 meanwhile; the text says so."""


class Journal:
    """Entries that are on disk; a line that cannot be right raises one sentence."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._entries = _load(self.path)
        self._right: dict[str, Stamp] = {}  # of files that this process found unchanged

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __getitem__(self, number: int) -> Entry:
        """The entry of a number, counted from 1."""
        if not 1 <= number <= len(self):
            raise IndexError(f"mega-batch {number} is not there; the journal holds {len(self)}")
        return self._entries[number - 1]

    def find(self, name: str) -> Entry | None:
        """The entry of a file's name, if it has one."""
        return next((entry for entry in self if entry.name == name), None)

    def reload(self) -> None:
        """Take over what another process has added; raises where what was there is gone."""
        entries = _load(self.path)
        if entries[: len(self)] != self._entries:
            raise ValueError(
                f"{self.path} no longer begins with the {len(self)} mega-batches that it held; "
                "restore the journal"
            )
        self._entries = entries

    def append(self, name: str, *, size: int, sha256: str, rows: int, first: bool = False) -> Entry:
        """Write the next entry and sync it; only then may the file be used.

        Where another process has just taken the same file, its entry is the one. With `first`, it
        must become mega-batch 1: raises `Begun` where there is one by now.
        """
        self._refuse(name)
        with _lock(self.path):
            self.reload()
            old = self.find(name)
            if old is not None and (old.size, old.sha256, old.rows) == (size, sha256, rows):
                return old
            self._refuse(name)
            if first and len(self):
                raise Begun(f"{self.path} has begun meanwhile with {self[1].name}; look again")
            entry = Entry(len(self) + 1, name, size, sha256, rows)
            try:
                append_line(self.path, json.dumps(asdict(entry)))
            except OSError:
                # The line may be whole on the disk although the sync failed: only the file knows.
                self._entries = _load(self.path)
                raise
            self._entries.append(entry)
            return entry

    def _refuse(self, name: str) -> None:
        old = self.find(name)
        if old is not None:
            raise ValueError(
                f"{name} came again: mega-batch {old.number} has that name; give new data a new one"
            )

    def check(self, entry: Entry, folder: Path) -> Path:
        """The path of an entry's file; raises where it changed or vanished.

        A file is read once, and again only after something touched it.
        """
        path, what = folder / entry.name, f"mega-batch {entry.number} of {self.path}"
        try:
            stamp = Stamp.of(path)
            if self._right.get(entry.name) == stamp:
                return path
            same = stamp.size == entry.size and file_sha256(path) == entry.sha256
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"{path} vanished, which is {what}; put it back") from None
        if not same:
            raise ValueError(
                f"{path} changed since it became {what}; put the old file back and give new data "
                "a new name"
            )
        if not stamp.fresh:
            self._right[entry.name] = stamp
        return path


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Be the only one that appends to a journal; the kernel drops the lock with the process.

    It is on the journal itself: whoever runs a stream already has the lease of the folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        if not file.tell():  # it may be new
            sync_folder(path.parent)
        if importlib.util.find_spec("fcntl") is not None:  # not on Windows, which has no runs
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _load(path: Path) -> list[Entry]:
    entries: list[Entry] = []
    for line in read_lines(path):
        number = len(entries) + 1
        entry = _parse(line)
        if entry is None or entry.number != number:
            raise ValueError(
                f"{path}, line {number}, is not the entry of mega-batch {number}; restore the "
                "journal, or start anew in another folder"
            )
        entries.append(entry)
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{path} holds {twice} twice; restore the journal")
    return entries


def _parse(line: str) -> Entry | None:
    """The entry of a line, or none where it is no such thing."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    kinds = {
        field.name: str if field.name in ("name", "sha256") else int for field in fields(Entry)
    }
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        return None
    if any(type(values[name]) is not kind for name, kind in kinds.items()):
        return None
    return Entry(**values)
