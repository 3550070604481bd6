"""Tables that others made: .csv, .tsv, .jsonl, .parquet; the first three also packed (.gz, .zip).

    frame = read_table("people.csv.gz")          # a pandas.DataFrame
    frame = read_table("tweets.jsonl", limit=512)

Nothing is unpickled, and what a packed file unpacks to has a limit.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # pandas takes half a second to load
    import pandas

TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
PACKED = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, zipfile.BadZipFile)
LIMIT = 4 * 2**30  # bytes, unpacked
HEAD = 2**16  # bytes that tell whether a file is text
HEAD_CHARACTERS = 2**20  # that tell whether quotes quote
# What stands for "nothing here". Not "None": that is the name of a class in many sets.
MISSING = ["", "?", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "#N/A", "<NA>"]


def table_kind(path: Path) -> str | None:
    """The suffix of a table without that of its packing, or none: "a.csv.gz" is ".csv"."""
    name = path.name.lower()
    # Parquet packs inside, by brotli too, and some name the file by it.
    for packing in (*PACKED, ".zip", ".brotli"):
        name = name.removesuffix(packing)
    return next((suffix for suffix in TABLES if name.endswith(suffix)), None)


def read_table(path: str | Path, *, limit: int | None = None) -> pandas.DataFrame:
    """Read a table, or its first `limit` rows; what is wrong with it is said in one sentence."""
    path = Path(path)
    kind = table_kind(path)
    if kind is None:
        raise ValueError(f"{path.name}: a table must be one of {', '.join(TABLES)}")
    if kind == ".parquet":
        return _read_parquet(path, limit)
    if kind == ".jsonl":
        import pandas

        return pandas.DataFrame(list(_objects(path, limit)))
    return _read_csv(path, "\t" if kind == ".tsv" else ",", limit)


def read_lines(path: str | Path, *, limit: int | None = None) -> list[str]:
    """The lines of a text file that are not empty, stripped; what is no text is refused."""
    with open_packed(path) as packed:
        file = io.TextIOWrapper(packed, _encoding(packed, path), "replace")
        return list(islice((line.strip() for line in file if line.strip()), limit))


def _encoding(packed: io.BufferedReader, path: str | Path) -> str:
    """UTF-8, or UTF-16 where a file begins by saying so."""
    head, name = packed.peek(HEAD)[:HEAD], Path(path).name
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if b"\0" in head:
        raise ValueError(f"{name} is no text: it holds zero bytes; give a text file or a table")
    return "utf-8-sig"


def read_jsonl(path: str | Path, *, limit: int | None = None) -> list[Any]:
    """The JSON value of every line."""
    rows = []
    for number, line in enumerate(read_lines(path, limit=limit), start=1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            raise ValueError(f"{Path(path).name}, example {number}: this is not JSON") from None
    return rows


def open_packed(path: str | Path, *, limit: int = LIMIT) -> io.BufferedReader:
    """Open a file for reading, unpacked where its name says that it is packed.

    Of .zip only those of a table, such as a.csv.zip, which hold that one file.
    """
    path = Path(path)
    opened: Any = PACKED.get(path.suffix.lower(), open)
    if path.suffix.lower() == ".zip" and table_kind(path) is not None:
        opened = _open_zip
    stream: Any = opened(path, "rb")
    return io.BufferedReader(_Limited(stream, path.name, limit), 2**20)


def _open_zip(path: Path, mode: str) -> Any:
    """The one file of an archive; those that macOS adds do not count."""
    try:
        with zipfile.ZipFile(path) as archive:  # stays open for what is opened in it
            names = [name for name in archive.namelist() if not name.startswith("__MACOSX/")]
            if len(names) != 1:
                raise ValueError(f"{path.name} holds {len(names)} files; pack one table in it")
            return archive.open(names[0])
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{path.name} is damaged ({error}); get it again") from None


class _Limited(io.RawIOBase):
    """A stream that refuses to give more than `limit` bytes: a packed file may be a bomb."""

    def __init__(self, stream: Any, name: str, limit: int) -> None:
        self.stream, self.name, self.limit, self.left = stream, name, limit, limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self.stream.read(len(buffer))
        except DAMAGED as error:
            raise ValueError(f"{self.name} is damaged ({error}); get it again") from None
        self.left -= len(data)
        if self.left < 0:
            raise ValueError(
                f"{self.name} holds more than {self.limit / 2**30:.3g} GiB; give a part of it"
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self.stream.close()
        super().close()


def _read_csv(path: Path, separator: str, limit: int | None) -> pandas.DataFrame:
    import pandas

    words: dict[str, Any] = {"sep": separator, "skipinitialspace": True, "nrows": limit}
    words |= {"keep_default_na": False, "na_values": MISSING, "low_memory": False}
    words |= {"encoding_errors": "replace"}
    if separator == "\t":
        words["quoting"] = _tsv_quoting(path)
    _check_header(path, separator)
    try:
        with open_packed(path) as file:
            encoding = _encoding(file, path)
            frame = pandas.read_csv(file, index_col=False, encoding=encoding, **words)
    except pandas.errors.EmptyDataError:
        raise ValueError(f"{path.name} is empty; its first line must name the columns") from None
    except pandas.errors.ParserError as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{path.name} cannot be read: {first}") from None
    frame.columns = [str(name).strip() for name in frame.columns]
    return frame


def _tsv_quoting(path: Path) -> int:
    """Whether quotes quote: in many tab-separated files (tweets) they are just characters."""
    with open_packed(path) as packed:
        file = io.TextIOWrapper(packed, _encoding(packed, path), "replace")
        lines = file.read(HEAD_CHARACTERS).split("\n")
        if len(lines) > 1 and file.read(1):  # the last one is cut
            lines.pop()
    cells = [cell for line in lines for cell in line.split("\t")]
    opened = [cell for cell in cells if cell.startswith('"')]
    whole = [cell for cell in opened if len(cell) > 1 and cell.endswith('"')]
    return csv.QUOTE_MINIMAL if len(whole) == len(opened) else csv.QUOTE_NONE


def _check_header(path: Path, separator: str) -> None:
    """Raise where the first row names a column twice, or looks like data."""
    with open_packed(path) as packed:
        file = io.TextIOWrapper(packed, _encoding(packed, path), "replace")
        row = next(csv.reader(file, delimiter=separator, skipinitialspace=True), [])
    names = [cell.strip() for cell in row]
    twice = sorted({name for name in names if name and names.count(name) > 1})
    numbers = [(place, cell) for place, cell in enumerate(names) if _is_number(cell)]
    # Columns may be called 0, 1, 2 … or by years; a row of data is no such series.
    series = [float(cell) - place for place, cell in numbers]
    if numbers and (len(numbers) == 1 or len(set(series)) > 1):
        shown = separator.join(names[:4])
        raise ValueError(
            f"{path.name} seems to have no header, its first row is {shown!r}…; "
            "put a row with the names of the columns on top"
        )
    if twice:
        raise ValueError(f"{path.name} has two columns {twice[0]!r}; rename one of them")


def _is_number(cell: str) -> bool:
    try:
        return float(cell) == float(cell)  # a column may be called "nan"
    except ValueError:
        return False


def _read_parquet(path: Path, limit: int | None) -> pandas.DataFrame:
    import pandas

    try:
        frame = pandas.read_parquet(path)
    except ImportError:
        raise ValueError("a .parquet file needs pyarrow: pip install 'moiety[lab]'") from None
    except (ValueError, OSError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{path.name} cannot be read: {first}") from None
    return frame if limit is None else frame.head(limit)


def _objects(path: Path, limit: int | None) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(read_jsonl(path, limit=limit), start=1):
        if not isinstance(row, dict):
            raise ValueError(
                f"{path.name}, example {number}: a line must be an object such as "
                '{"text": "…", "label": "…"}'
            )
        yield row
