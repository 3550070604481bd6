"""Labelled data: a training and a validation split, and a test split that is read once, at the end.

    data = read_labelled("chemprot/", encoder)               # train.jsonl, dev.jsonl, test.jsonl
    tuned = finetune(model, data.train, validation=data.validation, test=data.test)

Of a folder with splits the test file is not opened before `test` is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ..data import Problem, Split
from ..data.named import NAMED
from ..data.targets import FEW, find_targets
from ..tables import read_table, table_kind
from .encoders import Encoder
from .images import ImageEncoder
from .pictures import Picture, class_problem, fit_images, split_of_classes
from .reading import parts_of, problem_of, texts_of
from .rows import Images, Rows, Store, Tokens, hold_out
from .text import TextEncoder
from .tokens import cut_texts, id_rows, tokenised

VALIDATION, LEAST = 0.15, 16  # share and number of rows, where no validation split is given


@dataclass
class Labelled:
    """Rows with labels. `test` may be called once."""

    classes: list[str]
    train: Rows
    validation: Rows
    read_test: Callable[[], Rows] | None = field(default=None, repr=False)
    opened: bool = False
    closed: bool = False  # whether its file is not even opened before
    notes: list[str] = field(default_factory=list)  # what was left out, a short line each

    def test(self) -> Rows:
        """Read the test split; a second look at it is refused."""
        if self.read_test is None:
            raise ValueError("the data have no test split; add one, such as test.csv")
        self.check_closed()
        self.opened = True
        return self.read_test()

    def check_closed(self) -> None:
        """Raise where the test split was read."""
        if self.opened:
            raise ValueError(
                "the test split was read before, and is read once only: for another fine-tuning "
                "give data.train, and validation=data.validation"
            )


@dataclass(frozen=True)
class Reader:
    """How the examples of a split become rows."""

    encoder: Encoder
    targets: str | None
    text: str | None
    length: int | None
    fit: bool
    notes: list[str] = field(default_factory=list)

    def store(self, examples: Any) -> Store:
        """From texts, from token ids [N, L], or from images [N, C, H, W]."""
        if isinstance(self.encoder, ImageEncoder):
            return Images(fit_images(examples, self.picture))
        assert isinstance(self.encoder, TextEncoder)
        if isinstance(examples, Tensor):
            return id_rows(examples, self.encoder)
        most = self.encoder.row_length(self.length)
        rows = tokenised(examples, self.encoder, most)
        tokens = Tokens.of(rows, self.encoder.vocabulary_key())
        self.notes.extend(cut_texts(tokens, most))
        return tokens

    def file(self, path: Path) -> tuple[Any, list[str]]:
        """The examples of one split and the class of each, as words."""
        if self.encoder.kind == "text":
            return self.table(path)
        if not path.is_dir():
            raise ValueError(f"{path.name}: labelled images must be a folder for each class")
        _check_no_columns(path, self.targets)
        return split_of_classes(path, self.picture)

    @property
    def picture(self) -> Picture:
        assert isinstance(self.encoder, ImageEncoder)
        return Picture.of(self.encoder, self.fit)

    def table(self, path: Path) -> tuple[list[str], list[str]]:
        """The texts and classes of a table; rows without a class are left out."""
        if table_kind(path) is None:
            raise ValueError(f"{path.name}: labelled texts must be a table, such as train.csv")
        frame = read_table(path)
        target = _only(find_targets(self.targets, [str(c) for c in frame.columns], path.name))
        there = frame[target].notna()
        if not there.all():
            self.notes.append(f"{path.name}: {(~there).sum()} rows without {target} are left out")
        frame = frame[there]
        if frame.empty:
            raise ValueError(f"{path.name} holds no labelled example; add some, or remove it")
        columns = [str(each) for each in frame.columns if each != target]
        if self.text is not None and self.text not in columns:
            raise ValueError(
                f"{path.name} has no column {self.text!r} of texts; it has {', '.join(columns)}: "
                "say text=NAME"
            )
        words = [_word(value) for value in frame[target]]
        return texts_of(frame.drop(columns=target), self.text, path.name), words


def read_labelled(
    source: Any,
    encoder: Encoder,
    *,
    targets: str | None = None,
    text: str | None = None,
    length: int | None = None,
    fit: bool = False,
    seed: int = 0,
    data_dir: str | Path | None = None,
) -> Labelled:
    """Read labelled examples for an encoder.

    source    a folder with splits (train.csv, dev.csv, test.csv, or train/cat/1.png …), a table or
              a folder of images by class (split by `seed`), the name of a built-in set, a
              `Problem`, or `TensorDataset(examples, class ids)` by split, in a dict
    targets   the column to predict, and `text` the one to read; else as they are usually called
    fit       have the model's image processor resize and convert images, rather than refuse them
    """
    reader = Reader(encoder, targets, text, length, fit)
    found = _read(source, reader, seed, data_dir)
    if isinstance(encoder, TextEncoder):
        special, rows = set(encoder.special), found.train.take(range(len(found.train)))
        if all(special.issuperset(row.tolist()) for row in rows):
            raise ValueError(
                "the labelled texts hold no token that the tokenizer knows; give other texts, or "
                "the tokenizer of this model"
            )
    return found


def _read(source: Any, reader: Reader, seed: int, data_dir: str | Path | None) -> Labelled:
    if isinstance(source, TensorDataset):
        source = {"train": source}
    if isinstance(source, dict):
        return _from_tensors(source, reader, seed)
    if not isinstance(source, str | os.PathLike | Problem):
        raise ValueError(
            "labelled data must be a path, the name of a set, a Problem or TensorDatasets by "
            f"split, not {type(source).__name__}"
        )
    if not isinstance(source, Problem) and str(source) not in NAMED:
        path = Path(source).expanduser()
        parts = parts_of(path) if path.is_dir() else {}
        if "train" in parts:
            return _from_parts(parts, reader, seed)
    return _from_problem(labelled_problem(source, reader, seed, data_dir), reader)


def labelled_problem(
    source: Any, reader: Reader, seed: int, data_dir: str | Path | None = None
) -> Problem:
    """One table or folder of images by class, split by the seed, or a built-in set."""
    if isinstance(source, Problem):
        return source
    path = Path(source).expanduser()
    if reader.encoder.kind == "image" and str(source) not in NAMED and path.is_dir():
        _check_no_columns(path, reader.targets)
        return class_problem(path.resolve(), reader.picture, seed)
    return problem_of(source, data_dir, targets=reader.targets, text=reader.text, seed=seed)


def _from_parts(parts: dict[str, Path], reader: Reader, seed: int) -> Labelled:
    """Of files by split; that of the test is kept closed."""
    examples, words = reader.file(parts["train"])
    classes = sorted(set(words))
    if reader.encoder.kind == "text" and len(classes) > max(FEW, len(words) / 2):
        raise ValueError(
            f"{parts['train'].name}: what is to be predicted has {len(classes)} different values "
            f"in {len(words)} rows; predict a column with classes"
        )

    def rows(path: Path) -> Rows:
        found, names = reader.file(path)
        return Rows(reader.store(found), None, _ids(names, classes, path.name), classes)

    train = Rows(reader.store(examples), None, _ids(words, classes, "train"), classes)
    given = rows(parts["validation"]) if "validation" in parts else None
    test = parts.get("test")
    later = None if test is None else lambda: rows(test)
    # A copy: what the test would say is not known before it is opened.
    found = _labelled(classes, train, given, later, seed)
    return replace(found, notes=list(reader.notes), closed=test is not None)


def _from_tensors(source: dict[str, TensorDataset], reader: Reader, seed: int) -> Labelled:
    """Of tensors by split."""
    if "train" not in source:
        raise ValueError(f"the data have no train, only {', '.join(source)}")
    for name, data in source.items():
        labels = data.tensors[1]
        if not len(labels):
            raise ValueError(f"{name} holds no example; give some, or leave it out")
        if labels.is_floating_point() or labels.dim() != 1 or int(labels.min()) < 0:
            raise ValueError(
                f"the labels of {name} must be one whole number from 0 on for each row"
            )
    classes = [str(i) for i in range(int(source["train"].tensors[1].max()) + 1)]

    def rows(data: TensorDataset) -> Rows:
        examples, labels = data.tensors
        return Rows(reader.store(examples), None, labels.long(), classes)

    given = rows(source["validation"]) if "validation" in source else None
    test = source.get("test")
    later = None if test is None else lambda: rows(test)
    return _labelled(classes, rows(source["train"]), given, later, seed)


def _from_problem(problem: Problem, reader: Reader) -> Labelled:
    """Of a problem, whose splits are in memory already."""
    _only([target.name for target in problem.targets])
    target = problem.targets[0]
    if problem.kind != reader.encoder.kind or target.kind != "classes":
        raise ValueError(
            f"{problem.name} holds {problem.kind}s with {target.kind} to predict, and the model "
            f"needs {reader.encoder.kind}s with classes"
        )

    def rows(split: Split) -> Rows:
        examples = split.texts if problem.kind == "text" else split.inputs["images"]
        return Rows(reader.store(examples), None, split.targets[target.name], target.classes)

    given, later = rows(problem.validation), lambda: rows(problem.test)
    gone = [note for note in problem.notes if note.endswith(("left out", "taken out"))]
    found = _labelled(target.classes, rows(problem.train), given, later, 0)
    return replace(found, notes=[*gone, *reader.notes])


def _labelled(
    classes: list[str],
    train: Rows,
    validation: Rows | None,
    test: Callable[[], Rows] | None,
    seed: int,
) -> Labelled:
    """With a validation split by `seed` where none is given."""
    if len(classes) < 2:
        raise ValueError(f"all examples are of the class {classes[0]!r}; two classes are needed")
    if validation is None:
        train, validation = hold_out(train, VALIDATION, LEAST, seed)
    return Labelled(classes, train, validation, test)


def _check_no_columns(path: Path, targets: str | None) -> None:
    if targets is not None:
        raise ValueError(f"{path.name} holds images by class: it has no column {targets!r}")


def _only(columns: Iterable[str]) -> str:
    target, *more = columns
    if more:
        raise ValueError(f"one column can be predicted, not both {target} and {more[0]}")
    return target


def _word(value: Any) -> str:
    """A class as text: 1.0, as a column with a gap reads, is "1"."""
    if isinstance(value, list | dict):
        raise ValueError(f"a class must be a word or a number, not {value!r:.60}")
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else str(value).strip()


def _ids(words: Sequence[str], classes: Sequence[str], name: str) -> Tensor:
    """Class ids; a class that the training split has not is refused."""
    known = {word: id for id, word in enumerate(classes)}
    unseen = sorted(set(words) - known.keys())
    if unseen:
        raise ValueError(
            f"{name} has the class {unseen[0]!r}, which train lacks; add training examples of it, "
            "or remove it"
        )
    return torch.tensor([known[word] for word in words], dtype=torch.long)
