"""Texts and images of files and built-in sets, as `corpus` and `labelled` need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..data import Problem, load_problem
from ..data.columns import TEXT_NAMES, is_text
from ..data.images import SUFFIXES, _decode, _header
from ..data.named import NAMED, load_texts
from ..data.splits import split_of
from ..tables import PACKED, read_lines, read_table, table_kind
from .images import check_images

if TYPE_CHECKING:
    import pandas

CHUNK = 1000  # images that are resized at a time
ARRAYS = (".npy", ".npz")


@dataclass(frozen=True)
class Picture:
    """The shape C, H, W that images must have, or are brought to with `fit`."""

    shape: tuple[int, int, int]
    fit: bool = False


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
        raise ValueError(f"there is no file or folder {path}")
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


# -- images ---------------------------------------------------------------------------------------


def read_images(
    source: Any, wanted: Picture, column: str | None, data_dir: str | Path | None = None
) -> Tensor:
    """The images of a source, uint8 [N, C, H, W], of its training split where it has splits."""
    if isinstance(source, Problem) or str(source) in NAMED:
        problem = problem_of(source, data_dir)
        if problem.kind != "image":
            raise ValueError(f"{problem.name} holds no images, and the model reads images")
        return problem.train.inputs["images"]
    path = training_part(Path(source))
    if path.is_dir():
        return decode(image_files(path), wanted, path)
    if path.suffix.lower() not in ARRAYS:
        raise ValueError(f"{path.name}: images must be a folder, .npy or .npz")
    from ..hf.examples import read

    _, images = read(path, column=array_name(path, column), limit=2**62)
    pixels = np.array(images)
    channels = pixels.shape[-1]
    if channels not in (1, 3, wanted.shape[0]):
        said = f"images have {channels} channels, and 1 or 3 are read"
        if pixels.shape[1] in (1, 3, wanted.shape[0]):
            said = f"images must be [N, H, W, C] or [N, H, W], not {list(pixels.shape)}"
        raise ValueError(f"{path.name}: {said}")
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def array_name(path: Path, column: str | None) -> str:
    """The array of an .npz that holds the images: the one that was named, or the only one."""
    from ..hf.examples import are_images

    usual = "images" if column is None else column
    try:
        with ZipFile(path) as packed:
            names = [name.removesuffix(".npy") for name in packed.namelist()]
    except (OSError, BadZipFile):  # an .npy, or what `read` refuses
        return usual
    if usual in names:
        return usual
    if column is not None:
        raise ValueError(f"{path.name} has no array {column!r}; it has {', '.join(names)}")
    if len(names) == 1:
        return names[0]
    with np.load(path, allow_pickle=False) as arrays:
        fits = [n for n in names if are_images(arrays[n])]
    if len(fits) != 1:
        raise ValueError(f"{path.name}: say column=NAME for one of {', '.join(names)}")
    return fits[0]


def has_columns(source: str, kind: str) -> bool:
    """Whether the unlabelled examples of a source have a column or array that can be named."""
    if source in NAMED:
        return False
    path = training_part(Path(source))
    if kind == "text":
        return not path.is_dir() and table_kind(path) is not None
    return path.suffix.lower() == ".npz"


def image_files(folder: Path) -> list[Path]:
    """All images in a folder and below."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES]
    if not files:
        raise ValueError(f"{folder} holds no image ({', '.join(SUFFIXES)}); put some there")
    return files


def decode(files: Sequence[Path], wanted: Picture, folder: Path) -> Tensor:
    """Image files as uint8 [N, C, H, W]; one of another shape is refused, or made to fit."""
    channels, height, width = wanted.shape
    for path in files:
        header = _header(path, folder)
        found = (len(files), 1 if header.grey else 3, header.size[1], header.size[0])
        if not wanted.fit:
            _check(found, wanted, str(path.relative_to(folder)))
    size, grey = (width, height), channels == 1
    return torch.from_numpy(np.stack([_decode(path, size, grey, folder) for path in files]))


def fit_images(images: Tensor, wanted: Picture) -> Tensor:
    """Images [N, C, H, W] in the wanted shape: cropped to its ratio, resized, grey or in colour."""
    if not wanted.fit or tuple(images.shape[1:]) == wanted.shape:
        _check(tuple(images.shape), wanted)
        return images
    if images.dim() != 4 or images.dtype != torch.uint8:
        raise ValueError(f"only uint8 images [N, C, H, W] can be fitted, got {list(images.shape)}")
    return torch.cat([_fit(chunk, wanted.shape) for chunk in images.split(CHUNK)])


def _fit(images: Tensor, shape: tuple[int, int, int]) -> Tensor:
    channels, height, width = shape
    side = min(images.shape[2] / height, images.shape[3] / width)
    rows, columns = round(side * height), round(side * width)
    top, left = (images.shape[2] - rows) // 2, (images.shape[3] - columns) // 2
    pixels = images[:, :, top : top + rows, left : left + columns].float()
    pixels = F.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
    if channels != images.shape[1]:
        pixels = pixels.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    return pixels.round().clamp(0, 255).to(torch.uint8)


def _check(found: tuple[int, ...], wanted: Picture, name: str = "") -> None:
    try:
        check_images(found, wanted.shape)
    except ValueError as error:
        raise ValueError(f"{name and f'{name}: '}{error}, or say fit=True") from None
