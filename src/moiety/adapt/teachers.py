"""A teacher: the encoder of the round before, asked at every step or once for all.

    teacher = make_teacher(encoder, objective, data, inputs, out / "cache")
    teacher.online                               # None, or why every step runs the teacher
    teacher.ask(rows, batch, masks)              # its Target

What it says of an example follows from the example alone, so that it is cached where that is true.
A teacher is one or the other from its first step to its last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..train.graph import ALONE
from .cache import Cache, Inputs, Key, put, told_bytes
from .mixtures import coupling
from .objective import Objective, Target

if TYPE_CHECKING:
    from .encoders import Batch, Encoder

log = logging.getLogger(__name__)
SHARE = 0.25  # of a GPU's free memory that cached values may take


class Teacher:
    """A frozen encoder that says what it wants of every batch, anew each time."""

    def __init__(self, encoder: Encoder, objective: Objective, online: str | None) -> None:
        self.encoder, self.objective, self.online = frozen(encoder), objective, online

    def ask(self, rows: Tensor, batch: Batch, masks: Tensor) -> Target:
        """What it wants of these rows of the data, processed and masked like this."""
        return self.objective.target(self.encoder, batch, masks)

    def expect(self, rows: Tensor) -> None:
        """Hear which rows will be asked for next."""

    def close(self, done: bool) -> None:
        """Stop helpers and, when the training is done, give back the disk."""


class Cached(Teacher):
    """A teacher whose representations are on disk, and on the GPU where they are small."""

    def __init__(self, encoder: Encoder, objective: Objective, cache: Cache) -> None:
        super().__init__(encoder, objective, None)
        self.cache, self.device = cache, encoder.device
        self.pool = ThreadPoolExecutor(1)
        self.coming: tuple[Tensor, Future[Tensor]] | None = None
        self.values: Tensor | None = None

    def build(self, data: Any, tick: Callable[[float], None] | None = None) -> None:
        """Compute what the cache lacks."""
        self.values = self._room()
        key, kept = self.cache.key, torch.ones(len(data), dtype=torch.bool)  # on the disk already

        def fill(rows: Tensor) -> Tensor:
            kept[rows] = False
            if self.values is None:
                shape = (len(rows), *key.shape[1:])
                made = torch.empty(shape, dtype=key.torch_dtype, device=self.device)
            else:
                made = self.values[rows[0] : rows[-1] + 1]
            for part, some in zip(made.split(self.cache.batch), rows.split(self.cache.batch)):
                self.represent(part, data, some)
            return made

        # What is on the GPU need not be on the disk before the training begins.
        self.cache.build(fill, tick, wait=self.values is None)
        if self.values is not None:
            rows = kept.nonzero().squeeze(1)
            self.values[rows.to(self.device)] = self.cache.take(rows).to(self.device)
        if self.device.type == "cuda":
            self.encoder.to("meta")  # its work is done: the memory of its weights is free

    def _room(self) -> Tensor | None:
        """Where the values will lie on a GPU, where they are small."""
        if self.device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(self.device)
        key = self.cache.key
        if key.bytes >= SHARE * free:
            return None
        return torch.empty(key.shape, dtype=key.torch_dtype, device=self.device)

    @torch.no_grad()
    def represent(self, records: Tensor, data: Any, rows: Tensor) -> None:
        """Fill the records of some rows."""
        made = self.encoder.represent(self.encoder.batch(data.take(rows)))
        if self.objective.match == "cls":
            records.copy_(made.cls)
        else:
            put(records, made.features, made.real)

    def ask(self, rows: Tensor, batch: Batch, masks: Tensor) -> Target:
        values = self._values(rows)
        if self.objective.match == "hidden" and "attention_mask" in batch:
            length = batch["attention_mask"].shape[1]  # of the batch, which may be rounded up
            values = F.pad(values[:, :length], (0, 0, 0, max(length - values.shape[1], 0)))
        return Target(values=values)

    def expect(self, rows: Tensor) -> None:
        if self.values is None:  # read from the disk while the device works
            self.coming = (rows, self.pool.submit(self._read, rows))

    def _values(self, rows: Tensor) -> Tensor:
        if self.values is not None:
            return self.values[rows.to(self.device)]
        coming, self.coming = self.coming, None
        if coming is not None and torch.equal(coming[0], rows):
            return coming[1].result().to(self.device, non_blocking=True)
        return self._read(rows).to(self.device)

    def _read(self, rows: Tensor) -> Tensor:
        read = self.cache.take(rows)
        if self.device.type != "cuda":
            return read
        with ALONE:
            return read.pin_memory()

    def close(self, done: bool) -> None:
        self.pool.shutdown()
        try:
            self.cache.remove() if done else self.cache.settle()
        except Exception as error:  # the training itself is what counts
            log.warning("the cache is not whole and will be computed again: %s", error)
        finally:
            self.values = None


def cache_key(
    encoder: Encoder, objective: Objective, data: Any, inputs: Inputs, dtype: str = "float32"
) -> Key:
    """What a cache of this teacher would hold; its size is `.bytes`."""
    with torch.no_grad():
        one = encoder.represent(encoder.batch(data.take(torch.arange(1)))).features
    length = max(one.shape[1], inputs.longest)
    shape = (
        (len(data), one.shape[2]) if objective.match == "cls" else (len(data), length, one.shape[2])
    )
    return Key(
        teacher=encoder.weights_key(),
        input=inputs.digest,
        layer=f"last norm, {objective.match}",
        shape=shape,
        dtype=dtype,
    )


def why_online(
    encoder: Encoder,
    objective: Objective,
    key: Key,
    *,
    cache: bool = True,
    limit: int | None = None,
    uses: int | None = None,
) -> str | None:
    """Why a teacher is not cached; None: it is.

    uses    how many examples it will be asked for, where that is known
    """
    if not cache:
        return "no cache is wanted"
    if objective.match == "prediction":
        return "its predictions depend on the masks"
    if objective.match == "weights":
        return "its weights are all it says"
    if objective.match_routing:
        return "its routers are matched, too"
    if key.input is None:
        return "the input is augmented at random"
    if uses is not None and uses < key.shape[0]:
        return f"it is asked for {uses:,} of {key.shape[0]:,} examples"
    if limit is not None and key.bytes > limit:
        return f"{told_bytes(key.bytes)} are more than the cache limit of {told_bytes(limit)}"
    if why := coupling(encoder.model):
        return why
    return "it sees the padding of its batch" if encoder.sees_padding else None


def make_teacher(
    encoder: Encoder,
    objective: Objective,
    data: Any,
    inputs: Inputs,
    folder: Path,
    *,
    dtype: str = "float32",
    tick: Callable[[float], None] | None = None,
    **asked: Any,
) -> Teacher:
    """The teacher in its best form, with its cache built; the log says which form that is.

    asked   `cache`, `limit` and `uses` of `why_online`
    """
    frozen(encoder)
    key = cache_key(encoder, objective, data, inputs, dtype)
    if why := why_online(encoder, objective, key, **asked):
        log.info("the teacher runs at every step: %s", why)
        return Teacher(encoder, objective, why)
    log.info("the teacher's representations take %s in %s", told_bytes(key.bytes), folder)
    cached = Cached(encoder, objective, Cache.open(folder, key))
    try:
        cached.build(data, tick)
    except BaseException:
        cached.close(False)
        raise
    return cached


def frozen(encoder: Encoder) -> Encoder:
    """The encoder in eval mode and without gradients."""
    encoder.model.eval().requires_grad_(False)
    return encoder
