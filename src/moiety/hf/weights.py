"""The weights in a model folder: safetensors only, checked before anything is made of them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..io import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WRITTEN = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    floating: bool


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights; pickles, and names outside the folder, raise."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        pickles = [p.name for pattern in PICKLES for p in folder.glob(pattern)]
        found = f"; pickled ones ({pickles[0]}) are never read" if pickles else ""
        raise ValueError(f"{folder} holds no weights in safetensors{found}")
    index = read_json(folder / INDEX)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{folder / INDEX} has no weight_map")
    for key, name in names.items():
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            raise ValueError(f"{folder / INDEX} looks for {key} outside of its folder: {name!r}")
        if not name.endswith(".safetensors") or not (folder / name).is_file():
            raise ValueError(f"{folder / INDEX} looks for {key} in {name}, which is not there")
    return [folder / name for name in sorted(set(names.values()))]


def stored(folder: Path) -> dict[str, Stored]:
    """What the files of a folder hold, read from their headers; an index must say the same."""
    files = weight_files(folder)
    found = headers(files)
    if files != [folder / SINGLE]:
        said = {key: folder / name for key, name in read_json(folder / INDEX)["weight_map"].items()}
        for key in sorted(said.keys() | found.keys()):
            if key not in found or said.get(key) != found[key].file:
                raise ValueError(f"{folder / INDEX} and the files do not agree about {key}")
    return found


def headers(files: Iterable[Path]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 (no mapping)
                    part = tensors.get_slice(key)
                    floating = "F" in part.get_dtype()  # F32, BF16, F8_E4M3, not I64, BOOL
                    found[key] = Stored(file, tuple(part.get_shape()), floating)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is damaged: {error}") from None
    return found


def tensors_of(found: dict[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor, file by file."""
    for file in dict.fromkeys(at.file for at in found.values()):
        with safe_open(file, framework="pt") as tensors:
            for key in (key for key, at in found.items() if at.file == file):
                yield key, tensors.get_tensor(key)


def numbers(found: dict[str, Stored]) -> int:
    """How many there are in all tensors."""
    return sum(math.prod(at.shape) for at in found.values())


def digests(files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 by file name: a flipped bit in a weight shows in nothing else."""
    out = {}
    for path in files:
        with open(path, "rb") as file:
            out[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return out


def check_digests(folder: Path, files: Iterable[Path], said: dict[str, str]) -> None:
    for name, digest in digests(files).items():
        if said.get(name) != digest:
            raise ValueError(f"{folder / name} is not as it was saved: its SHA-256 differs")
