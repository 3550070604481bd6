"""Atomic files: whole, or untouched. A lease: one process in a folder at a time."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest

from moiety import io


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("data", ["naïve ∑\n", b"\x00\xff", ""])
def test_writes_text_and_bytes_and_makes_folders(tmp_path, data):
    path = io.write_atomic(tmp_path / "a" / "b.bin", data)
    assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert names(path.parent) == ["b.bin"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch, step, failure):
    path = io.write_atomic(tmp_path / "x.txt", "old")

    def fail(*_):
        raise failure

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(failure)):
        io.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["x.txt"]


def test_the_file_is_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def log_fsync(handle):
        calls.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def log_replace(source, target):
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(os, "replace", log_replace)
    io.write_atomic(tmp_path / "x", "data")
    assert calls == ["file", "rename", "folder"]


def test_permissions_are_kept_and_new_files_follow_the_umask(tmp_path):
    path = tmp_path / "x"
    old = os.umask(0o027)
    try:
        io.write_atomic(path, "1")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        io.write_atomic(path, "2")
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
    finally:
        os.umask(old)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    io.write_atomic(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_json_round_trip(tmp_path):
    value = {"arm": "dselect-k", "loss": [0.5, None], "name": "é"}
    assert io.read_json(io.write_json(tmp_path / "x.json", value)) == value


@pytest.mark.parametrize("value", [float("nan"), {"a": {1, 2}}, "\ud800"])
def test_what_json_cannot_hold_is_refused_before_any_write(tmp_path, value):
    path = io.write_json(tmp_path / "x.json", 1)
    with pytest.raises(ValueError, match=r"x\.json"):
        io.write_json(path, value)
    assert io.read_json(path) == 1


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff\xfe\x00", b"[" * 100_000])
def test_corrupt_json_is_named_in_one_sentence(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.json is not readable JSON") as caught:
        io.read_json(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_stays_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        io.read_json(tmp_path / "none.json")


def test_lines_are_appended_and_a_torn_one_is_left_out_and_cut_off(tmp_path):
    path = tmp_path / "a" / "x.jsonl"
    assert io.read_lines(path) == []
    io.append_line(path, "one")
    with open(path, "ab") as file:
        file.write("tör".encode()[:2])  # a kill in the middle of a letter
    assert io.read_lines(path) == ["one"]
    io.append_line(path, "two")
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_file_that_is_one_torn_line_starts_anew(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"half")
    assert io.read_lines(path) == []
    io.append_line(path, "whole")
    assert path.read_bytes() == b"whole\n"


def test_a_line_has_no_break_and_bytes_that_are_no_text_are_named(tmp_path):
    with pytest.raises(ValueError, match="line break"):
        io.append_line(tmp_path / "x", "a\nb")
    (tmp_path / "y").write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match="y is not readable text"):
        io.read_lines(tmp_path / "y")


def run_python(code, *arguments, **environment):
    """Start a process that runs `code` and says a word on its output."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def test_the_fault_point_kills_between_write_and_rename(tmp_path):
    code = "import sys; from moiety import io\nfor x in 'abc': io.write_atomic(sys.argv[1], x)"
    path = tmp_path / "x"
    process = run_python(code, path, MOIETY_FAULT="write:3")
    assert process.wait(30) == -signal.SIGKILL
    assert path.read_text() == "b"
    (left,) = set(names(tmp_path)) - {"x"}
    assert (tmp_path / left).read_text() == "c"


def test_a_lease_shuts_others_out_while_it_is_held_and_leaves_no_holder_behind(tmp_path):
    folder = tmp_path / "new" / "out"
    with io.lease(folder):
        with pytest.raises(ValueError, match=rf"out is in use by process {os.getpid()} on host "):
            io.lease(folder).__enter__()
        with io.lease(tmp_path / "other"):
            pass
    assert names(folder) == [".lease.lock"]
    with pytest.raises(KeyError), io.lease(folder):
        raise KeyError
    with io.lease(folder):
        pass


HOLD = """
import os, sys, time
from moiety import io
with io.lease(sys.argv[1]):
    child = os.fork()  # a worker that outlives the holder must not keep the lease
    if child:
        print(child, flush=True)
    time.sleep(60)
"""


def test_a_killed_holder_does_not_block(tmp_path):
    holder = run_python(HOLD, tmp_path)
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(ValueError, match="in use") as caught:
            io.lease(tmp_path).__enter__()
        assert f"process {holder.pid} on host {socket.gethostname()}" in str(caught.value)
        start = time.monotonic()
        with pytest.raises(ValueError, match="in use"):
            io.lease(tmp_path, wait=0.3).__enter__()
        assert time.monotonic() - start >= 0.3

        threading.Timer(0.3, holder.kill).start()
        with io.lease(tmp_path, wait=20):
            assert holder.wait() == -signal.SIGKILL
            assert io.read_json(tmp_path / io.HOLDER)["process"] == os.getpid()
        assert time.monotonic() - start < 10
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)


def test_who_waits_gets_the_lease_when_it_is_given_back(tmp_path):
    held, give_back = threading.Event(), threading.Event()

    def hold():
        with io.lease(tmp_path):
            held.set()
            give_back.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    threading.Timer(0.2, give_back.set).start()
    with io.lease(tmp_path, wait=10):
        assert give_back.is_set()
    thread.join()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"host": 3}', b"\xff"])
def test_a_damaged_holder_file_harms_nothing(tmp_path, content):
    with io.lease(tmp_path):
        (tmp_path / io.HOLDER).write_bytes(content)
        with pytest.raises(ValueError, match="in use by another process"):
            io.lease(tmp_path).__enter__()
    (tmp_path / io.HOLDER).write_bytes(content)
    with io.lease(tmp_path):
        assert io.read_json(tmp_path / io.HOLDER)["process"] == os.getpid()


@pytest.mark.parametrize(("age", "alive"), [(50, True), (70, False)])
def test_another_host_counts_as_dead_after_a_minute_without_a_beat(tmp_path, age, alive):
    holder = {"host": "elsewhere", "process": 7, "start": "noon"}
    path = io.write_json(tmp_path / io.HOLDER, holder)
    os.utime(path, (time.time() - age,) * 2)
    if alive:
        with pytest.raises(ValueError, match="process 7 on host elsewhere since noon"):
            io.lease(tmp_path).__enter__()
        assert io.read_json(path) == holder
    else:
        with io.lease(tmp_path):
            assert io.read_json(path)["host"] == socket.gethostname()


def test_the_heart_beats_in_our_file_and_never_in_that_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "BEAT", 0.01)
    path = tmp_path / io.HOLDER

    def beats(within):
        os.utime(path, (0, 0))
        end = time.monotonic() + within
        while time.monotonic() < end and path.stat().st_mtime == 0:
            time.sleep(0.01)
        return path.stat().st_mtime > 0

    with io.lease(tmp_path):
        assert beats(within=20)
        io.write_json(path, {"host": "elsewhere"})  # it took over while we were suspended
        assert not beats(within=0.2)
    assert io.read_json(path) == {"host": "elsewhere"}


def test_windows_is_told_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(ValueError, match="Windows cannot lease a folder"):
        io.lease(tmp_path).__enter__()
