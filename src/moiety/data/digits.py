"""Handwritten digits that ship with scikit-learn: 1797 grey images of 8×8 pixels, ten classes.

train, test = digits()
x, y = train.tensors            # [1347, 16, 4] in [0, 1], and the class of each
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import TensorDataset


def digits(seed: int = 0, *, patch: int = 2) -> tuple[TensorDataset, TensorDataset]:
    """The digits as patch sequences, three quarters to train and one to test.

    `seed` decides the split, which keeps the share of each class.
    """
    # Imported here: `import moiety` loads torch and nothing heavier.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, classes = load_digits(return_X_y=True)
    x = to_patches(torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) / 16, patch)
    y = torch.tensor(classes)
    train, test = train_test_split(range(len(y)), test_size=0.25, random_state=seed, stratify=y)
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def to_patches(images: Tensor, size: int) -> Tensor:
    """Cut images `[B, H, W]` into squares, row by row: `[B, patches, size²]`."""
    _, height, width = images.shape
    if size < 1 or height % size or width % size:
        raise ValueError(f"images of {height}×{width} pixels cannot be cut into {size}×{size}")
    return images.unfold(1, size, size).unfold(2, size, size).flatten(3).flatten(1, 2)
