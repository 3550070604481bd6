"""What it learns from: data sets, as tensors that are ready to train on."""

from .digits import digits, to_patches

__all__ = ["digits", "to_patches"]
