"""Fetch a file with a known checksum: it is there whole and right, or not at all."""

from __future__ import annotations

import hashlib
import http.client
import os
import secrets
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from ..io import write_atomic

CHUNK = 2**20
LIMIT = 2**30  # bytes of one download, and of one member of an archive
Progress = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all if known


def download(
    url: str, target: Path, *, md5: str, progress: Progress | None = None, limit: int = LIMIT
) -> Path:
    """Fetch `url` into `target`, beside which it is written until its checksum was found right."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    tick = progress or (lambda *_: None)
    try:
        with open(beside, "xb") as file:
            found = _fetch(url, file, lambda done, whole: tick(target.name, done, whole), limit)
            file.flush()
            os.fsync(file.fileno())
        if found != md5:
            raise ValueError(f"{url} gave another file than published (md5 {found}, not {md5})")
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    return target


def _fetch(url: str, file: BinaryIO, tick: Callable[[int, int | None], None], limit: int) -> str:
    """Copy what `url` gives into `file`; return its md5."""
    request = urllib.request.Request(url, headers={"User-Agent": "moiety"})
    digest, done = hashlib.md5(usedforsecurity=False), 0
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            said = reply.headers.get("Content-Length", "")
            whole = int(said) if said.isdigit() else None
            while chunk := reply.read(CHUNK):
                done += len(chunk)
                if done > limit:
                    raise ValueError(f"{url} gives more than {limit / 2**20:.0f} MiB; not taken")
                digest.update(chunk)
                file.write(chunk)
                tick(done, whole)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url} answered {error.code} {error.reason}") from None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise ValueError(f"{url} cannot be reached ({reason})") from None
    except http.client.HTTPException:
        raise ValueError(f"{url} broke off; try again") from None
    if whole is not None and done < whole:
        raise ValueError(f"{url} broke off after {done} of {whole} bytes; try again")
    return digest.hexdigest()


def unpack(archive: Path, folder: Path, wanted: Mapping[str, str], *, limit: int = LIMIT) -> None:
    """Write the members of a .tar.gz that are `wanted` (name and md5) into `folder`.

    A member is known by the end of its name only, so no name in the archive becomes a path.
    """
    left = dict(wanted)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = member.name.rsplit("/", 1)[-1]
                stream = tar.extractfile(member) if member.isfile() and name in left else None
                if stream is None:
                    continue
                if member.size > limit:
                    raise ValueError(f"{archive.name}: {name} is larger than {limit / 2**20} MiB")
                data = stream.read()
                if hashlib.md5(data, usedforsecurity=False).hexdigest() != left.pop(name):
                    raise ValueError(f"{archive.name}: {name} is not the file published")
                write_atomic(folder / name, data)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{archive.name} is no whole archive ({error}); get it again") from None
    if left:
        raise ValueError(f"{archive.name} lacks {', '.join(left)}; get it again")
