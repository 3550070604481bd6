"""Files that arrive in a folder: which of them are whole.

    for path in candidates(folder):
        proof = prove(path)                      # raises Incomplete, with the reason

| file | what proves that it is whole |
|---|---|
| .gz, .xz, .bz2 | the checksum in its trailer |
| .zip, .npz | the directory at its end, and the checksum of every part |
| .parquet | the footer |
| any other (.csv, .jsonl, .txt, …) | NAME.done beside it, with size and SHA-256 |

NAME.done decides for every kind of file where it is there: "SIZE SHA256", and what follows on the
line is ignored, so that `echo $(stat -c %s F) $(sha256sum F) > F.done` writes it. Without it, a
plain file can be taken once nothing has touched it for `settle` seconds, which proves nothing.
Names that start with "." or end in .part or .tmp are somebody's work in progress.
"""

from __future__ import annotations

import lzma
import os
import stat
import struct
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from ..tables import DAMAGED, LIMIT, PACKED, open_packed
from .journal import Stamp, file_sha256

DONE = ".done"
UNFINISHED = (".part", ".tmp")
PIECE = 2**20  # bytes read at once


class Incomplete(ValueError):
    """A file that cannot become a mega-batch yet; the text says why."""


@dataclass(frozen=True)
class Proof:
    """What a whole file is; with a warning where it only seems to be whole."""

    stamp: Stamp  # when it was found whole
    sha256: str
    warning: str = ""


def candidates(folder: Path) -> list[Path]:
    """What may become a mega-batch, in the order of the names."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} is no folder; make it, or give the one that fills") from None
    return [
        folder / name
        for name in names
        if not name.startswith(".") and not name.lower().endswith((*UNFINISHED, DONE))
    ]


def prove(path: Path, *, settle: float | None = None) -> Proof:
    """Prove that a file is whole; raises `Incomplete` with the reason."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe would wait for its writer
            raise Incomplete("it is no file; put a file for each mega-batch into the folder")
        before = Stamp.of(path)
        sha256 = file_sha256(path)
        warning = _prove(path, before.size, sha256, settle)
        if Stamp.of(path) != before:
            raise Incomplete("it is still being written")
    except FileNotFoundError:
        raise Incomplete("it vanished while it was looked at") from None
    except OSError as error:
        raise Incomplete(f"it cannot be read ({error.strerror or error})") from None
    return Proof(before, sha256, warning)


def _prove(path: Path, size: int, sha256: str, settle: float | None) -> str:
    """Look for what proves this kind of file; return the warning, if there is one."""
    done = path.with_name(path.name + DONE)
    suffix = path.suffix.lower()
    if done.exists():
        _check_done(done, size, sha256)
    elif not size:
        raise Incomplete("it is empty")
    elif suffix in PACKED:
        _check_packed(path)
    elif suffix in (".zip", ".npz"):
        _check_zip(path)
    elif suffix == ".parquet":
        _check_parquet(path, size)
    elif settle is None:
        raise Incomplete(
            f"nothing proves that it is whole; write its size and SHA-256 into {done.name}, pack "
            "it (.gz), or give --settle (in Python, settle=…)"
        )
    else:
        return _check_settled(path, settle)
    return ""


def _check_done(done: Path, size: int, sha256: str) -> None:
    words = done.read_text("utf-8", "replace").split()
    if len(words) < 2 or not words[0].isdecimal() or len(words[1]) != 64:
        raise Incomplete(f"{done.name} does not hold SIZE SHA256 of it")
    if int(words[0]) != size:
        raise Incomplete(f"it has {size} bytes, and {done.name} says {words[0]}")
    if words[1].lower() != sha256:
        raise Incomplete(f"its SHA-256 is not the one in {done.name}")


def _check_packed(path: Path) -> None:
    """Unpack all of it: the trailer holds a checksum of what comes out."""
    try:
        with open_packed(path) as file:
            while file.read(PIECE):
                pass
    except (ValueError, OSError, EOFError) as error:
        met = error.__context__  # `open_packed` says that it is damaged, too: not twice
        why = met if isinstance(met, DAMAGED) else error
        raise Incomplete(f"it is cut off or damaged ({_first(why)})") from None


def _check_zip(path: Path) -> None:
    wrong = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError)
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(part.file_size for part in archive.infolist())
            if unpacked > LIMIT:
                raise Incomplete(f"it unpacks to more than {LIMIT / 2**30:.3g} GiB; give parts")
            bad = archive.testzip()
    except Incomplete:
        raise
    # zipfile raises the last two for a password and for a packing it does not know.
    except (*wrong, RuntimeError, NotImplementedError) as error:
        raise Incomplete(f"it is cut off or damaged ({_first(error)})") from None
    if bad is not None:
        raise Incomplete(f"it is damaged (the checksum of {bad} in it is wrong)")


def _check_parquet(path: Path, size: int) -> None:
    """PAR1, columns, footer, length of the footer, PAR1; the footer is written last."""
    with open(path, "rb") as file:
        head = file.read(4)
        file.seek(max(0, size - 8))
        tail = file.read(8)
    if head != b"PAR1" or len(tail) < 8 or tail[4:] != b"PAR1":
        raise Incomplete("it has no Parquet footer: it is cut off or no Parquet file")
    if struct.unpack("<I", tail[:4])[0] > size - 12:
        raise Incomplete("its Parquet footer is longer than the file: it is damaged")


def _check_settled(path: Path, settle: float) -> str:
    found = os.stat(path)
    # A copy may carry an old time of modification while it is still being written.
    quiet = time.time() - max(found.st_mtime, found.st_ctime)
    if quiet < settle:
        raise Incomplete(f"it was touched less than {settle:g} s ago")
    return f"taken after {settle:g} s without a change, which does not prove that it is whole"


def _first(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
