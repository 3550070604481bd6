"""ViT-MAE of any image and patch size."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .encoders import Batch, Encoder, Masked, Represented
from .masks import mean_over_masked, patch_noise


class ImageEncoder(Encoder):
    """A masked auto-encoder of images with its image processor."""

    kind = "image"

    def __init__(self, model: Any, processor: Any, made: Sequence[str] = ()) -> None:
        super().__init__(model, processor, made)
        config = model.config
        size, patch = config.image_size, config.patch_size
        if not isinstance(size, int) or not isinstance(patch, int) or size % patch:
            raise ValueError(
                f"images of {size} pixels cannot be cut into patches of {patch}: both must be one "
                "whole number in the model's config, the first a multiple of the second"
            )
        self.shape = (config.num_channels, size, size)  # C, H, W
        self.patches = (size // patch) ** 2
        kept = int(self.patches * (1 - config.mask_ratio))
        if not 0 < kept < self.patches:
            raise ValueError(
                f"mask_ratio {config.mask_ratio} keeps {kept} of {self.patches} patches; "
                "set one in the model's config that hides some and keeps some"
            )
        self.scale, self.mean, self.std = normalisation(processor, config.num_channels)
        check_processor(processor, self.shape)

    def batch(self, rows: Any) -> Batch:
        """From uint8 images [B, C, H, W], or floats that are normalised already."""
        images = torch.as_tensor(rows)
        check_images(tuple(images.shape), self.shape)
        images = images.to(self.device)
        dtype = next(self.model.parameters()).dtype
        if images.dtype == torch.uint8:
            mean, std = (
                torch.tensor(values, device=self.device).view(-1, 1, 1)
                for values in (self.mean, self.std)
            )
            images = (images.float() * self.scale - mean) / std
        return {"pixel_values": images.to(dtype)}

    def mask(self, batch: Batch, generator: torch.Generator) -> Tensor:
        pixels = batch["pixel_values"]
        return patch_noise(len(pixels), self.patches, generator).to(pixels.device)

    def masked(self, batch: Batch, mask: Tensor) -> Masked:
        pixels = batch["pixel_values"]
        made = self.model(pixel_values=pixels, noise=mask)
        # Not `made.loss`: an upcycled model adds its balance losses to it.
        targets, where = self._targets(pixels), made.mask.bool()
        losses = (made.logits - targets).square().mean(-1)
        return Masked(mean_over_masked(losses, where), made.logits, targets, where)

    def _targets(self, pixels: Tensor) -> Tensor:
        """The pixels of every patch, normalised in each where the config says so."""
        patches = self.model.patchify(pixels)
        if not self.model.config.norm_pix_loss:
            return patches
        mean, spread = patches.mean(-1, keepdim=True), patches.var(-1, keepdim=True)
        return (patches - mean) / (spread + 1.0e-6) ** 0.5

    def represent(self, batch: Batch) -> Represented:
        pixels = batch["pixel_values"]
        # Noise that rises from patch to patch leaves them in their order.
        order = torch.arange(self.patches, device=pixels.device, dtype=torch.float32)
        with unmasked(self.trunk):
            features = self.trunk(pixel_values=pixels, noise=order.expand(len(pixels), -1))[0]
        return Represented(features, features.new_ones(features.shape[:2], dtype=torch.bool))

    def input_key(self) -> str:
        said = {"kind": "image", "scale": self.scale, "mean": self.mean, "std": self.std}
        return json.dumps(said)


@contextmanager
def unmasked(trunk: Any) -> Iterator[None]:
    """Let a ViT-MAE encoder see all patches.

    Its embeddings read the ratio from a config that all parts of the model share; they get one of
    their own meanwhile, so that nobody else ever sees another ratio.
    """
    shared = trunk.embeddings.config
    own = copy.copy(shared)
    own.mask_ratio = 0.0
    trunk.embeddings.config = own
    try:
        yield
    finally:
        trunk.embeddings.config = shared


def normalisation(processor: Any, channels: int) -> tuple[float, list[float], list[float]]:
    """Scale, mean and spread: what the processor does to the pixels of an image of right size."""
    scale = processor.rescale_factor if processor.do_rescale else 1.0
    if not processor.do_normalize:
        return float(scale), [0.0] * channels, [1.0] * channels
    mean, std = list(processor.image_mean), list(processor.image_std)
    if len(mean) != channels or len(std) != channels:
        raise ValueError(
            f"the image processor normalises {len(mean)} channels, and the model reads "
            f"{channels}; give the processor of this model"
        )
    return float(scale), mean, std


def check_processor(processor: Any, wanted: tuple[int, int, int]) -> None:
    """Raise for a processor that makes images of another size."""
    channels, *size = wanted
    if channels not in (1, 3):  # a processor resizes no others
        return
    blank = np.zeros((*size, channels), dtype=np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = processor(blank, input_data_format="channels_last", return_tensors="np")
    found = made["pixel_values"].shape[-2:]
    if found != tuple(size):
        raise ValueError(
            f"the image processor makes images of {found[0]}×{found[1]}, and the model reads "
            f"{size[0]}×{size[1]}; give the processor of this model"
        )


def check_images(found: tuple[int, ...], wanted: tuple[int, int, int]) -> None:
    """Raise if images [N, C, H, W] are not of the model's shape."""
    if len(found) != 4 or found[0] == 0:
        raise ValueError(f"images must be [N, C, H, W] with at least one, got {list(found)}")
    if found[1] != wanted[0]:
        raise ValueError(
            f"the images have {found[1]} channels, and the model reads {wanted[0]}; convert them"
        )
    if found[2:] != wanted[1:]:
        raise ValueError(
            f"the images are {found[2]}×{found[3]}, and the model reads {wanted[1]}×{wanted[2]}; "
            "resize them"
        )
