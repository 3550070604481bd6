"""What to hide: tokens by lot, 80/10/10; patches by noise. All numbers come from one generator."""

from __future__ import annotations

import torch
from torch import Tensor

RATE = 0.15  # of tokens; the paper does not state its own, this is BERT's
HIDDEN, OTHER = 0.8, 0.1  # show the mask token, show another word; the rest shows the true one


def token_mask(
    ids_BL: Tensor,
    maskable_BL: Tensor,
    words: Tensor,
    mask_token: int,
    generator: torch.Generator,
    rate: float = RATE,
) -> Tensor:
    """What to show at the places to predict, [B, L] int64, and -1 everywhere else.

    Every maskable token is chosen with probability `rate`; a text in which none was gets the one
    with the lowest lot, or its loss would be a mean over nothing.
    """
    shape, device, source = ids_BL.shape, ids_BL.device, generator.device
    lots = torch.rand(shape, generator=generator, device=source).to(device)
    fates = torch.rand(shape, generator=generator, device=source).to(device)
    drawn = torch.randint(len(words), shape, generator=generator, device=source)
    others = words.to(source)[drawn].to(device)
    lots = lots.masked_fill(~maskable_BL, 2.0)
    lowest = lots == lots.amin(1, keepdim=True)
    chosen = ((lots < rate) | lowest) & maskable_BL
    shown = torch.where(fates < HIDDEN + OTHER, others, ids_BL)
    shown = shown.masked_fill(fates < HIDDEN, mask_token)
    return torch.where(chosen, shown, -1)


def patch_noise(examples: int, patches: int, generator: torch.Generator) -> Tensor:
    """[B, patches] in 0…1; ViT-MAE keeps the patches with the least, always the same number."""
    return torch.rand(examples, patches, generator=generator, device=generator.device)


def mean_over_masked(values_BL: Tensor, where_BL: Tensor) -> Tensor:
    """Eq. (2): the mean over the masked places of each example, then the mean over examples."""
    values = values_BL.masked_fill(~where_BL, 0.0)
    return (values.sum(1) / where_BL.sum(1).clamp(min=1)).mean()
