"""The teacher's representations on disk: computed once, read at every step.

    key = Key(teacher=teacher.weights_key(), input=inputs.digest, layer="cls", shape=(n, d))
    cache = Cache.open(folder, key)          # a cache of another teacher raises
    cache.build(fill)                        # what is missing; a kill costs the chunks in flight
    cache.take(rows)                         # [B, D] or [B, L, D]

    header.json     what is cached: the key
    values.bin      N records of one size, mapped into memory; rows past an example's tokens are 0
    chunks.jsonl    a line with the checksum of each chunk that is whole

A chunk that is damaged is computed again, in the same batches and so to the same bits. So no
chunk is synced: what a power cut takes, its checksum will tell.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import io
from ..train.graph import ALONE

if TYPE_CHECKING:
    from .encoders import Batch, Encoder

CHUNK = 64 * 2**20  # bytes that are written at once
DTYPES = ("float32", "bfloat16", "float16")
BATCH = 64  # examples that a teacher sees at once
WAITING = 3  # chunks that are computed and not written yet
PIECE = 8 * 2**20  # bytes that a hash fetches from a GPU at once


@dataclass(frozen=True, kw_only=True)
class Key:
    """What the cached values depend on."""

    teacher: str  # digests, see `Encoder.weights_key` and `look_through`
    input: str | None
    layer: str
    shape: tuple[int, ...]  # [N, L, D] or [N, D]
    dtype: str = "float32"

    @property
    def bytes(self) -> int:
        """How large the cache will be."""
        return math.prod(self.shape) * torch.empty((), dtype=self.torch_dtype).element_size()

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


class Cache:
    """Representations of N examples in a folder."""

    def __init__(self, folder: Path, key: Key) -> None:
        self.folder, self.key, self.batch = folder, key, BATCH
        self.values_path, self.lines_path = folder / "values.bin", folder / "chunks.jsonl"
        self.record = key.bytes // max(key.shape[0], 1)
        self.rows = max(CHUNK // (self.record * BATCH), 1) * BATCH  # of a chunk
        self.chunks = math.ceil(key.shape[0] / self.rows)
        self.mapped: Tensor | None = None
        self.pool = ThreadPoolExecutor(1)  # so that lines are in order
        self.writing: deque[Future[None]] = deque()
        self.failed = False

    @classmethod
    def open(cls, folder: str | os.PathLike[str], key: Key) -> Cache:
        """The cache in a folder, begun where there is none."""
        cache = cls(Path(folder), key)
        header = cache.folder / "header.json"
        wanted = {**asdict(key), "shape": list(key.shape), "rows": cache.rows, "batch": cache.batch}
        if not header.exists():
            io.write_json(header, wanted)
            return cache
        found = io.read_json(header)
        for name, value in wanted.items():
            if not isinstance(found, dict) or found.get(name) != value:
                what = "another teacher" if name == "teacher" else f"another {name}"
                raise ValueError(
                    f"{folder} caches the representations of {what}: delete it, or choose another "
                    "folder"
                )
        return cache

    # -- building ------------------------------------------------------------------------------

    def build(
        self,
        fill: Callable[[Tensor], Tensor],
        tick: Callable[[float], None] | None = None,
        *,
        wait: bool = True,
    ) -> None:
        """Compute what is missing; `fill` gives the records of the rows of a chunk.

        wait   False: return when all is computed, and write on until `settle`
        """
        self.settle()
        self.failed, whole = False, self.whole()
        missing = [c for c in range(self.chunks) if c not in whole]
        if missing:
            self._reserve()
        self._touch()
        try:
            for done, chunk in enumerate(missing, 1):
                # Fetched, hashed and written while the next one is computed.
                fetch = _fetching(fill(self.rows_of(chunk)))
                self.writing.append(self.pool.submit(self._write, chunk, fetch))
                if wait and len(self.writing) > WAITING:
                    self.writing[0].result()
                    self.writing.popleft()
                if tick:
                    tick(done / len(missing))
            if wait:
                self.settle()
        except BaseException:
            with contextlib.suppress(Exception):
                self.settle()  # what is computed is kept
            raise
        self.mapped = self._map()

    def settle(self) -> None:
        """Wait until all that is computed is written."""
        try:
            for one in self.writing:
                one.result()
        finally:
            self._drop()

    def _drop(self) -> None:
        """Write no more than what is being written."""
        for one in self.writing:
            one.cancel()
        wait_for(self.writing)
        self.writing.clear()

    def whole(self) -> set[int]:
        """The chunks that are on the disk as their checksums say; lines of others are removed."""
        lines = io.read_lines(self.lines_path)
        right = {line: chunk for line in lines if (chunk := self._whole(line)) is not None}
        if len(right) < len(lines):
            io.write_atomic(self.lines_path, "".join(f"{line}\n" for line in right))
        return set(right.values())

    def _whole(self, line: str) -> int | None:
        """The chunk that a line tells of, if the disk holds it; a damaged line tells nothing."""
        try:
            told = json.loads(line)
            chunk, checksum = told["chunk"], told["sha256"]
            known = chunk in range(self.chunks)
        except (ValueError, TypeError, KeyError):
            return None
        return chunk if known and self._checksum(chunk) == checksum else None

    def rows_of(self, chunk: int) -> Tensor:
        return torch.arange(chunk * self.rows, min((chunk + 1) * self.rows, self.key.shape[0]))

    def _write(self, chunk: int, fetch: Callable[[], Tensor]) -> None:
        """Put a chunk on the disk, and then its line: where that is, there is a whole chunk."""
        if self.failed:  # at a chunk before: this one would fail, too
            return
        try:
            data, start, written = _bytes(fetch()), chunk * self.rows * self.record, 0
            with open(self.values_path, "r+b") as file:
                while written < len(data):
                    written += os.pwrite(file.fileno(), data[written:], start + written)
            line = json.dumps({"chunk": chunk, "sha256": hashlib.sha256(data).hexdigest()})
            io.append_line(self.lines_path, line)
        except BaseException:
            self.failed = True
            raise

    def _checksum(self, chunk: int) -> str | None:
        """The checksum of what the disk holds of a chunk."""
        size = len(self.rows_of(chunk)) * self.record
        try:
            with open(self.values_path, "rb") as file:
                file.seek(chunk * self.rows * self.record)
                return hashlib.sha256(file.read(size)).hexdigest()
        except FileNotFoundError:
            return None

    def _reserve(self) -> None:
        held = self.values_path.stat().st_blocks * 512 if self.values_path.exists() else 0
        check_room(self.folder, self.key.bytes - held)

    def _touch(self) -> None:
        with open(self.values_path, "ab") as file:
            file.truncate(self.key.bytes)

    # -- reading -------------------------------------------------------------------------------

    def take(self, rows: Tensor) -> Tensor:
        """The records of some rows, on the CPU."""
        if self.mapped is None:
            raise ValueError(f"{self.folder} is not complete: call build first")
        return self.mapped.index_select(0, rows.cpu())

    def _map(self) -> Tensor:
        size = math.prod(self.key.shape)
        flat = torch.from_file(
            str(self.values_path), shared=False, size=size, dtype=self.key.torch_dtype
        )
        return flat.view(self.key.shape)

    def remove(self) -> None:
        """Give the disk back."""
        self._drop()
        self.mapped = None
        shutil.rmtree(self.folder, ignore_errors=True)


# -- what a key is made of -----------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """The processed examples, seen from outside."""

    digest: str | None  # None: examples come out different every time (random augmentation)
    longest: int  # tokens of the longest one


def look_through(encoder: Encoder, data: Any) -> Inputs:
    """Digest the examples as the encoder will see them."""
    digest, longest = hashlib.sha256(f"{len(data)} {encoder.input_key()}".encode()), 1
    for rows in torch.arange(len(data)).split(BATCH):
        raw = data.take(rows)
        if isinstance(raw, Tensor):  # images: what is done to them is in `input_key`
            _update(digest, "rows", raw)
            continue
        batch = encoder.batch(raw)
        for name in sorted(batch):
            _update(digest, name, batch[name])
        longest = max(longest, batch["attention_mask"].shape[1])
    return Inputs(None if _augmented(encoder, data) else digest.hexdigest(), longest)


def _augmented(encoder: Encoder, data: Any) -> bool:
    """Whether the same rows come out different the second time.

    So many, because what mirrors one in two leaves a few rows as they were now and then; and from
    everywhere, because data may be joined of several kinds.
    """
    count = min(len(data), 64)
    rows = torch.arange(count) * (len(data) - 1) // max(count - 1, 1)
    one, two = (encoder.batch(data.take(rows)) for _ in range(2))
    return any(not torch.equal(one[name], two[name]) for name in one)


def batches(encoder: Encoder, data: Any, size: int = BATCH) -> Iterator[Batch]:
    """All examples in order, processed."""
    for rows in torch.arange(len(data)).split(size):
        yield encoder.batch(data.take(rows))


def digest_of(name: str, value: Tensor) -> str:
    """A hash of a tensor and its name."""
    digest = hashlib.sha256()
    _update(digest, name, value)
    return digest.hexdigest()


def _update(digest: Any, name: str, value: Tensor) -> None:
    digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    if value.device.type != "cuda":
        digest.update(_bytes(flat.cpu()))
        return
    # By way of a little memory that is used again: fresh pages cost more than a hash of them.
    staged = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
    for piece in flat.split(PIECE):
        digest.update(_bytes(staged[: len(piece)].copy_(piece)))


def _bytes(value: Tensor) -> memoryview:
    """The values of a tensor of the CPU as they lie in memory, without a copy."""
    flat: Any = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _fetching(made: Tensor) -> Callable[[], Tensor]:
    """How another thread gets a tensor to the CPU, beside what the GPU does after it."""
    if made.device.type != "cuda":
        return made.cpu
    ready = torch.cuda.current_stream(made.device).record_event()

    def fetch() -> Tensor:
        with ALONE:
            beside = torch.cuda.Stream(made.device)
            beside.wait_event(ready)
            with torch.cuda.stream(beside):
                fetched = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
                fetched.copy_(made, non_blocking=True)
            beside.synchronize()
        return fetched

    return fetch


def put(records_BMD: Tensor, features_BLD: Tensor, real_BL: Tensor) -> None:
    """Make tokens records of one length, zero where there is none."""
    length = real_BL.shape[1]
    records_BMD[:, :length] = torch.where(real_BL[..., None], features_BLD, 0.0)
    records_BMD[:, length:] = 0.0


def check_room(folder: Path, size: int) -> None:
    """Raise where the disk of a folder has no room for a cache."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < size:
        raise ValueError(
            f"the teacher's representations take {told_bytes(size)} and {folder} has room for "
            f"{told_bytes(free)}: make room, or set a cache_limit below that"
        )


def told_bytes(size: float) -> str:
    """A size in words."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.3g} {unit}"
