"""Built-in sets: find their files, check them, fetch what may be fetched, and load them.

    load_named("mnist", data_dir="data")
    load_texts("imdb-text")                      # of a set without labels
    get("mnist")                                 # into the user's cache, with checksums

Files are looked for in `data_dir`, then in the folder MOIETY_DATA names, then in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..tables import PACKED, open_packed
from .catalogue import NAMED, Layout, Named
from .download import Progress, download, unpack
from .formats import Lines, Pictures
from .frame import from_frame
from .images import from_images
from .problem import Problem
from .published import File
from .targets import near

LIMIT = 2**30  # bytes of one file, unpacked
__all__ = [
    "NAMED",
    "Found",
    "cache",
    "find",
    "get",
    "how_to_get",
    "load_named",
    "load_texts",
    "roots",
]


@dataclass
class Found:
    """A set that is there: in which layout, and the path of each file."""

    layout: Layout
    folder: Path
    paths: dict[str, Path]

    def content(self, name: str) -> bytes:
        """The unpacked bytes of a file, after comparing their checksum."""
        (file,) = (file for file in self.layout.files if file.name == name)
        path = self.paths[name]
        with open_packed(path, limit=LIMIT) as stream:
            data = stream.read()
        right, given = file.sums, data
        if not right and path.suffix in PACKED:  # only the sum of the packed file was published
            right, given = (file.packed,), path.read_bytes()
        found = hashlib.md5(given, usedforsecurity=False).hexdigest()
        if right and found not in right:
            raise ValueError(
                f"{path} is not the published file (md5 {found}, not {right[0]}); remove it and "
                "get it again"
            )
        return data


def cache() -> Path:
    """The user's folder for data that were fetched."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "moiety"


class MissingData(ValueError):
    """A data set is not on this machine; its text says how to get it."""


def roots(data_dir: str | Path | None = None) -> list[Path]:
    """The folders to look in, in order."""
    named = [data_dir, os.environ.get("MOIETY_DATA")]
    return [*(Path(path).expanduser() for path in named if path), cache()]


def known(name: str) -> Named:
    """The built-in set of that name."""
    if name not in NAMED:
        hint = near(name, list(NAMED))
        raise ValueError(f"there is no built-in set {name!r}; there are {', '.join(NAMED)}{hint}")
    return NAMED[name]


def find(name: str, data_dir: str | Path | None = None) -> Found | None:
    """Where the files of a set lie, or none; a part of a set only where it is nowhere whole."""
    layouts = known(name).layouts
    whole = [layout for layout in layouts if not layout.note]
    for some in (whole, layouts):
        for root in roots(data_dir):
            for layout in some:
                for folder in (root / below for below in layout.folders):
                    paths = {file.name: _path(folder, file) for file in layout.files}
                    there = {name: path for name, path in paths.items() if path is not None}
                    if len(there) == len(paths):
                        return Found(layout, folder, there)
    return None


def _path(folder: Path, file: File) -> Path | None:
    """The file in `folder`, plain or packed."""
    names = [file.name + packing for packing in ("", *PACKED)]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def load_named(
    name: str,
    *,
    targets: str | Sequence[str] | None = None,
    data_dir: str | Path | None = None,
    seed: int = 0,
    max_examples: int | None = None,
    leaks: Any = "drop",
    missing: Any = "drop",
) -> Problem:
    """Load a built-in set."""
    named, found = known(name), find(name, data_dir)
    if named.read is not None:
        raw: Any = named.read(lambda name: b"")
    else:
        found = _here(name, data_dir)
        if not named.labelled:
            raise ValueError(
                f"{name} has no labels, so there is nothing to predict; pre-train on it, or name "
                "a set with labels"
            )
        raw = found.layout.read(found.content)
    split: dict[str, Any] = {"given": raw.given, "seed": seed, "max_examples": max_examples}
    if isinstance(raw, Pictures):
        if targets and list(targets) != ["class"] and targets != "class":
            raise ValueError(f"{name} holds images, with one target: class; leave targets out")
        images, words = raw.images, [raw.classes[id] for id in raw.ids]
        problem = from_images(name, words, lambda rows, _: images[rows], order=raw.classes, **split)
    else:
        chosen = targets or raw.targets
        names = [*map(str.strip, chosen.split(","))] if isinstance(chosen, str) else chosen
        frame = raw.frame.drop(columns=[column for column in raw.made if column not in names])
        table = {"leaks": leaks, "missing": missing}
        problem = from_frame(frame, name, targets=names, text=raw.text, **table, **split)
    if found is not None and found.layout.note:
        problem.notes.insert(1, f"note: {found.layout.note}")
    return problem


def load_texts(name: str, data_dir: str | Path | None = None) -> list[str]:
    """The texts of a built-in set without labels."""
    if known(name).labelled:
        raise ValueError(f"{name} has labels; load it with load_problem({name!r})")
    found = _here(name, data_dir)
    raw = found.layout.read(found.content)
    assert isinstance(raw, Lines)
    return raw.texts


def _here(name: str, data_dir: str | Path | None) -> Found:
    found = find(name, data_dir)
    if found is None:
        raise MissingData(f"{name} is not here; {how_to_get(name, data_dir)}")
    return found


def how_to_get(name: str, data_dir: str | Path | None = None) -> str:
    """What to do to have a set: one command, or page, files and folder."""
    if any(_urls(layout) for layout in known(name).layouts):
        return f"get it with: moiety data get {name}"
    layout = known(name).layouts[0]
    files = " and ".join(file.name for file in layout.files)
    folder = roots(data_dir)[0] / layout.folders[0]
    return f"take {files} from {known(name).page} and put them into {folder}"


def _urls(layout: Layout) -> bool:
    return layout.archive is not None or all(file.url for file in layout.files)


def get(name: str, data_dir: str | Path | None = None, *, progress: Progress | None = None) -> Path:
    """Fetch a set that is not here yet, into `data_dir` or the user's cache; return its folder."""
    found = find(name, data_dir)
    if found is not None and not found.layout.note:
        return found.folder
    if known(name).read is not None:
        raise ValueError(f"{name} comes with scikit-learn: there is nothing to get")
    layout = next((layout for layout in known(name).layouts if _urls(layout)), None)
    if layout is None:
        raise ValueError(f"{name} has no download with a published checksum; {how_to_get(name)}")
    root = Path(data_dir).expanduser() if data_dir else cache()
    folder = root / layout.folders[0]
    try:
        _fetch(layout, folder, progress)
    except ValueError as error:
        raise ValueError(
            f"{error}; or put the files from {known(name).page} into {folder}"
        ) from None
    return folder


def _fetch(layout: Layout, folder: Path, progress: Progress | None) -> None:
    if layout.archive is not None:
        packed = layout.archive
        archive = download(packed.url, folder / packed.name, md5=packed.packed, progress=progress)
        unpack(archive, folder, {file.name: file.sums[0] for file in layout.files})
        archive.unlink()
        return
    for file in layout.files:
        if _path(folder, file) is not None:
            continue
        packing = Path(file.url).suffix if file.packed else ""
        target = folder / (file.name + packing)
        download(file.url, target, md5=file.packed or file.sums[0], progress=progress)
