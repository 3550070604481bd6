"""`coupled`: whether the answer for one example depends on the others of its batch.

Experts with a capacity that a whole batch shares, or experts that choose among the tokens of a
batch, let one example push out another. Then an attack on a batch is more than an attack on each
example, and a batch that lost examples is another one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..moe import MoE
from .target import Target

PROBED = 4  # copies in the probe


def coupled(model: nn.Module | Target, x: Tensor, group: int = 1) -> str | None:
    """Why examples of different groups of `group` influence each other; None: they do not.

    Our layers say so themselves; others are asked with a few batches.
    """
    target = model if isinstance(model, Target) else Target(model)
    for name, layer in target.model.named_modules():
        why = layer.couples(group) if isinstance(layer, MoE) else None
        if why:
            return f"{name or 'the layer'}: {why}"
    if len(x) == 0:
        return None
    with target.at_rest(), torch.no_grad():
        return _probe(target, x, group)


def _probe(target: Target, x: Tensor, group: int) -> str | None:
    """Compare a group behind copies of itself with the same one before them and behind others.

    All batches are of one size: sums of other sizes run in another order, and with products in TF32
    the difference can send a token to another expert.
    """
    target = target.watching(None)
    own = x[:group]
    copies = target(torch.cat([own] * (PROBED + 1))).logits
    again = target(torch.cat([own] * (PROBED + 1))).logits
    first, *rest = copies[-len(own) :], copies[: len(own)]
    for before in (own.flip(-1), torch.zeros_like(own)):
        rest.append(target(torch.cat([before] * PROBED + [own])).logits[-len(own) :])
    if not torch.equal(copies, again):
        return None  # a random model answers differently anyway
    # An expert that has more rows may add them up otherwise; what it drops is far above this.
    room = 4 * torch.finfo(_exact(target, x)).eps ** 0.5 * first.abs().max().clamp(min=1e-3)
    if any(bool((other - first).abs().max() > room) for other in rest):
        return "an example's logits change with the others of its batch"
    return None


def _exact(target: Target, x: Tensor) -> torch.dtype:
    floats = (p.dtype for p in target.model.parameters() if p.is_floating_point())
    return next(floats, x.dtype)
