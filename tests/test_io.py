"""Atomic files: whole, or untouched."""

import os
import stat

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
