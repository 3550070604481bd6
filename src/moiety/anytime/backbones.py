"""The models of ALMA's image streams: an MLP and a narrow VGG19, plain and with soft tree gates.

learner("single", lambda seed: MLP(64))                   # standardised images [N, 1, 28, 28]
learner("growing-moe", lambda seed: TreeVGG19(16))

(Caccia et al. 2022; digest 4, section 4.2.) The mixtures start with one expert a layer, as in the
paper (its code starts with two), and are then the plain models with the same weights.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..experts import ModuleExperts
from ..moe import MoE
from ..routing.tree import Tree

CONVOLUTIONS = (2, 2, 4, 4, 4)  # of VGG19's blocks
SIDE = 4  # a convolutional gate sees its input pooled to 4 × 4


class MLP(nn.Sequential):
    """inputs → width → width → classes, with ReLU."""

    def __init__(self, width: int, *, inputs: int = 784, classes: int = 10) -> None:
        hidden = [self.hidden(n, m) for n, m in pairwise((inputs, width, width))]
        super().__init__(nn.Flatten(), *hidden, nn.Linear(width, classes))

    def hidden(self, inputs: int, outputs: int) -> nn.Module:
        """A hidden layer."""
        return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())


class TreeMLP(MLP):
    """The MLP whose hidden layers are mixtures of such layers under a soft tree."""

    def hidden(self, inputs: int, outputs: int) -> nn.Module:
        experts = ModuleExperts([super().hidden(inputs, outputs)], dim=inputs, out_dim=outputs)
        return MoE(Tree(inputs, 1), experts)


class VGG19(nn.Sequential):
    """VGG19 with all layers of one width, batch norm, and one linear layer on top."""

    def __init__(
        self, width: int, *, shape: tuple[int, int, int] = (3, 32, 32), classes: int = 10
    ) -> None:
        channels, height, side = shape
        if height != side or side % 32:
            raise ValueError(f"images must be square, of 32 pixels or a multiple, got {shape}")
        blocks: list[nn.Module] = [_block(channels, width, CONVOLUTIONS[0])]
        for number, convolutions in enumerate(CONVOLUTIONS[1:], start=1):
            blocks.append(self.block(width, side >> number, convolutions))
        head = nn.Linear(width * (side // 32) ** 2, classes)
        super().__init__(*blocks, nn.Flatten(), head)

    def block(self, width: int, side: int, convolutions: int) -> nn.Module:
        """A block but the first, for inputs of this side."""
        return _block(width, width, convolutions)


class TreeVGG19(VGG19):
    """VGG19 whose blocks but the first are mixtures of blocks under a soft tree."""

    def block(self, width: int, side: int, convolutions: int) -> nn.Module:
        shape = (width, side, side)
        experts = ModuleExperts(
            [_block(width, width, convolutions)],
            dim=width * side**2,
            out_dim=width * (side // 2) ** 2,
            shape=shape,
        )
        layer = MoE(PooledTree(shape, 1), experts)
        return nn.Sequential(nn.Flatten(), layer, nn.Unflatten(1, (width, side // 2, side // 2)))


def _block(inputs: int, width: int, convolutions: int) -> nn.Module:
    layers: list[nn.Module] = []
    for number in range(convolutions):
        layers += [
            nn.Conv2d(width if number else inputs, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.MaxPool2d(2))


class PooledTree(Tree):
    """A soft tree over images, given flat, whose decisions see them pooled to 4 × 4."""

    def __init__(self, shape: tuple[int, int, int], experts: int) -> None:
        super().__init__(shape[0] * SIDE**2, experts)
        self.shape, self.dim = shape, torch.Size(shape).numel()

    def split(self, parents: list[int]) -> dict[str, list[int]] | None:
        flat, self.dim = self.dim, self.weight.shape[1]  # new decisions are as wide as the others
        try:
            return super().split(parents)
        finally:
            self.dim = flat

    def scores(self, x_TD: Tensor) -> Tensor:
        images = x_TD.view(-1, *self.shape)
        return super().scores(F.adaptive_avg_pool2d(images, SIDE).flatten(1))


def crop_flip(x: Tensor, padding: int = 4, fill: float = -1.9) -> Tensor:
    """Shift each image by up to `padding` pixels and mirror half of them; `Training(augment=…)`.

    What is shifted in has the value `fill`: about black where pixels are standardised.
    """
    n, side, device = len(x), x.shape[-1], x.device
    wide = F.pad(x, [padding] * 4, value=fill)
    down, right = torch.randint(2 * padding + 1, (2, n, 1), device=device)
    pixels = torch.arange(side, device=device)
    mirrored = torch.rand(n, 1, device=device) < 0.5
    rows, columns = down + pixels, right + torch.where(mirrored, pixels.flip(0), pixels)
    images = torch.arange(n, device=device)[:, None, None]
    # Index tensors apart from each other put the channels last.
    return wide[images, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
