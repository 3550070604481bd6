"""Which files of a folder are whole: proof by kind of file, by NAME.done, or by waiting."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import time
import zipfile

import numpy as np
import pytest

from moiety.anytime import arrivals
from moiety.anytime.arrivals import Incomplete, candidates, prove

CSV = b"a,label\n" + b"".join(b"%d,%d\n" % (n, n % 2) for n in range(300))


def as_zip():
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.csv", CSV)
        file.writestr("b.csv", CSV)
    return memory.getvalue()


def as_npz():
    memory = io.BytesIO()
    np.savez(memory, x=np.arange(200.0), y=np.arange(200))
    return memory.getvalue()


def as_parquet():
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    return pandas.DataFrame({"a": range(50), "label": [1, 0] * 25}).to_parquet()


PROVEN = {
    "a.csv.gz": lambda: gzip.compress(CSV),
    "two.jsonl.gz": lambda: gzip.compress(CSV) + gzip.compress(CSV),
    "a.csv.xz": lambda: lzma.compress(CSV),
    "a.txt.bz2": lambda: bz2.compress(CSV),
    "a.zip": as_zip,
    "A.NPZ": as_npz,
    "a.parquet": as_parquet,
}


def done_of(path):
    data = path.read_bytes()
    done = path.with_name(path.name + ".done")
    done.write_text(f"{len(data)} {hashlib.sha256(data).hexdigest()}  {path.name}\n")
    return done


@pytest.mark.parametrize("name", PROVEN)
def test_a_whole_file_is_proven(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(PROVEN[name]())
    proof = prove(path)
    assert proof.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert proof.stamp.size == path.stat().st_size and proof.warning == ""


@pytest.mark.parametrize("name", [name for name in PROVEN if name != "two.jsonl.gz"])
def test_a_half_written_file_is_not_whole_wherever_it_ends(tmp_path, name):
    path, whole = tmp_path / name, PROVEN[name]()
    ends = {0, 1, 4, 8, 9, len(whole) // 2, *range(len(whole) - 12, len(whole))}
    for end in sorted(ends):
        path.write_bytes(whole[:end])
        with pytest.raises(Incomplete):
            prove(path)
    path.write_bytes(whole[:-40] + bytes(40))  # the place was reserved, and not filled yet
    with pytest.raises(Incomplete):
        prove(path)


@pytest.mark.parametrize("name", ["a.csv.gz", "a.csv.xz", "a.txt.bz2", "a.zip", "A.NPZ"])
def test_a_flipped_bit_is_found(tmp_path, name):
    path, data = tmp_path / name, bytearray(PROVEN[name]())
    data[len(data) // 3] ^= 16
    path.write_bytes(data)
    with pytest.raises(Incomplete, match="damaged"):
        prove(path)


def test_a_parquet_footer_that_cannot_be_is_damaged(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1" + (9).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(Incomplete, match="footer is longer than the file"):
        prove(path)


def test_a_gzip_file_with_something_after_it_is_damaged(tmp_path):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(CSV) + b"and more")
    with pytest.raises(Incomplete, match="damaged"):
        prove(path)


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(arrivals, "LIMIT", 1000)
    path = tmp_path / "a.zip"
    path.write_bytes(as_zip())
    with pytest.raises(Incomplete, match="unpacks to more than"):
        prove(path)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt", "a.tsv", "noending"])
def test_plain_files_need_a_done_beside_them(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(CSV)
    with pytest.raises(Incomplete, match=f"write its size and SHA-256 into {name}.done"):
        prove(path)
    done_of(path)
    assert prove(path).warning == ""


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_a_done_that_does_not_fit_is_refused_for_every_kind(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(CSV))
    done = done_of(path)
    right = done.read_text()
    size, sha256 = right.split()[:2]
    wrong = {
        "": "does not hold SIZE SHA256",
        size: "does not hold SIZE SHA256",
        f"{size} {sha256[:30]}": "does not hold SIZE SHA256",  # half-written
        f"many {sha256}": "does not hold SIZE SHA256",
        f"{int(size) + 1} {sha256}": f"it has {size} bytes",
        f"{size} {'0' * 64}": "its SHA-256 is not the one",
    }
    for text, reason in wrong.items():
        done.write_text(text)
        with pytest.raises(Incomplete, match=reason):
            prove(path)
    done.write_text(right.upper().replace("A.CSV", "a.csv"))
    prove(path)


def test_settling_waits_and_warns_and_an_old_time_does_not_hide_a_fresh_file(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_bytes(CSV)
    os.utime(path, (1, 1))  # as `cp -p` sets it
    with pytest.raises(Incomplete, match="touched less than 5 s ago"):
        prove(path, settle=5)
    now = time.time()
    monkeypatch.setattr(arrivals.time, "time", lambda: now + 6)
    assert "does not prove that it is whole" in prove(path, settle=5).warning
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(CSV)[:-1])
    with pytest.raises(Incomplete, match="cut off"):  # a format that can prove it must
        prove(tmp_path / "b.csv.gz", settle=5)


def test_a_file_that_grows_while_it_is_looked_at_is_not_taken(tmp_path, monkeypatch):
    path, check = tmp_path / "a.csv.gz", arrivals._check_packed
    path.write_bytes(gzip.compress(CSV))

    def meanwhile(path):
        check(path)
        path.write_bytes(path.read_bytes() + gzip.compress(CSV))

    monkeypatch.setattr(arrivals, "_check_packed", meanwhile)
    with pytest.raises(Incomplete, match="still being written"):
        prove(path)


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv.gz")
    (tmp_path / "folder").mkdir()
    for name in ("pipe.csv.gz", "folder"):
        with pytest.raises(Incomplete, match="it is no file"):
            prove(tmp_path / name)
    (tmp_path / "link.csv.gz").symlink_to("nowhere")
    for name in ("link.csv.gz", "gone.csv.gz"):
        with pytest.raises(Incomplete, match="vanished"):
            prove(tmp_path / name)


def test_a_file_that_may_not_be_read_says_so(tmp_path, monkeypatch):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(CSV))

    def denied(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(arrivals, "file_sha256", denied)
    with pytest.raises(Incomplete, match=r"cannot be read \(Permission denied\)"):
        prove(path)


def test_candidates_are_in_the_order_of_names_without_work_in_progress(tmp_path):
    work = [".hidden.csv.gz", "a.csv.gz.part", "a.tmp", "A.PART", "b.csv.done"]
    for name in ["b.csv", "a10.csv", "a9.csv", "B.csv", *work]:
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in candidates(tmp_path)] == ["B.csv", "a10.csv", "a9.csv", "b.csv"]
    with pytest.raises(ValueError, match="is no folder"):
        candidates(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is no folder"):
        candidates(tmp_path / "b.csv")
