"""`PatchTransformer`: a small transformer that classifies a sequence of patches.

model = PatchTransformer(patches=16, patch_dim=4, classes=10)             # dense
model = PatchTransformer(
    patches=16, patch_dim=4, classes=10,
    feedforward=lambda dim: MoE("top-k", dim=dim, hidden=64, experts=8),  # sparse
)
logits = model(x)                                                         # x: [B, 16, 4]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class PatchTransformer(nn.Module):
    """Linear patch embedding, learned positions, pre-norm blocks, class by mean pooling.

    `feedforward` makes the feed-forward part of each block from the model's width: a dense one of
    four times that width by default, or an `MoE` layer.
    """

    def __init__(
        self,
        *,
        patches: int,
        patch_dim: int,
        classes: int,
        dim: int = 64,
        depth: int = 3,
        heads: int = 4,
        feedforward: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        feedforward = feedforward or dense
        self.embed = nn.Linear(patch_dim, dim)
        # As large as the embedding of a patch: the same stroke elsewhere is another digit.
        self.position = nn.Parameter(torch.randn(patches, dim) * 0.5)
        self.blocks = nn.ModuleList(Block(dim, heads, feedforward(dim)) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class logits `[B, classes]` of patches `[B, L, patch_dim]`."""
        shape = [len(self.position), self.embed.in_features]
        if x.dim() != 3 or list(x.shape[1:]) != shape:
            raise ValueError(
                f"expected patches of shape [B, {shape[0]}, {shape[1]}], got {[*x.shape]}"
            )
        h = self.embed(x) + self.position
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h).mean(1))


class Block(nn.Module):
    """Attention and a feed-forward part, each on a normalised copy that is added back."""

    def __init__(self, dim: int, heads: int, feedforward: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm_2, self.feedforward = nn.LayerNorm(dim), feedforward

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm_1(x), mask)
        return x + self.feedforward(self.norm_2(x))


class Attention(nn.Module):
    """Attention of every token to every real one (`mask` `[B, L]`; None: all are real)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"a width of {dim} cannot be divided among {heads} heads")
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # [B, L, 3, heads, D/heads]
        q, k, v = split.permute(2, 0, 3, 1, 4)
        # Two plain products: torch's FLOP counter sees nothing of its fused attention on a CPU.
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask.bool()[:, None, None, :], float("-inf"))
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


def dense(dim: int, hidden: int | None = None) -> nn.Module:
    """The feed-forward part of a plain transformer."""
    hidden = hidden or 4 * dim
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
