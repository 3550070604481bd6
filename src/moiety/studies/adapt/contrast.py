"""Further training of an encoder with labels, by the supervised contrastive loss (SupCon).

Khosla et al. 2020 (arXiv 2004.11362), eq. 2: of all views z of a batch, normalised,

    L = mean_i  -1/|P(i)| sum_{p in P(i)} log( exp(z_i·z_p / t) / sum_{a != i} exp(z_i·z_a / t) )

with P(i) the other views of the same class. The digest's Table 5 has it as a rival of further
pre-training, without its details: z is the class token after the last norm, without a projection.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...adapt.encoders import Encoder
from ...adapt.recipe import Recipe, adamw, set_rate
from ...adapt.rows import Rows
from ...train import seeded
from ...train.draws import step_seed

TEMPERATURE = 0.1
NOISE = 0.1  # of a view, in units of the pixels' spread: letters may not be mirrored
ORDER, VIEWS = 31, 32  # what a seed is used for


def contrastive_loss(z_ND: Tensor, labels_N: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Eq. 2 above; views without another of their class do not count."""
    z_ND = F.normalize(z_ND, dim=1)
    same = torch.eye(len(z_ND), dtype=torch.bool, device=z_ND.device)
    scores = (z_ND @ z_ND.T / temperature).masked_fill(same, -math.inf)
    positive = (labels_N[:, None] == labels_N) & ~same
    logs = torch.where(positive, scores.log_softmax(1), 0.0)
    count = positive.sum(1)
    return -(logs.sum(1) / count.clamp(min=1))[count > 0].mean()


def contrast(encoder: Encoder, rows: Rows, *, seed: int, **words: Any) -> Encoder:
    """A copy of an image encoder after so many steps; `words` are those of `Recipe`."""
    encoder, recipe = encoder.copy(), Recipe(**words)
    assert encoder.kind == "image" and rows.labels is not None
    optimizer, size = adamw(encoder, recipe), min(recipe.batch, len(rows))
    encoder.model.train()
    with seeded(seed, encoder.device):
        for step in range(recipe.steps):
            lots = torch.Generator().manual_seed(step_seed(step_seed(seed, ORDER), step))
            some = torch.randperm(len(rows), generator=lots)[:size]
            torch.manual_seed(step_seed(step_seed(seed, VIEWS), step))
            loss = _loss(encoder, rows, some, recipe.precision == "bfloat16")
            optimizer.zero_grad()
            loss.backward()
            set_rate(optimizer, recipe.rate(step))
            optimizer.step()
    encoder.model.eval()
    optimizer.zero_grad()
    return encoder


def _loss(encoder: Encoder, rows: Rows, some: Tensor, half: bool) -> Tensor:
    """Of two noisy views of each example; the loss itself is in float32."""
    assert rows.labels is not None
    pixels = encoder.batch(rows.take(some))["pixel_values"].repeat(2, 1, 1, 1)
    views = pixels + NOISE * torch.randn_like(pixels)
    labels = rows.labels[some].repeat(2).to(pixels.device)
    with torch.autocast(encoder.device.type, torch.bfloat16, half):
        seen = encoder.represent({"pixel_values": views})
    return contrastive_loss(seen.cls.float(), labels)
