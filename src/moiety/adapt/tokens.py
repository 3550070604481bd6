"""Texts as rows of token ids, made once; in a folder they are kept and mapped into memory."""

from __future__ import annotations

import hashlib
import io as streams
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .. import io
from .rows import Tokens
from .text import TextEncoder

FEW = 32  # rows that packing must leave, or each line stays a row
BLOCK = 1000  # texts tokenised at a time
Documents = Sequence[Sequence[str]]  # the texts of each document


def text_rows(
    documents: Documents,
    encoder: TextEncoder,
    length: int,
    *,
    pack: bool | None,
    folder: str | os.PathLike[str] | None = None,
) -> tuple[Tokens, bool]:
    """The texts of all documents as rows of at most `length` tokens, made now or found in `folder`;
    and whether they are packed.

    pack     put texts together to rows of that length; None: if that leaves enough rows, or more
             than there are texts
    """
    key, vocabulary = _key(documents, encoder, length, pack), encoder.vocabulary_key()
    found = _kept(folder, key, vocabulary)
    if found is not None:
        return found
    texts = [text for document in documents for text in document]
    rows = [] if pack is False else list(_packed(documents, encoder, length))
    packed = pack or (pack is None and len(rows) >= min(FEW, len(texts)))
    if not packed:
        rows = tokenised(texts, encoder, length)
    special = set(encoder.special)  # nothing can be masked in a row of these alone
    rows = [row for row in rows if not special.issuperset(row)]
    if not rows:
        raise ValueError("the data hold no token that the tokenizer knows; give other texts")
    tokens = Tokens.of(rows, vocabulary)
    return (tokens, packed) if folder is None else _keep(Path(folder), key, tokens, packed)


def cut_texts(tokens: Tokens, length: int) -> list[str]:
    """A note on texts that are cut, if there are any."""
    full = int((np.diff(tokens.ends, prepend=0) >= length).sum())
    return [f"{full} of {len(tokens)} texts fill all {length} tokens, or are cut"] if full else []


def tokenised(texts: Sequence[str], encoder: TextEncoder, length: int) -> list[list[int]]:
    """The ids of every text with the special ones, cut to `length`."""
    starts = range(0, len(texts), BLOCK)
    return [
        row for start in starts for row in encoder.tokenise(texts[start : start + BLOCK], length)
    ]


def _packed(documents: Documents, encoder: TextEncoder, length: int) -> Iterator[list[int]]:
    """Rows of `length` tokens: all texts in a line, cut, each piece between the special tokens."""
    first, last = encoder.frame()
    room, waiting, current = length - len(first) - len(last), list[int](), 0
    lines = [(number, text) for number, texts in enumerate(documents) for text in texts]
    for start in range(0, len(lines), BLOCK):
        some = lines[start : start + BLOCK]
        for (number, _), ids in zip(some, encoder.pieces([text for _, text in some])):
            if number > current and last:
                waiting.append(last[-1])  # where one document ends
            current = number
            waiting += ids
        whole = len(waiting) // room * room
        for place in range(0, whole, room):
            yield [*first, *waiting[place : place + room], *last]
        waiting = waiting[whole:]
    yield [*first, *waiting, *last]


def id_rows(ids: Tensor, encoder: TextEncoder) -> Tokens:
    """Rows of token ids [N, L], padded on the right."""
    if ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        raise ValueError(f"token ids must be whole numbers [N, L], got {list(ids.shape)}")
    known = encoder.model.get_input_embeddings().weight.shape[0]
    if not 0 <= int(ids.min()) <= int(ids.max()) < known:
        raise ValueError(f"token ids must be from 0 to {known - 1}, which the model knows")
    real = torch.arange(1, ids.shape[1] + 1) * (ids != encoder.pad)
    lengths = real.amax(1).tolist()
    if not all(lengths):
        raise ValueError("a row of token ids is all padding; leave it out")
    return Tokens.of([row[:length].numpy() for row, length in zip(ids, lengths)])


def _key(documents: Documents, encoder: TextEncoder, length: int, pack: bool | None) -> str:
    """What the rows follow from."""
    digest = hashlib.sha256(encoder.tokenizer_key().encode())
    digest.update(json.dumps([length, pack]).encode())
    for document in documents:
        digest.update(json.dumps(document).encode())
    return digest.hexdigest()


def _kept(
    folder: str | os.PathLike[str] | None, key: str, vocabulary: str
) -> tuple[Tokens, bool] | None:
    """The ids in a folder, mapped, if they are those of this key."""
    path = None if folder is None else Path(folder) / "corpus.json"
    if path is None or not path.exists():
        return None
    said = io.read_json(path)
    if said["key"] != key or "packed" not in said:
        return None
    try:
        mapped = np.load(path.with_name("ids.npy"), mmap_mode="r", allow_pickle=False)
        ends = np.load(path.with_name("ends.npy"), allow_pickle=False)
    except (OSError, ValueError, EOFError):  # damaged: made anew
        return None
    return Tokens(mapped, ends, vocabulary), said["packed"]


def _keep(folder: Path, key: str, tokens: Tokens, packed: bool) -> tuple[Tokens, bool]:
    """Write the ids to the folder, the key last, and map them."""
    (folder / "corpus.json").unlink(missing_ok=True)
    for name, values in (("ids", tokens.ids), ("ends", tokens.ends)):
        stream = streams.BytesIO()
        np.save(stream, values, allow_pickle=False)
        io.write_atomic(folder / f"{name}.npy", stream.getvalue())
    io.write_json(folder / "corpus.json", {"key": key, "packed": packed})
    found = _kept(folder, key, tokens.vocabulary or "")
    assert found is not None
    return found
