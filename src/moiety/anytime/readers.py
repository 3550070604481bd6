"""What the files of a stream hold, as examples; the first file sets the form of all later ones.

    read = Reader(target="label")
    stream = Folder("inbox", "out/journal.jsonl", read)
    test = stream.read(Path("test.csv"))         # in the form that mega-batch 1 has set
    form = read_form(write_form(read.form))      # through plain values, as a version keeps it
    form.inputs(Path("new.csv"))                 # of rows without a target

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from ..tables import PACKED, TABLES, open_packed, table_kind
from .data import Examples, token_blocks
from .tabular import CLASSES, NewClass, Rows


class Form(Protocol):
    """What mega-batch 1 has settled; reads a file in that form, or raises a `ValueError`."""

    kind: ClassVar[str]

    @property
    def classes(self) -> list[str]: ...  # names, by class id

    @property
    def shape(self) -> tuple[int, ...]: ...  # of the inputs of a row

    def read(self, path: Path) -> Examples: ...

    def inputs(self, rows: Any) -> Tensor: ...  # of a file or of values, without targets

    def plain(self) -> dict[str, Any]: ...  # what makes it again, as JSON holds it


class Reader:
    """Makes examples of a file; `form` is what the first one has settled.

    `fits` raises a `ValueError` for a form that the model cannot take, so that no file sets it.
    """

    def __init__(
        self,
        *,
        target: str | None = None,
        classes: Sequence[str | int] | None = None,
        encode: Callable[[str], Sequence[int]] | None = None,
        tokens: int = 256,
        length: int = 256,
        fits: Callable[[Form], None] | None = None,
    ) -> None:
        self.target, self.encode, self.tokens, self.length = target, encode, tokens, length
        self.given = None if classes is None else [str(word) for word in classes]
        twice = [word for word in self.given or [] if (self.given or []).count(word) > 1]
        if twice:
            raise ValueError(f"classes has {twice[0]!r} twice; name each class once")
        self.fits = fits
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
        try:
            examples = form.read(path)
        except NewClass as error:
            if self.given is None:
                raise
            raise ValueError(
                f"{error.what}, which {CLASSES} does not name; name all classes there, or remove it"
            ) from None
        if not len(examples):
            raise ValueError(f"{path.name} holds no example; a mega-batch needs some")
        if self.form is None and self.fits is not None:
            self.fits(form)
        self.form = form
        return examples

    def _new(self, kind: str, path: Path) -> Form:
        if kind == "a table":
            return Rows.of(path, self.target, self.given)
        if kind == "arrays":
            return Arrays.of(path, self.given)
        return Tokens(self.tokens, self.length, self.encode)


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


@dataclass(frozen=True)
class Arrays:
    """Arrays `x` [N, …] and `y` [N] of a .npz file; bytes become 0…1."""

    kind: ClassVar[str] = "arrays"
    shape: tuple[int, ...]
    classes: list[str]
    mean: Sequence[float] = ()  # of each channel, where images are standardised
    std: Sequence[float] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # JSON has lists only

    @classmethod
    def of(cls, path: Path, classes: list[str] | None) -> Arrays:
        """The form that a first file sets."""
        x, y = _labelled(path)
        count = int(y.max()) + 1 if len(y) else 0
        if classes is None and count == 1:
            raise ValueError(
                f"{path.name}: all rows are of class 0, and mega-batch 1 sets the classes; name "
                f"all of them: {CLASSES}"
            )
        return cls(x.shape[1:], classes or [str(number) for number in range(count)])

    def plain(self) -> dict[str, Any]:
        """Its fields, as JSON holds them."""
        return asdict(self)

    def read(self, path: Path) -> Examples:
        x, y = _labelled(path)
        inputs = self._inputs(x, path.name)
        wrong = y[(y < 0) | (y >= len(self.classes))]
        if len(wrong):
            known = f"; known are {', '.join(self.classes[:20])}"
            raise NewClass(f"{path.name} has the class {wrong[0]}", known)
        return Examples(inputs, torch.from_numpy(y))

    def inputs(self, rows: Path | np.ndarray | Tensor) -> Tensor:
        """The inputs of a file that holds `x`, or of such an array."""
        if isinstance(rows, Path):
            return self._inputs(_arrays(rows, "x")["x"], rows.name)
        return self._inputs(np.asarray(rows), "the array")

    def _inputs(self, x: np.ndarray, file: str) -> Tensor:
        if x.ndim < 1 or x.dtype.kind not in "biuf":
            raise ValueError(f"{file}: x must be [N, …] numbers, got {x.dtype} {list(x.shape)}")
        if x.shape[1:] != self.shape:
            raise ValueError(
                f"{file}: the inputs have the shape {list(x.shape[1:])}, and those of "
                f"mega-batch 1 {list(self.shape)}; give inputs of one shape"
            )
        if not np.isfinite(x).all():
            raise ValueError(f"{file}: x holds NaN or infinite values; remove those rows")
        scale = 255 if x.dtype == np.uint8 else 1
        inputs = torch.from_numpy(x.astype(np.float32) / scale)
        if not self.mean:
            return inputs
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (inputs - mean) / std


def _labelled(path: Path) -> tuple[np.ndarray, np.ndarray]:
    found = _arrays(path, "x", "y")
    x, y = found["x"], found["y"]
    if x.dtype.kind not in "biuf" or y.dtype.kind not in "iu" or y.ndim != 1 or len(x) != len(y):
        raise ValueError(
            f"{path.name}: x must be [N, …] numbers and y [N] class ids, got {x.dtype} "
            f"{list(x.shape)} and {y.dtype} {list(y.shape)}"
        )
    return x, y.astype(np.int64)


def _arrays(path: Path, *names: str) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as found:
            if not set(names) <= set(found.files):
                needs = "the arrays x and y" if len(names) > 1 else "the array x"
                raise ValueError(
                    f"{path.name} must hold {needs}; it holds {', '.join(found.files) or 'nothing'}"
                )
            return {name: found[name] for name in names}
    except (zipfile.BadZipFile, EOFError, KeyError) as error:
        raise ValueError(f"{path.name} is damaged ({error}); get it again") from None


@dataclass(frozen=True)
class Tokens:
    """Blocks of tokens of a text."""

    kind: ClassVar[str] = "text"
    tokens: int
    length: int
    encode: Callable[[str], Sequence[int]] | None = None  # None: the bytes of the text

    @property
    def classes(self) -> list[str]:
        """The tokens are what is told apart."""
        return [str(number) for number in range(self.tokens)]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length,)

    def plain(self) -> dict[str, Any]:
        """Its numbers; `encode` is code, and not kept."""
        return {"tokens": self.tokens, "length": self.length}

    def read(self, path: Path) -> Examples:
        with open_packed(path) as file:
            text = file.read().decode("utf-8-sig", "replace")
        encode = self.encode or (lambda text: list(text.encode()))
        try:
            examples = token_blocks(encode(text), self.length)
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None
        largest = int(max(examples.x.max(), examples.y.max()))
        if largest >= self.tokens:
            raise ValueError(
                f"{path.name}: token {largest} is none of the {self.tokens} tokens; set "
                "tokens to the size of the vocabulary"
            )
        return examples

    def inputs(self, rows: Any) -> Tensor:
        raise ValueError(
            "a row of text has no class; give tokens [N, L] to the learner: current.learner.predict"
        )


# -- forms as plain values -------------------------------------------------------------------------

FORMS: dict[str, Callable[..., Form]] = {kind.kind: kind for kind in (Rows, Arrays, Tokens)}


def write_form(form: Form) -> dict[str, Any]:
    """A form as JSON holds it."""
    return {"kind": form.kind, **form.plain()}


def read_form(plain: Mapping[str, Any]) -> Form:
    """The form that `write_form` wrote."""
    fields = dict(plain)
    return FORMS[fields.pop("kind")](**fields)


def read_inputs(form: Form, rows: Any) -> Tensor:
    """Inputs of a file (by its path) or of values, in a form; there is at least one row."""
    if isinstance(rows, str | Path):
        rows = Path(rows)
        if (kind := kind_of(rows)) != form.kind:
            raise ValueError(f"{rows.name} is {kind}, and the run learned from {form.kind}")
    if not len(inputs := form.inputs(rows)):
        raise ValueError(f"{getattr(rows, 'name', 'this')} holds no row to answer")
    return inputs
