"""Test images as a model takes them, and how it normalises them.

An attack moves pixels in 0…1 at the size that the model reads. What its image processor does before
(resizing, cropping) is done here; normalisation is left to the attacked model.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data import Problem

Normalize = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Pictures:
    """Images `[N, C, H, W]` in 0…1, their classes, and mean and std that the model subtracts."""

    x: Tensor
    y: Tensor
    normalize: Normalize | None
    says: str


def check_reads_images(name: str) -> None:
    """Refuse a model that reads no images, by its config: before data and weights are read."""
    from ...hf.loading import load_config, named_class

    kind = named_class(load_config(name))
    if kind is not None and "pixel_values" not in inspect.signature(kind.forward).parameters:
        raise ValueError(
            f"{name} reads no images ({kind.__name__}): audit it in Python, with "
            "moiety.robust.audit, which attacks texts in the space of their embeddings"
        )


def prepare(model: nn.Module, name: str, problem: Problem, count: int, seed: int) -> Pictures:
    """Draw test images and bring them to the form that the model reads."""
    from ...hf.loading import load_image_processor

    if problem.kind != "image":
        raise ValueError(
            f"{problem.name} holds {'texts' if problem.kind == 'text' else 'a table'}, and this "
            "command moves pixels: give a folder of images by class or a built-in set of images, "
            "or audit in Python, with moiety.robust.audit"
        )
    config: Any = getattr(model, "config", None)
    shuffled = torch.randperm(len(problem.test), generator=torch.Generator().manual_seed(seed))
    split = problem.test.take(shuffled[:count].sort().values)
    images = _in_channels(split.inputs["images"], getattr(config, "num_channels", None))
    processor = load_image_processor(name)
    normalize: Normalize | None
    if processor is None:
        x, normalize = _resize(images, config), _by_data(problem, images.shape[1])
        by = "mean and std of the training images (it has no image processor)"
    else:
        x, normalize = _process(images, processor, name)
        by = f"{type(processor).__name__} of the model"
    labels = split.targets[problem.targets[0].name]
    known = _count_classes(model, name, x[:1])
    y, order = _as_model(labels, problem.targets[0].classes, config, known)
    have, read = ("×".join(map(str, t.shape[-2:])) for t in (images, x))
    size = read if have == read else f"{have} brought to {read}"
    count_said = f"{len(y)} test images of {problem.name}" + " (all there are)" * (len(y) < count)
    said = f"{count_said}, {size}, normalised by {by}; classes {order}"
    return Pictures(x, y, normalize, said)


@torch.no_grad()
def _count_classes(model: nn.Module, name: str, x: Tensor) -> int:
    """How many classes a model tells apart, by what it answers to an image."""
    own = next(model.parameters())
    try:
        logits = getattr(model(pixel_values=x.to(own.device, own.dtype)), "logits", None)
    except (RuntimeError, ValueError) as error:  # of transformers or torch: images of other sizes
        size = "×".join(map(str, x.shape[1:]))
        why = str(error).strip().split("\n")[0]
        raise ValueError(f"{name} cannot read images of {size}: {why}") from None
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise ValueError(
            f"{name} is a {type(model).__name__}, which gives no scores of classes: give a model "
            "for image classification"
        )
    return logits.shape[-1]


def _in_channels(images: Tensor, wanted: int | None) -> Tensor:
    """Grey images in three channels for a model of colours; the other way is refused."""
    have = images.shape[1]
    if wanted in (None, have):
        return images
    if have != 1:
        kinds = {1: "grey images", 3: "images in colour"}
        wants, has = (kinds.get(n, f"images of {n} channels") for n in (wanted, have))
        raise ValueError(f"the model reads {wants}, and the data are {has}: convert them first")
    return images.expand(-1, wanted, -1, -1)


def _resize(images: Tensor, config: Any) -> Tensor:
    """Without a processor: as large as the config says, or as they are."""
    size, x = getattr(config, "image_size", None), images.float() / 255
    sides = (size, size) if isinstance(size, int) else tuple(size or x.shape[-2:])
    if sides != tuple(x.shape[-2:]):
        x = F.interpolate(x, sides, mode="bilinear", antialias=True, align_corners=False)
    return x.clamp(0, 1)


def _by_data(problem: Problem, channels: int) -> Normalize:
    mean, std = (
        [*values] * channels if len(values) == 1 else [*values]
        for values in (problem.mean, problem.std)
    )
    return mean, std


def _process(images: Tensor, processor: Any, name: str) -> tuple[Tensor, Normalize | None]:
    """All that the processor does but its normalisation."""
    factor = getattr(processor, "rescale_factor", 1 / 255)
    if not getattr(processor, "do_rescale", True) or abs(factor * 255 - 1) > 1e-3:
        raise ValueError(
            f"the image processor of {name} does not bring bytes to 0…1; audit the model in "
            "Python, with normalize=…"
        )
    rows = list(images.permute(0, 2, 3, 1).numpy())
    words = {"do_normalize": False, "input_data_format": "channels_last", "return_tensors": "pt"}
    x = processor(rows, **words)["pixel_values"].float().clamp(0, 1)
    if not getattr(processor, "do_normalize", True):
        return x, None
    return x, (list(processor.image_mean), list(processor.image_std))


def _as_model(
    labels: Tensor, classes: Sequence[str], config: Any, known: int
) -> tuple[Tensor, str]:
    """Class ids as the model counts them: by name where it knows the names, else in order."""
    ids = {str(word): id for word, id in (getattr(config, "label2id", None) or {}).items()}
    if set(map(str, classes)) <= set(ids):
        places = torch.tensor([ids[str(word)] for word in classes])
        return places[labels], "by name"
    if known != len(classes):
        raise ValueError(
            f"the model has {known} classes and the data have {len(classes)}, whose names it "
            "does not know: give it the names in label2id, or other data"
        )
    first = ", ".join(map(str, classes[:3]))
    return labels, f"in the order of the data ({first}{', …' * (len(classes) > 3)})"
