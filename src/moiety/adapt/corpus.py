"""Unlabelled data, made ready once: rows to train on, and a fixed part that is held out.

    corpus = read_corpus("papers.txt", encoder)             # a folder of texts, a table, images …
    batch = encoder.batch(corpus.train.take([3, 1, 4]))
    corpus.held                                             # for the masked loss on held-out data

Texts become token ids at once; with `folder` they are kept there and mapped into memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import TensorDataset

from ..data import Problem
from ..data.named import NAMED
from .encoders import Encoder
from .images import ImageEncoder
from .pictures import Picture, fit_images, read_images
from .reading import has_columns, problem_texts, read_texts
from .rows import Images, Rows, Tokens, hold_out
from .text import TextEncoder
from .tokens import cut_texts, id_rows, text_rows

HELD, LEAST = 0.02, 16  # share and number of rows held out


@dataclass(frozen=True)
class Corpus:
    """Rows to train on, rows held out, and what was done to get them, a short line each."""

    kind: Literal["image", "text"]
    train: Rows
    held: Rows
    notes: list[str] = field(default_factory=list)


def read_corpus(
    source: Any,
    encoder: Encoder,
    *,
    column: str | None = None,
    length: int | None = None,
    pack: bool | None = None,
    fit: bool = False,
    held: float = HELD,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    data_dir: str | Path | None = None,
) -> Corpus:
    """Read unlabelled examples for an encoder; of a source with splits its training split alone.

    source   a text file or a folder of them, a table (whose `column` holds the text), a folder of
             images, an .npy or .npz of them, the name of a built-in set, a list of texts, a
             `Problem`, a `TensorDataset` (token ids or images), or `Rows`
    length   tokens of a row at most (None: 128, or what the model reads)
    pack     put texts together to rows of that length (None: lines of text files, if there are
             enough of them, and not the rows of a table)
    fit      resize, crop and convert images to what the model reads, rather than refuse them
    held     the share that is held out by `seed`, at least 16 rows and at most half
    folder   where token ids are kept, to be mapped into memory now and found next time
    """
    words = {"column": column, "length": length, "pack": pack, "fit": fit or None}
    idle = {name for name, given in words.items() if given is not None} - _heard(source, encoder)
    if idle:
        raise ValueError(f"{min(idle)} does nothing for these data: leave it out")
    if isinstance(source, Corpus):
        return source
    if not isinstance(source, str | os.PathLike | Problem | TensorDataset | Rows):
        source = _texts(source)
    notes: list[str] = []
    if isinstance(source, Rows):
        rows = source
    elif isinstance(encoder, TextEncoder):
        tokens, chosen = _tokens(source, encoder, column, length, pack, folder, data_dir)
        rows = Rows(tokens)
        notes += [*chosen, f"{len(tokens.ids)} tokens in {len(tokens)} rows"]
    else:
        assert isinstance(encoder, ImageEncoder)
        rows = Rows(_images(source, Picture.of(encoder, fit), column, data_dir))
    train, out = hold_out(rows, held, LEAST, seed)
    notes.append(f"{len(train)} rows to train on, {len(out)} held out by seed {seed}")
    return Corpus(encoder.kind, train, out, notes)


def _heard(source: Any, encoder: Encoder) -> set[str]:
    """Which of its words `read_corpus` goes by."""
    if isinstance(source, Corpus | Rows):
        return set()
    heard = {"fit"} if encoder.kind == "image" else {"length", "pack"}
    if isinstance(source, TensorDataset):
        return heard - {"length", "pack"}
    file = isinstance(source, str | os.PathLike)
    return heard | ({"column"} if file and has_columns(str(source), encoder.kind) else set())


def _texts(source: Any) -> list[str]:
    """Texts in memory; a table or a tensor is none."""
    if isinstance(source, Tensor):
        raise ValueError("a tensor must be given as TensorDataset(data)")
    if isinstance(source, Mapping) or any(hasattr(source, w) for w in ("columns", "column_names")):
        raise ValueError("of a table in memory give the texts, such as list(table['text'])")
    texts = list(source) if isinstance(source, Iterable) else [source]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a list of data must hold texts")
    return [text.strip() for text in texts if text.strip()]


def _tokens(
    source: Any,
    encoder: TextEncoder,
    column: str | None,
    length: int | None,
    pack: bool | None,
    folder: str | os.PathLike[str] | None,
    data_dir: str | Path | None,
) -> tuple[Tokens, list[str]]:
    """All texts of a source as token ids, and what was chosen of it."""
    if isinstance(source, TensorDataset):
        return id_rows(source.tensors[0], encoder), []
    documents, running, chosen = _documents(source, column, data_dir)
    lines = sum(map(len, documents))
    if lines < 2:
        name = Path(source).name if isinstance(source, str | os.PathLike) else "the data"
        said = "a single line" if lines else "no text"
        raise ValueError(f"{name} holds {said}; a corpus needs at least two lines")
    most = encoder.row_length(length)
    # Lines of a text file belong together, and what has no labels is read on; rows are examples.
    pack = pack if running or pack else False
    tokens, packed = text_rows(documents, encoder, most, pack=pack, folder=folder)
    return tokens, chosen if packed else [*chosen, *cut_texts(tokens, most)]


def _documents(
    source: Any, column: str | None, data_dir: str | Path | None
) -> tuple[list[list[str]], bool, list[str]]:
    """The texts of each document, whether they are running text, and what was chosen."""
    if isinstance(source, list):
        return [source], False, []
    if isinstance(source, Problem) or str(source) in NAMED:
        texts = problem_texts(source, data_dir)
        running = str(source) in NAMED and not NAMED[str(source)].labelled
        return ([[text] for text in texts] if running else [texts]), running, []
    return read_texts(Path(source), column)


def _images(
    source: Any, wanted: Picture, column: str | None, data_dir: str | Path | None
) -> Images:
    """All images of a source, of the shape that the model reads."""
    if isinstance(source, list):
        raise ValueError("the model reads images: give a folder, an array or TensorDataset(images)")
    if isinstance(source, TensorDataset):
        return Images(fit_images(source.tensors[0], wanted))
    return Images(read_images(source, wanted, column, data_dir))
