"""What the files of a stream hold, as examples; the first file sets the form of all later ones.

    read = Reader(target="label")
    stream = Folder("inbox", "out/journal.jsonl", read)
    test = stream.read(Path("test.csv"))         # in the form that mega-batch 1 has set

| file | examples |
|---|---|
| .csv, .tsv, .jsonl, .parquet (packed or not) | numbers, standardised, and one-hot categories; the class of `target` |
| .npz | the arrays `x` (bytes become 0…1) and `y` (class ids) |
| .txt (packed or not) | blocks of `length` tokens of `encode`, by default the bytes of the text |

A file of another kind, other columns, another shape or a class that mega-batch 1 did not have is
refused in one sentence; `classes` names classes that come later.
"""  # noqa: E501

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from ..tables import PACKED, TABLES, open_packed, table_kind
from .data import Examples, token_blocks
from .tabular import Rows


class Form(Protocol):
    """What mega-batch 1 has settled; reads a file in that form, or raises a `ValueError`."""

    kind: str
    classes: list[str]

    def read(self, path: Path) -> Examples: ...


class Reader:
    """Makes examples of a file; `form` is what the first one has settled."""

    def __init__(
        self,
        *,
        target: str | None = None,
        classes: Sequence[str | int] | None = None,
        encode: Callable[[str], Sequence[int]] | None = None,
        tokens: int = 256,
        length: int = 256,
    ) -> None:
        self.target, self.encode, self.tokens, self.length = target, encode, tokens, length
        self.given = None if classes is None else [str(word) for word in classes]
        self.form: Form | None = None

    @property
    def classes(self) -> int:
        """How many classes, or tokens, there are."""
        if self.form is None:
            raise ValueError("the classes are known once the first mega-batch has been read")
        return len(self.form.classes)

    def check(self, path: Path) -> str:
        """What a file holds, by its name; raises where that is not what the others hold."""
        kind = kind_of(path)
        first = kind if self.form is None else self.form.kind
        if first != kind:
            raise ValueError(
                f"{path.name} is {kind}, and mega-batch 1 is {first}; give one kind of file"
            )
        return kind

    def __call__(self, path: Path) -> Examples:
        kind = self.check(path)
        form = self._new(kind, path) if self.form is None else self.form
        examples = form.read(path)
        if not len(examples):
            raise ValueError(f"{path.name} holds no example; a mega-batch needs some")
        self.form = form
        return examples

    def _new(self, kind: str, path: Path) -> Form:
        if kind == "a table":
            return Rows(path, self.target, self.given)
        if kind == "arrays":
            return Arrays(path, self.given)
        return Tokens(self.encode, self.tokens, self.length)


def kind_of(path: Path) -> str:
    """What a file holds, by its name."""
    if table_kind(path) is not None:
        return "a table"
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return "arrays"
    if suffix in PACKED:
        suffix = Path(path.stem).suffix.lower()
    if suffix != ".txt":
        known = ", ".join([*TABLES, ".npz", ".txt"])
        raise ValueError(f"{path.name} is no kind of file that can be learned from ({known})")
    return "text"


class Arrays:
    """Arrays `x` [N, …] and `y` [N] of a .npz file."""

    kind = "arrays"

    def __init__(self, path: Path, classes: list[str] | None) -> None:
        x, y = _arrays(path)
        self.shape = x.shape[1:]
        count = int(y.max()) + 1 if len(y) else 0
        if classes is None and count == 1:
            raise ValueError(
                f"{path.name}: all rows are of class 0, and mega-batch 1 sets the classes; name "
                "all classes (classes=…) beforehand"
            )
        self.classes = classes or [str(number) for number in range(count)]

    def read(self, path: Path) -> Examples:
        x, y = _arrays(path)
        if x.shape[1:] != self.shape:
            raise ValueError(
                f"{path.name}: the inputs have the shape {list(x.shape[1:])}, and those of "
                f"mega-batch 1 {list(self.shape)}; give inputs of one shape"
            )
        wrong = y[(y < 0) | (y >= len(self.classes))]
        if len(wrong):
            raise ValueError(_new_class(path, str(wrong[0]), self.classes))
        scale = 255 if x.dtype == np.uint8 else 1
        return Examples(torch.from_numpy(x.astype(np.float32) / scale), torch.from_numpy(y))


def _arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as found:
            if not {"x", "y"} <= set(found.files):
                names = ", ".join(found.files) or "nothing"
                raise ValueError(f"{path.name} must hold the arrays x and y; it holds {names}")
            x, y = found["x"], found["y"]
    except (zipfile.BadZipFile, EOFError, KeyError) as error:
        raise ValueError(f"{path.name} is damaged ({error}); get it again") from None
    if x.dtype.kind not in "biuf" or y.dtype.kind not in "iu" or y.ndim != 1 or len(x) != len(y):
        raise ValueError(
            f"{path.name}: x must be [N, …] numbers and y [N] class ids, got {x.dtype} "
            f"{list(x.shape)} and {y.dtype} {list(y.shape)}"
        )
    if not np.isfinite(x).all():
        raise ValueError(f"{path.name}: x holds NaN or infinite values; remove those rows")
    return x, y.astype(np.int64)


def _new_class(path: Path, word: str, classes: list[str]) -> str:
    return (
        f"{path.name} has the class {word}, which mega-batch 1 did not have; name all classes "
        f"(classes=…) beforehand, or remove it; known are {', '.join(classes[:20])}"
    )


class Tokens:
    """Blocks of tokens of a text."""

    kind = "text"

    def __init__(
        self, encode: Callable[[str], Sequence[int]] | None, tokens: int, length: int
    ) -> None:
        self.encode = encode or (lambda text: list(text.encode()))
        self.length = length
        self.classes = [str(number) for number in range(tokens)]

    def read(self, path: Path) -> Examples:
        with open_packed(path) as file:
            text = file.read().decode("utf-8-sig", "replace")
        try:
            examples = token_blocks(self.encode(text), self.length)
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None
        largest = int(max(examples.x.max(), examples.y.max()))
        if largest >= len(self.classes):
            raise ValueError(
                f"{path.name}: token {largest} is none of the {len(self.classes)} tokens; set "
                "tokens to the size of the vocabulary"
            )
        return examples
