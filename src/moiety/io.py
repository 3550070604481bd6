"""Files that are either whole or untouched.

    write_json("out/result.json", {"accuracy": 0.97})

A file is written beside its target, synced and renamed, so that a crash, a full disk or a reader
at the wrong moment never meets half of it.
"""

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any


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
        os.replace(beside, target)
    except BaseException:  # an interrupt must not leave the temporary file behind either
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)
    return path


def write_json(path: str | os.PathLike[str], value: Any) -> Path:
    """Write `value` as readable JSON in one step; what JSON cannot hold raises before any write.

    NaN and infinities are refused, because no other JSON reader accepts them.
    """
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
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


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut, where folders can be synced at all."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
