"""Data by name or by path, as a problem to learn.

load_problem("digits")
load_problem("people.csv", targets="income,never_married")
load_problem("tweets.jsonl", targets="label", text="tweet")
load_problem("photos/")                      # photos/cat/1.png, or photos/train/cat/1.png
load_problem("chemprot/")                    # chemprot/train.jsonl.gz, dev.jsonl.gz, …
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..tables import TABLES, read_table, table_kind
from .frame import from_frame
from .images import SUFFIXES, from_folder
from .named import NAMED, load_named
from .problem import Problem
from .splits import split_of
from .targets import near

if TYPE_CHECKING:
    import pandas


def load_problem(
    source: str | Path,
    *,
    targets: str | Sequence[str] | None = None,
    text: str | None = None,
    data_dir: str | Path | None = None,
    seed: int = 0,
    max_examples: int | None = None,
    image_size: int | None = None,
    leaks: Literal["drop", "keep"] = "drop",
    missing: Literal["drop", "mask"] = "drop",
) -> Problem:
    """Load a built-in set, a table or a folder, and say in its notes what was worked out.

    `targets` are the columns to predict (a table without it must have one called label, target or
    class); "price:number" and "grade:classes" say what they are where the values do not. `seed`
    decides the split where none is given. Columns that give a target away exactly are left out of
    the inputs, unless `leaks` is "keep"; suspicious ones stay. All are in `problem.leaks`. Rows of
    a table that lack a target are left out; with `missing` "mask" only those that lack them all,
    and the gaps are -100 (class ids) and NaN (numbers).
    """
    if leaks not in ("drop", "keep"):
        raise ValueError(f"leaks must be drop or keep, got {leaks!r}")
    if missing not in ("drop", "mask"):
        raise ValueError(f"missing must be drop or mask, got {missing!r}")
    if max_examples is not None and max_examples < 1:
        raise ValueError(f"max_examples must be at least 1, got {max_examples}")
    split: dict[str, Any] = {"seed": seed, "max_examples": max_examples}
    table: dict[str, Any] = {"leaks": leaks, "missing": missing}
    path = Path(source).expanduser()
    if str(source) in NAMED:  # a file or folder of the same name is ./NAME
        return load_named(str(source), targets=targets, data_dir=data_dir, **table, **split)
    if path.is_dir() and not _split_tables(path):
        if targets or text:
            raise ValueError(f"{path.name} holds images by class: it has no columns to name")
        return from_folder(path.resolve(), image_size=image_size, **split)
    frame, given = _read(path)
    return from_frame(frame, path.name, targets=targets, text=text, given=given, **table, **split)


def _read(path: Path) -> tuple[pandas.DataFrame, np.ndarray | None]:
    """The rows of a table, or of the tables of a folder with the split of each."""
    if path.is_dir():
        import pandas

        frames = {split: read_table(file) for split, file in _split_tables(path).items()}
        given = np.repeat(list(frames), [len(frame) for frame in frames.values()])
        return pandas.concat(frames.values(), ignore_index=True), given
    if not path.exists():
        raise ValueError(not_there(path))
    if table_kind(path) is None:
        images = " or a folder of images by class" if path.suffix.lower() in SUFFIXES else ""
        raise ValueError(
            f"{path.name}: the data must be a table ({', '.join(TABLES)}){images or ' or a folder'}"
        )
    return read_table(path), None


def _split_tables(folder: Path) -> dict[str, Path]:
    """The tables of a folder that are named after splits, such as train.csv and test.csv."""
    found: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        split = split_of(file.name.split(".")[0])
        if split is None or not file.is_file() or table_kind(file) is None:
            continue
        if split in found:
            raise ValueError(f"{folder} has both {found[split].name} and {file.name}; remove one")
        found[split] = file
    return found


def not_there(path: Path) -> str:
    """What to say of a path that does not exist: near names, of files and of built-in sets."""
    beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = near(path.name, [*NAMED, *beside])
    return f"there is no file or folder {path}, and no built-in set of that name{hint}"
