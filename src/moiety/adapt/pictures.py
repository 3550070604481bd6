"""Images of files, arrays and built-in sets, in the shape that a model reads.

    wanted = Picture.of(encoder, fit=True)
    images = read_images("photos/", wanted)          # uint8 [N, C, H, W]

With `fit` the model's own image processor brings them to that shape, so that whoever loads the
saved model prepares an image just as those were that it was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from torch import Tensor

from ..data import Problem
from ..data.images import from_images, image_files, images_by_class, load_image
from ..data.named import NAMED
from .images import ImageEncoder, check_images
from .reading import ARRAYS, problem_of, training_part

if TYPE_CHECKING:
    from PIL import Image

MODES = {1: "L", 3: "RGB"}  # of PIL, with so many channels of 8 bits


@dataclass(frozen=True)
class Picture:
    """The shape C, H, W that images must have, or are brought to by an image processor."""

    shape: tuple[int, int, int]
    processor: Any = None

    @staticmethod
    def of(encoder: ImageEncoder, fit: bool) -> Picture:
        """What a model reads. With `fit` its processor converts to colour from now on, and as such
        it is saved."""
        if not fit:
            return Picture(encoder.shape)
        encoder.processor.do_convert_rgb = encoder.shape[0] == 3
        return Picture(encoder.shape, encoder.processor)


def read_images(
    source: Any, wanted: Picture, column: str | None, data_dir: str | Path | None = None
) -> Tensor:
    """The images of a source, uint8 [N, C, H, W], of its training split where it has splits."""
    if isinstance(source, Problem) or str(source) in NAMED:
        problem = problem_of(source, data_dir)
        if problem.kind != "image":
            raise ValueError(f"{problem.name} holds no images, and the model reads images")
        return fit_images(problem.train.inputs["images"], wanted)
    path = training_part(Path(source))
    if path.is_dir():
        return decode(image_files(path), wanted, path)
    if path.suffix.lower() not in ARRAYS:
        raise ValueError(f"{path.name}: images must be a folder, .npy or .npz")
    from ..hf.examples import read

    _, images = read(path, column=array_name(path, column), limit=2**62)
    pixels = np.array(images)
    channels = pixels.shape[-1]
    if channels not in (*MODES, wanted.shape[0]):
        said = f"images have {channels} channels, and 1 or 3 are read"
        if pixels.shape[1] in (*MODES, wanted.shape[0]):
            said = f"images must be [N, H, W, C] or [N, H, W], not {list(pixels.shape)}"
        raise ValueError(f"{path.name}: {said}")
    made = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    return _made_fit(made, wanted) if channels in MODES else fit_images(made, wanted)


def class_problem(folder: Path, wanted: Picture, seed: int) -> Problem:
    """A folder with a folder of images for each class, split by the seed."""
    files, words = images_by_class(folder)
    if not files:
        raise ValueError(
            f"{folder} holds no images by class; put those of each class into a folder of its own, "
            f"such as {folder.name}/cat/1.png"
        )

    def read(rows: np.ndarray, notes: list[str]) -> np.ndarray:
        return decode([files[row] for row in rows], wanted, folder).numpy()

    return from_images(folder.name, words, read, seed=seed)


def split_of_classes(folder: Path, wanted: Picture) -> tuple[Tensor, list[str]]:
    """The images of one split, such as train/cat/1.png, and the class of each."""
    files, words = images_by_class(folder)
    apart = sorted(set(image_files(folder)) - set(files))
    if apart:
        raise ValueError(
            f"{folder.name}/{apart[0].name} is in no folder of a class; move it into one, or "
            "remove it"
        )
    return decode(files, wanted, folder), words


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


# -- one image -------------------------------------------------------------------------------------


def decode(files: Sequence[Path], wanted: Picture, folder: Path) -> Tensor:
    """Image files as uint8 [N, C, H, W]; one of another shape is refused, or made to fit."""
    return torch.stack([_decoded(path, wanted, folder) for path in files])


def _decoded(path: Path, wanted: Picture, folder: Path) -> Tensor:
    name, image = str(path.relative_to(folder)), load_image(path, folder)
    if image.mode[0] in "IF":
        raise ValueError(
            f"{name} has pixels of more than 8 bits, which image processors do not read as such; "
            "save it with 8"
        )
    if wanted.processor is not None:
        return _fitted(image.convert("L") if wanted.shape[0] == 1 else image, wanted)
    channels = {mode: count for count, mode in MODES.items()}.get(image.mode)
    if channels is None:
        raise ValueError(
            f"{name} is of mode {image.mode}, and the model reads {_colours(wanted)}; convert it, "
            "or say fit=True"
        )
    _check((1, channels, image.height, image.width), wanted, name)
    pixels = torch.from_numpy(np.array(image))
    return pixels[None] if channels == 1 else pixels.permute(2, 0, 1)


def fit_images(images: Tensor, wanted: Picture) -> Tensor:
    """Images [N, C, H, W] in the wanted shape: as they are if they have it, or made to fit."""
    if tuple(images.shape[1:]) != wanted.shape:
        return _made_fit(images, wanted)
    _check(tuple(images.shape), wanted)
    return images


def _made_fit(images: Tensor, wanted: Picture) -> Tensor:
    if wanted.processor is None:
        _check(tuple(images.shape), wanted)
        return images
    if images.dim() != 4 or images.dtype != torch.uint8 or images.shape[1] not in MODES:
        raise ValueError(
            f"only uint8 images [N, C, H, W] of 1 or 3 channels can be fitted, got {images.dtype} "
            f"{list(images.shape)}"
        )
    from PIL import Image

    def picture(pixels: Tensor) -> Image.Image:
        shown = pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)
        made = Image.fromarray(shown.numpy())
        return made.convert("L") if wanted.shape[0] == 1 else made

    return torch.stack([_fitted(picture(pixels), wanted) for pixels in images])


def _fitted(image: Image.Image, wanted: Picture) -> Tensor:
    """What the processor makes of an image before it scales the pixels."""
    made = wanted.processor(image, do_rescale=False, do_normalize=False, return_tensors="pt")[
        "pixel_values"
    ][0]
    _check((1, *made.shape), Picture(wanted.shape))
    return (
        made.round().clamp(0, 255).to(torch.uint8)
        if made.is_floating_point()
        else made.to(torch.uint8)
    )


def _colours(wanted: Picture) -> str:
    return MODES.get(wanted.shape[0], f"{wanted.shape[0]} channels")


def _check(found: tuple[int, ...], wanted: Picture, name: str = "") -> None:
    try:
        check_images(found, wanted.shape)
    except ValueError as error:
        raise ValueError(f"{name and f'{name}: '}{error}, or say fit=True") from None
