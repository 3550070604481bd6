"""Examples from a file, and batches of them for a model.

.txt (a line each), .jsonl, .csv, .tsv, .parquet (a column), .npy, .npz (uint8 images [N,H,W,C]).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..tables import read_jsonl, read_lines, read_table
from .loading import load_image_processor, load_tokenizer

TABLES = (".csv", ".tsv", ".parquet")
KINDS = (".txt", ".jsonl", *TABLES, ".npy", ".npz")
Kind = Literal["text", "ids", "images"]


def read(path: str | Path, *, column: str = "text", limit: int = 512) -> tuple[Kind, Sequence[Any]]:
    """The first `limit` examples of a file: texts, lists of token ids, or images."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no data file {path}")
    suffix = path.suffix.lower()
    if suffix not in KINDS:
        raise ValueError(f"{path.name}: the data must be one of {', '.join(KINDS)}")
    kind: Kind = "text"
    rows: Any
    if suffix in (".npy", ".npz"):
        kind, rows = "images", _images(path, column)[:limit]
    elif suffix in TABLES:
        rows = _column(path, column, limit)
    elif suffix == ".txt":
        rows = read_lines(path, limit=limit)
    else:
        kind, rows = _jsonl(path, column, limit)
    if not len(rows):
        raise ValueError(f"{path.name} holds no example")
    return kind, rows


def tokenise(texts: Sequence[str], tokenizer: Any, longest: int) -> list[list[int]]:
    """Token ids of every text, cut to `longest`; a text without any token is left out."""
    ids = tokenizer(list(texts), truncation=True, max_length=longest)["input_ids"]
    return [row for row in ids if len(row)]


def id_batches(
    rows: Sequence[Sequence[int]], size: int, *, pad: int, side: str = "right"
) -> Iterator[dict[str, Tensor]]:
    """Batches of `input_ids` and `attention_mask`, in order, padded to the longest of each."""
    for start in range(0, len(rows), size):
        batch = [torch.tensor(row, dtype=torch.long) for row in rows[start : start + size]]
        longest = max(map(len, batch))

        def wide(row: Tensor, value: int, longest: int = longest) -> Tensor:
            gap = longest - len(row)
            return F.pad(row, (gap, 0) if side == "left" else (0, gap), value=value)

        yield {
            "input_ids": torch.stack([wide(row, pad) for row in batch]),
            "attention_mask": torch.stack([wide(torch.ones_like(row), 0) for row in batch]),
        }


def image_batches(
    images: np.ndarray, size: int, *, processor: Any, pixels: int | None
) -> Iterator[dict[str, Tensor]]:
    """Batches of `pixel_values`; without a processor resized to `pixels` and scaled to -1…1."""
    for start in range(0, len(images), size):
        batch = np.array(images[start : start + size])
        if processor is not None:
            values = processor(list(batch), return_tensors="pt")["pixel_values"]
        else:
            values = torch.from_numpy(batch).permute(0, 3, 1, 2).float() / 127.5 - 1
            if pixels is not None:
                values = F.interpolate(values, size=(pixels, pixels), mode="bilinear")
        yield {"pixel_values": values}


@dataclass(frozen=True)
class Input:
    """Everything the model is to be given."""

    examples: Any
    batch_size: int
    tokenizer: Any = None
    processor: Any = None
    pixels: int | None = None  # side of an image, where no processor knows it
    pad: int = 0
    side: str = "right"

    @property
    def images(self) -> bool:
        return not isinstance(self.examples, list)

    def says(self) -> str:
        """What the model is given, in words."""
        if not self.images:
            return f"token ids; padding is token {self.pad}, on the {self.side}"
        if self.processor is not None:
            return f"images, by {type(self.processor).__name__}"
        return "images, scaled to −1…1: the model brings no image processor"

    def __len__(self) -> int:
        return -(-len(self.examples) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if self.images:
            words = {"processor": self.processor, "pixels": self.pixels}
            return image_batches(self.examples, self.batch_size, **words)
        return id_batches(self.examples, self.batch_size, pad=self.pad, side=self.side)


def prepare(
    model: nn.Module, name: str, kind: str, rows: Any, batch_size: int, max_length: int
) -> Input:
    """Tokenise texts, or find out how the model takes images."""
    config: Any = getattr(model, "config", None)
    if kind == "images":
        size = getattr(config, "image_size", None)
        pixels = size if isinstance(size, int) else None
        return Input(rows, batch_size, processor=load_image_processor(name), pixels=pixels)
    tokenizer = load_tokenizer(name)
    places = (
        getattr(config, "max_position_embeddings", None),
        getattr(tokenizer, "model_max_length", None),  # RoBERTa keeps two places for itself
    )
    longest = min(max_length, *(n for n in places if n))
    if kind == "text":
        if tokenizer is None:
            raise ValueError(
                f"{name} brings no tokenizer: save one with it, or give a .jsonl with input_ids"
            )
        rows = tokenise(rows, tokenizer, longest)
    rows = [row[:longest] for row in rows]
    check_ids(rows, config)
    size = getattr(config, "vocab_size", None) or math.inf
    known = [getattr(owner, "pad_token_id", None) for owner in (tokenizer, config)]
    # Some tokenizers have a padding token that was never added to the model; padding is masked.
    pad = next((id for id in known if id is not None and 0 <= id < size), 0)
    side = getattr(tokenizer, "padding_side", "right")
    return Input(rows, batch_size, tokenizer=tokenizer, pad=pad, side=side)


def check_ids(rows: list[list[int]], config: Any) -> None:
    """Raise if there is nothing to read, or a token that the model does not know."""
    if not rows:
        raise ValueError("the data holds no token")
    largest, size = max(map(max, rows)), getattr(config, "vocab_size", None)
    if size is not None and largest >= size:
        raise ValueError(f"token id {largest} is outside the model's vocabulary of {size}")


# -- files --------------------------------------------------------------------------------------


def _jsonl(path: Path, column: str, limit: int) -> tuple[Kind, list[Any]]:
    rows = read_jsonl(path, limit=limit)
    names = sorted({name for row in rows if isinstance(row, dict) for name in row})
    if column not in names and "input_ids" in names:
        rows = [row for row in rows if isinstance(row, dict) and row.get("input_ids")]
        return "ids", [_ids(path, row["input_ids"]) for row in rows]
    return "text", [_text(row.get(column)) for row in _having(path, column, names, rows)]


def _having(path: Path, column: str, names: Sequence[str], rows: list[Any]) -> list[Any]:
    if column not in names:
        raise ValueError(
            f"{path.name} has no column {column!r}; --column may be {', '.join(names) or 'nothing'}"
        )
    return [row for row in rows if isinstance(row, dict) and _text(row.get(column))]


def _column(path: Path, column: str, limit: int) -> list[str]:
    table = read_table(path, limit=limit)
    rows = table.to_dict("records")
    return [_text(row[column]) for row in _having(path, column, [*map(str, table.columns)], rows)]


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):  # an empty cell
        return ""
    # Half a pair of surrogates, which JSON may hold, is no text to a tokenizer.
    return str(value).strip().encode("utf-8", "replace").decode()


def _ids(path: Path, row: Any) -> list[int]:
    if not isinstance(row, list) or not all(type(id) is int and id >= 0 for id in row):
        raise ValueError(f"{path.name}: input_ids must be lists of token ids")
    return row


def _images(path: Path, column: str) -> np.ndarray:
    mapped: Any = "r" if path.suffix.lower() == ".npy" else None
    try:
        loaded = np.load(path, allow_pickle=False, mmap_mode=mapped)
    except (ValueError, EOFError, BadZipFile):  # whose advice is to allow pickles
        raise ValueError(f"{path.name} holds no array that numpy can read") from None
    if not isinstance(loaded, np.ndarray):
        fits = [n for n in loaded.files if are_images(loaded[n])]
        name = column if column in loaded.files else fits[0] if len(fits) == 1 else None
        if name is None:
            raise ValueError(f"{path.name}: --column must say which of {', '.join(loaded.files)}")
        loaded = loaded[name]
    if not are_images(loaded):
        raise ValueError(
            f"{path.name}: images must be uint8 [N, H, W, C] or, grey ones, [N, H, W], "
            f"got {loaded.dtype} {list(loaded.shape)}"
        )
    return loaded if loaded.ndim == 4 else loaded[..., None]


def are_images(array: np.ndarray) -> bool:
    """Whether an array is one of images, with or without channels."""
    return array.ndim in (3, 4) and array.dtype == np.uint8
