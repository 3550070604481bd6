"""`ImageTransformer`, the preset `vit-tiny`: a patch transformer for images of a given size.

model = ImageTransformer(shape=(1, 28, 28), outputs=10)
logits = model(images)                    # uint8 [B, 1, 28, 28] -> [B, 10]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .patch_transformer import PatchTransformer


class ImageTransformer(nn.Module):
    """Normalises images by the mean and spread of each channel, cuts them into patches, answers.

    Small images (up to 32 pixels) are cut into about 4 × 4 patches, larger ones into 7 × 7, so
    that the work for an image hardly depends on its size.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        *,
        shape: tuple[int, int, int],
        outputs: int,
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.25,),
        dim: int = 48,
        depth: int = 3,
        feedforward: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        channels, height, width = shape
        self.patch = patch_size(height, width)
        rows, columns = -(-height // self.patch), -(-width // self.patch)
        self.register_buffer("mean", torch.tensor(list(mean)).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(list(std)).clamp(min=1e-3).view(-1, 1, 1))
        self.trunk = PatchTransformer(
            patches=rows * columns,
            patch_dim=channels * self.patch**2,
            classes=outputs,
            dim=dim,
            depth=depth,
            feedforward=feedforward,
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images `[B, C, H, W]` of bytes."""
        x = (images / 255 - self.mean) / self.std
        bottom, right = (-x.shape[-2]) % self.patch, (-x.shape[-1]) % self.patch
        x = F.pad(x, (0, right, 0, bottom))  # with the mean
        return self.trunk(F.unfold(x, self.patch, stride=self.patch).transpose(1, 2))


def patch_size(height: int, width: int) -> int:
    """The side of a patch for images of this size."""
    longest = max(height, width)
    return max(-(-longest // (4 if longest <= 32 else 7)), 1)
