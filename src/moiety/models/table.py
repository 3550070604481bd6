"""`TableNet`, the preset `mlp`: residual blocks over the columns of a table.

model = TableNet(numbers=6, cardinalities=[9, 16], outputs=2)
logits = model(numbers, categories)       # [B, 6] and [B, 2] ids -> [B, 2]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .patch_transformer import dense


class TableNet(nn.Module):
    """Embeds every category, joins them with the numbers, and refines the row in blocks."""

    def __init__(
        self,
        *,
        numbers: int,
        cardinalities: Sequence[int],
        outputs: int,
        dim: int = 64,
        depth: int = 3,
        feedforward: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        if not numbers and not cardinalities:
            raise ValueError("a table needs at least one column besides its targets")
        feedforward = feedforward or dense
        # As wide as there is something to tell apart, up to 16.
        widths = [min(16, (n + 1) // 2 + 1) for n in cardinalities]
        self.embed = nn.ModuleList(nn.Embedding(n, w) for n, w in zip(cardinalities, widths))
        self.join = nn.Linear(numbers + sum(widths), dim)
        self.blocks = nn.ModuleList(Residual(dim, feedforward(dim)) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, outputs)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Logits of rows."""
        embedded = [embed(ids) for embed, ids in zip(self.embed, categories.unbind(1))]
        h = self.join(torch.cat([numbers, *embedded], 1))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class Residual(nn.Module):
    """A feed-forward part on a normalised copy that is added back."""

    def __init__(self, dim: int, feedforward: nn.Module) -> None:
        super().__init__()
        self.norm, self.feedforward = nn.LayerNorm(dim), feedforward

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feedforward(self.norm(x))
