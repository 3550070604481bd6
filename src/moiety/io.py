"""Files that are either whole or untouched.

    write_json("out/result.json", {"accuracy": 0.97})

A file is written beside its target, synced and renamed, so that a crash, a full disk or a reader
at the wrong moment never meets half of it.

    with lease("out"):
        ...  # no other process that asks for the lease works in this folder meanwhile

For tests, MOIETY_FAULT="write:3" in the environment kills the process with SIGKILL at its third
atomic write, between writing and renaming. Unset, as it is by default, it does nothing.
"""

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

LOCK, HOLDER = ".lease.lock", ".lease.json"
BEAT, DEAD, POLL = 10.0, 60.0, 0.05  # seconds


def write_atomic(path: str | os.PathLike[str], data: str | bytes) -> Path:
    """Write `data` to `path` in one step; on any failure the old content stays as it was.

    Folders that are missing are made. Text is written as UTF-8. A symbolic link stays one:
    the file it points to is replaced.
    """
    path = Path(path)
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    # Same folder as the target: a rename is atomic only within one file system.
    beside = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        with open(beside, "xb") as file:
            file.write(data.encode("utf-8") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, beside)
        _fault()
        os.replace(beside, target)
    except BaseException:  # an interrupt must not leave the temporary file behind either
        beside.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)
    return path


def publish(made: Path, folder: Path, *, last: str, old: re.Pattern[str]) -> None:
    """Move all files from one folder to another, synced; `last` tells that they are all there.

    The `last` of what lay there before goes first, and then what else has a name like `old`.
    """
    files = [path for path in sorted(made.rglob("*")) if path.is_file()]
    for path in files:  # what cannot be written leaves the old as it is
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        (folder / path.relative_to(made)).parent.mkdir(parents=True, exist_ok=True)
    (folder / last).unlink(missing_ok=True)
    sync_folder(folder)
    for path in folder.iterdir():
        if old.fullmatch(path.name):
            path.unlink()
    for path in sorted(files, key=lambda path: path == made / last):
        if path == made / last:
            sync_folder(folder)
        path.replace(folder / path.relative_to(made))
    sync_folder(folder)


HALF = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


def sweep(folder: str | os.PathLike[str]) -> None:
    """Remove what killed processes left of the files that they wrote in a folder and below."""
    for path in Path(folder).rglob(".*.tmp"):
        if HALF.fullmatch(path.name) and path.is_file():
            path.unlink()


# A list of plain values, which takes one line; a string has no line breaks, so none is touched.
NUMBERS = re.compile(r"\[\n\s+([^\[\]{}\"]*?)\n\s+\]")


def write_json(path: str | os.PathLike[str], value: Any) -> Path:
    """Write `value` as readable JSON in one step; what JSON cannot hold raises before any write.

    NaN and infinities are refused, because no other JSON reader accepts them.
    """
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
        text = NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
        # A lone surrogate passes through JSON and fails only as bytes.
        data = f"{text}\n".encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: the value cannot be written as JSON: {error}.") from error
    return write_atomic(path, data)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file; content that is not JSON raises a `ValueError` that names the file."""
    try:
        return json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable JSON ({error}); restore or delete it.") from error


def append_line(path: str | os.PathLike[str], line: str) -> None:
    """Append one line and sync it; what a crash left of a last line without an end is cut off."""
    if "\n" in line:
        raise ValueError(f"{path}: a line cannot hold a line break; write {line!r} as two.")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with open(path, "ab+") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())
    if new:
        sync_folder(path.parent)


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Read the whole lines of a file, none when it is missing; a torn last line is left out."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    try:
        return data[: data.rfind(b"\n") + 1].decode().split("\n")[:-1]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not readable text ({error}); restore or delete it.") from error


@contextlib.contextmanager
def lease(folder: str | os.PathLike[str], *, wait: float | None = None) -> Iterator[None]:
    """Be the only process that works in `folder`; it is made where it is missing.

    While another holds it: a `ValueError` that names host and process, at once or after `wait`
    seconds. The kernel drops the lock of a process that ends, however it ends. A holder on
    another host, whose lock this kernel may not see, counts as dead once its heartbeat (the
    time of the holder's file) is a minute old.
    """
    if importlib.util.find_spec("fcntl") is None:
        raise ValueError("Windows cannot lease a folder; run Moiety on Linux, macOS or WSL.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + (wait or 0)
    with open(folder / LOCK, "ab") as lock:
        # A forked worker shares the lock; it must not keep it when its parent is killed.
        os.register_at_fork(after_in_child=lock.close)
        while not _take(folder, lock.fileno()):
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"{folder} is in use by {_describe(folder)}; "
                    "wait for it to end, or choose another folder."
                )
            time.sleep(POLL)
        with _heartbeat(folder / HOLDER):
            yield


def _take(folder: Path, lock: int) -> bool:
    """Try to lock the folder against this host and others; say whether it is ours now."""
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if _alive_elsewhere(folder):
        fcntl.flock(lock, fcntl.LOCK_UN)
        return False
    return True


def _holder(folder: Path) -> dict[str, Any]:
    """Read who holds the folder; nothing where that is missing or damaged."""
    try:
        holder = read_json(folder / HOLDER)
    except (OSError, ValueError):
        return {}
    whole = isinstance(holder, dict) and {"host", "process", "start"} <= holder.keys()
    return holder if whole else {}


def _alive_elsewhere(folder: Path) -> bool:
    """Tell whether another host's heartbeat is fresh, by the clock of the file system."""
    if _holder(folder).get("host", socket.gethostname()) == socket.gethostname():
        return False
    os.utime(folder / LOCK)  # the clocks of two hosts may differ; that of the folder is one
    try:
        beat = (folder / HOLDER).stat().st_mtime
    except FileNotFoundError:
        return False
    return (folder / LOCK).stat().st_mtime - beat < DEAD


def _describe(folder: Path) -> str:
    """Name the holder of a folder in a few words."""
    holder = _holder(folder)
    if not holder:
        return "another process"
    return f"process {holder['process']} on host {holder['host']} since {holder['start']}"


@contextlib.contextmanager
def _heartbeat(path: Path) -> Iterator[None]:
    """Say in the file at `path` who we are, and touch it until the block ends."""
    start = datetime.now().astimezone().isoformat(timespec="seconds")
    write_json(path, {"host": socket.gethostname(), "process": os.getpid(), "start": start})
    ended = threading.Event()
    # The open file is touched, not the path: there may be another holder's file by then.
    with open(path, "rb") as file:

        def beat() -> None:
            while not ended.wait(BEAT):
                with contextlib.suppress(OSError):  # a network that is away for a moment
                    os.utime(file.fileno())

        thread = threading.Thread(target=beat, name=f"lease of {path.parent}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    path.unlink()


def _fault() -> None:
    """Count MOIETY_FAULT="write:N" down at each write, and die at the last: a test's power cut."""
    word, _, count = os.environ.get("MOIETY_FAULT", "").partition(":")
    if word != "write":
        return
    if int(count) <= 1:
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ["MOIETY_FAULT"] = f"write:{int(count) - 1}"


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut, where folders can be synced at all."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
