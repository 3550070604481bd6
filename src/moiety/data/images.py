"""A problem from images: a folder with a folder for each class, or an array of a built-in set."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from .frame import finish
from .leaks import SUSPICIOUS, class_score
from .problem import Leak, Problem, Split
from .splits import choose, drop_repeats, split_of
from .targets import check_classes, settle_kinds, strata

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".pgm", ".ppm")
PIXELS = 64 * 10**6  # of one image
SIDE = 64  # of the images that a folder of several or large sizes is brought to
AS_IS = 96  # images of one size up to this side are not resized


def from_images(
    name: str,
    words: Sequence[str],
    read: Callable[[np.ndarray, list[str]], np.ndarray],
    *,
    given: np.ndarray | None = None,
    order: Sequence[str] = (),
    seed: int = 0,
    max_examples: int | None = None,
    notes: list[str] | None = None,
) -> Problem:
    """Work out a problem from the class of each image, and `read`, which gets the rows wanted.

    `read` returns uint8 [N, C, H, W] and may add to the notes. Only what is used is read. `order`
    is that of the classes, where the data have one.
    """
    import pandas

    notes, target = [] if notes is None else notes, "class"
    labels, kinds = settle_kinds(
        pandas.DataFrame({target: words}, dtype=object), {target: "classes"}, name, notes
    )
    check_classes(labels, kinds, name, ours=given is None)
    rows = choose(strata(labels, kinds), given, seed=seed, limit=max_examples, notes=notes)
    wanted = np.concatenate(list(rows.values()))
    images = read(wanted, notes)
    # From here on a row is a place in `images`.
    labels = labels.iloc[wanted].reset_index(drop=True)
    ends = np.cumsum([len(these) for these in rows.values()])[:-1]
    rows = dict(zip(rows, np.split(np.arange(len(wanted)), ends)))
    keys = np.array([hash(image.tobytes()) for image in images])
    leaks = drop_repeats(keys, rows, target=target, notes=notes)
    mean, std = _mean_std(images[rows["train"]])
    _, channels, height, width = images.shape
    shown = " ".join(f"{m:.3f}/{s:.3f}" for m, s in zip(mean, std))
    colour = "grey" if channels == 1 else "colour"
    notes.append(f"images: {height}×{width}, {colour}, mean/std of train {shown}")
    splits = {part: Split({"images": torch.from_numpy(images[r])}, {}) for part, r in rows.items()}
    found = {"shape": (channels, height, width), "mean": mean, "std": std, "leaks": leaks}
    return finish(name, "image", labels, kinds, splits, rows, notes, found, order)


def _mean_std(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of each channel, in 0…1."""
    mean, std = [], []
    for channel in range(images.shape[1]):
        values = images[:, channel]
        first = values.mean(dtype=np.float64) / 255
        second = np.square(values, dtype=np.uint16).mean(dtype=np.float64) / 255**2
        mean.append(float(first))
        std.append(float(max(second - first**2, 0)) ** 0.5 or 1.0)
    return tuple(mean), tuple(std)


@dataclass
class _Header:
    """What the head of an image file says."""

    size: tuple[int, int]
    grey: bool


def from_folder(
    folder: Path, *, seed: int = 0, max_examples: int | None = None, image_size: int | None = None
) -> Problem:
    """Work out a problem from FOLDER/class/image.png, or FOLDER/train/class/image.png and so on."""
    files, words, given = list_images(folder)
    notes: list[str] = []
    extra: list[Leak] = []

    def read(wanted: np.ndarray, notes: list[str]) -> np.ndarray:
        these = [files[row] for row in wanted]
        headers = [_header(path, folder) for path in these]
        extra.extend(_format_leak(these, headers, [words[row] for row in wanted]))
        size = _settle_size(headers, image_size, notes)
        grey = all(header.grey for header in headers)
        return np.stack([_decode(path, size, grey, folder) for path in these])

    problem = from_images(
        folder.name, words, read, given=given, seed=seed, max_examples=max_examples, notes=notes
    )
    problem.leaks.extend(extra)
    return problem


def image_files(folder: Path) -> list[Path]:
    """All images in a folder and below, but for hidden ones."""
    found = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES]
    seen = [path for path in found if not _hidden(path.relative_to(folder))]
    if not seen:
        where = folder.relative_to(folder.parent.parent)
        raise ValueError(
            f"{where} holds no image ({', '.join(SUFFIXES)}); put some there, or remove it"
        )
    return seen


def images_by_class(folder: Path) -> tuple[list[Path], list[str]]:
    """The images in the folders of a folder, and the class of each: the name of that folder."""
    files = {home.name: image_files(home) for home in _folders(folder)}
    words = [name for name, found in files.items() for _ in found]
    return [path for found in files.values() for path in found], words


def list_images(folder: Path) -> tuple[list[Path], list[str], np.ndarray | None]:
    """The image files, the class of each, and its split where the folder has splits."""
    inside = _folders(folder)
    parts = {path: split_of(path.name) for path in inside}
    given = bool(inside) and all(parts.values())
    files, words, splits = [], [], []
    for top in inside if given else [folder]:
        found, names = images_by_class(top)
        files += found
        words += names
        splits += [parts.get(top)] * len(found)
    if not files:
        raise ValueError(
            f"{folder} holds neither tables nor images by class; put the images of each class "
            f"into a folder of its own, such as {folder.name}/cat/1.png"
        )
    return files, words, np.array(splits) if given else None


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not _hidden(Path(p.name)))


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _header(path: Path, folder: Path) -> _Header:
    with _opened(path, folder) as image:
        return _Header(image.size, image.mode in ("1", "L") or image.mode.startswith("I"))


def load_image(path: Path, folder: Path, near: tuple[int, int] | None = None) -> Image.Image:
    """One image, turned as its EXIF data say; a large JPEG may be decoded smaller, `near` a size.

    What is no image, or too large, raises.
    """
    from PIL import ImageOps

    with _opened(path, folder) as image:
        if near is not None:
            image.draft(None, (2 * near[0], 2 * near[1]))
        image.load()
        return ImageOps.exif_transpose(image)


@contextmanager
def _opened(path: Path, folder: Path) -> Iterator[Image.Image]:
    """An image whose head is read, and has a size that we take."""
    from PIL import Image

    name = path.relative_to(folder.parent)
    large = ValueError(f"{name} has more than {PIXELS // 10**6} million pixels; make it smaller")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # ours is stricter
            with Image.open(path) as image:
                if image.width * image.height > PIXELS:
                    raise large
                yield image
    except Image.DecompressionBombError:
        raise large from None
    except (OSError, SyntaxError, ValueError) as error:
        if error is large:
            raise
        raise ValueError(f"{name} cannot be read as an image; replace or remove it") from None


def _settle_size(headers: list[_Header], wanted: int | None, notes: list[str]) -> tuple[int, int]:
    """Width and height that all images get."""
    sizes = Counter(header.size for header in headers)
    first = next(iter(sizes))
    if wanted is None and len(sizes) == 1 and max(first) <= AS_IS:
        return first
    side = wanted or min(SIDE, int(np.median([min(header.size) for header in headers])))
    low, high = min(map(min, sizes)), max(map(max, sizes))
    notes.append(
        f"images of {len(sizes)} sizes (sides of {low} to {high} pixels) resized and cropped to "
        f"{side}×{side}"
    )
    return side, side


def _decode(path: Path, size: tuple[int, int], grey: bool, folder: Path) -> np.ndarray:
    """One image as uint8 [C, H, W]."""
    from PIL import Image, ImageOps

    image = load_image(path, folder, near=size)
    if image.mode == "F":
        raise ValueError(
            f"{path.relative_to(folder.parent)} holds fractions, whose range nobody knows; save it "
            "with whole numbers of 8 or 16 bits"
        )
    if image.mode.startswith("I"):  # 16 bits, which PIL would cut off at 255
        image = Image.fromarray((np.asarray(image) // 257).clip(0, 255).astype(np.uint8))
    image = image.convert("L" if grey else "RGB")
    if image.size != size:
        image = ImageOps.fit(image, size)
    pixels = np.asarray(image)
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


def _format_leak(files: list[Path], headers: list[_Header], words: list[str]) -> list[Leak]:
    """Whether the size or the format of the files tells their class."""
    import pandas

    looks = [(h.size, h.grey, path.suffix.lower()) for h, path in zip(headers, files)]
    levels, ids = pandas.factorize(pandas.Series(looks))[0], pandas.factorize(np.array(words))[0]
    score = class_score(levels, ids)
    if score < SUSPICIOUS["classes"]:
        return []
    reason = f"size and format of the files alone tell {score:.1%} of the classes"
    return [Leak("(size and format)", "class", round(score, 4), reason)]
