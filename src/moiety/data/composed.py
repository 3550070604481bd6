"""Multi-MNIST and Multi-Fashion: two images in one, and a task for each (DSelect-k, section 4).

problem = multi_digits("mnist", seed=0)          # or "fashion-mnist"
problem.train.inputs["images"]                   # uint8 [100000, 1, 36, 36]
problem.train.targets["top_left"]                # the class of the image in that corner

The paper says "overlaid" and no more: a pixel of ours is the lighter of the two, or with
overlay="sum" their sum, cut at 255. No image is in two splits: the pairs of test are made of the
set's test images, those of train and validation of its other ones, dealt out by the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .images import _mean_std
from .named import load_named
from .problem import Problem, Split, Target

SHIFT = 4  # pixels, to each corner
CORNERS = ("top_left", "bottom_right")
Overlay = Literal["max", "sum"]


def multi_digits(
    name: str = "mnist",
    seed: int = 0,
    *,
    counts: Sequence[int] = (100_000, 20_000, 20_000),
    overlay: Overlay = "max",
    data_dir: str | Path | None = None,
) -> Problem:
    """Compose pairs of images of a built-in set, each drawn uniformly, into train and so on."""
    if len(counts) != 3 or min(counts) < 1:
        raise ValueError(f"counts are of train, validation and test, 1 or more; got {counts}")
    single = load_named(name, seed=seed, data_dir=data_dir)
    if single.kind != "image":
        raise ValueError(f"{name} holds no images to compose; use mnist or fashion-mnist")
    train, validation, test = (
        _pairs(source, count, np.random.default_rng([seed, place]), overlay)
        for place, (source, count) in enumerate(zip(single.splits.values(), counts))
    )
    images = train.inputs["images"]
    mean, std = _mean_std(images.numpy())
    (target,) = single.targets
    channels, height, width = images.shape[1:]
    return Problem(
        f"multi-{name}",
        "image",
        [Target(corner, "classes", target.classes) for corner in CORNERS],
        train,
        validation,
        test,
        notes=[f"composed by seed {seed}: two images of {name} in each, overlay {overlay}"],
        shape=(channels, height, width),
        mean=mean,
        std=std,
    )


def compose(top_left: Tensor, bottom_right: Tensor, overlay: Overlay = "max") -> Tensor:
    """Lay images uint8 [N, C, H, W] over others, 8 pixels up and left of them: [N, C, H+8, W+8]."""
    if overlay not in ("max", "sum"):
        raise ValueError(f"overlay must be max or sum, got {overlay!r}")
    count, channels, height, width = top_left.shape
    whole = top_left.new_zeros(count, channels, height + 2 * SHIFT, width + 2 * SHIFT)
    whole[..., :height, :width] = top_left
    corner = whole[..., 2 * SHIFT :, 2 * SHIFT :]  # a view: what is written here is in `whole`
    if overlay == "sum":
        # The most that can be added, since uint8 would begin again at 0.
        bottom_right = torch.minimum(bottom_right, 255 - corner)
        corner += bottom_right
    else:
        torch.maximum(corner, bottom_right, out=corner)
    return whole


def _pairs(source: Split, count: int, draw: np.random.Generator, overlay: Overlay) -> Split:
    rows = torch.from_numpy(draw.integers(len(source), size=(2, count)))
    images, (ids,) = source.inputs["images"], source.targets.values()
    composed = compose(images[rows[0]], images[rows[1]], overlay)
    return Split({"images": composed}, {name: ids[these] for name, these in zip(CORNERS, rows)})
