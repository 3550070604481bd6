"""Texts of files and built-in sets, and which part of a source is read; images: `pictures`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data import Problem, load_problem
from ..data.columns import TEXT_NAMES, is_text
from ..data.images import SUFFIXES
from ..data.load import not_there
from ..data.named import NAMED, load_texts
from ..data.splits import split_of
from ..tables import PACKED, read_lines, read_table, table_kind

if TYPE_CHECKING:
    import pandas

ARRAYS = (".npy", ".npz")


def parts_of(folder: Path) -> dict[str, Path]:
    """What a folder holds by split: train.jsonl, dev.csv, or folders of those names."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        split = split_of(path.name.split(".")[0])
        if split is None or not (path.is_dir() or table_kind(path) or _is_lines(path)):
            continue
        if split in found:
            raise ValueError(f"{folder} has both {found[split].name} and {path.name}; remove one")
        found[split] = path
    return found


def training_part(path: Path) -> Path:
    """Of a folder with splits the training split, else the path itself; a missing one raises."""
    if not path.exists():
        raise ValueError(not_there(path))
    parts = parts_of(path) if path.is_dir() else {}
    if parts and "train" not in parts:
        names = ", ".join(sorted(part.name for part in parts.values()))
        raise ValueError(f"{path} holds {names} and no train; add it, or name one file")
    return parts.get("train", path)


def is_one(unlabelled: str, labelled: str) -> bool:
    """Whether both are one table or folder, which the seed splits into training and test.

    Raise where labelled images, those of the test among them, lie in the folder of the others.
    """
    if {unlabelled, labelled} & NAMED.keys():
        return False
    all_of = training_part(Path(unlabelled).expanduser()).resolve()
    some = Path(labelled).expanduser().resolve()
    if all_of in some.parents and any(f.suffix.lower() in SUFFIXES for f in some.rglob("*")):
        raise ValueError(
            f"{labelled} lies in {unlabelled}, so that its test images would be trained on; put "
            "one beside the other"
        )
    return all_of == some


def problem_of(source: Any, data_dir: str | Path | None, **words: Any) -> Problem:
    """A problem, or that of a built-in set."""
    if isinstance(source, Problem):
        return source
    return load_problem(str(source), data_dir=data_dir, missing="mask", **words)


def but_test(problem: Problem, path: Path) -> tuple[Any, str]:
    """What may be seen of a table or folder that is labelled: all but the seed's test; and a note.

    Rows of a table without a class are in no split.
    """
    texts: list[str] = []
    if problem.kind == "text":
        frame = read_table(path)
        without = frame[frame[problem.targets[0].name].isna()]
        texts = [text for text in texts_of(without, problem.text, path.name) if text]
    more = f"and its {len(texts)} rows without a class" if texts else "alone"
    note = f"its training split {more}, since it is also what is labelled"
    return [*problem_texts(problem), *texts] if texts else problem, note


def has_columns(source: str, kind: str) -> bool:
    """Whether the unlabelled examples of a source have a column or array that can be named."""
    if source in NAMED:
        return False
    path = training_part(Path(source))
    if kind == "text":
        return not path.is_dir() and table_kind(path) is not None
    return path.suffix.lower() == ".npz"


# -- texts ----------------------------------------------------------------------------------------


def problem_texts(source: Any, data_dir: str | Path | None = None) -> list[str]:
    """The texts of the training split, or all of a built-in set without labels."""
    if not isinstance(source, Problem) and not NAMED[str(source)].labelled:
        return load_texts(str(source), data_dir)
    problem = problem_of(source, data_dir)
    if problem.kind != "text":
        raise ValueError(f"{problem.name} holds no texts, and the model reads texts")
    return [text for text in problem.train.texts if text]


def read_texts(given: Path, column: str | None) -> tuple[list[list[str]], bool, list[str]]:
    """The texts of each document, whether they are lines of running text, and what was chosen."""
    path = training_part(given)
    chosen = [] if path == given else [f"{path.name} alone"]
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if _is_lines(file)]
        if not files:
            if any(file.suffix.lower() in SUFFIXES for file in path.rglob("*")):
                raise ValueError(f"{path} holds images, and the model reads texts")
            raise ValueError(f"{path} holds no .txt file; put some there, or name a table")
        return [read_lines(file) for file in files], True, chosen
    if table_kind(path) is None:
        if path.suffix.lower() in (*SUFFIXES, *ARRAYS):
            raise ValueError(f"{path.name} holds images, and the model reads texts")
        if path.suffix.lower() == ".json":
            raise ValueError(f"{path.name}: a table must be .jsonl, with an object in each line")
        return [read_lines(path)], True, chosen
    frame = read_table(path)
    column = text_column(frame, column, path.name)
    texts = [text for text in texts_of(frame, column, path.name) if text]
    return [texts], False, [*chosen, f"its column {column}"]


def texts_of(frame: pandas.DataFrame, column: str | None, name: str) -> list[str]:
    """The texts of a table, stripped; a gap is empty."""
    words = frame[text_column(frame, column, name)].astype(object).fillna("").astype(str)
    # Half a pair of surrogates, which JSON may hold, is no text to a tokenizer.
    return [word.strip().encode("utf-8", "replace").decode() for word in words]


def text_column(frame: pandas.DataFrame, column: str | None, name: str) -> str:
    """The column of text: the one that was named, one with a usual name, or the only one."""
    columns = [str(each) for each in frame.columns]
    if column is not None:
        if column not in columns:
            raise ValueError(f"{name} has no column {column!r}; it has {', '.join(columns)}")
        return column
    usual = [each for each in columns if each.lower() in TEXT_NAMES]
    found = usual or [each for each in columns if is_text(frame[each])]
    if len(found) != 1:
        raise ValueError(f"{name}: say which column holds the text, of {', '.join(columns)}")
    return found[0]


def _is_lines(path: Path) -> bool:
    """Whether a file is plain text, packed or not: "a.txt.xz"."""
    name = path.name.lower()
    for packing in PACKED:
        name = name.removesuffix(packing)
    return path.is_file() and name.endswith(".txt")
