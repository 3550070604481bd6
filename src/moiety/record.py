"""What is kept of one call of a layer, and what all its calls sum up to.

summarise([make_record(routing, routing, None)]).load       # share of the work of each expert
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .routing import Routing
from .routing.base import masked_mean


@dataclass(frozen=True, eq=False)
class Record:
    """One call of one layer, as tensors (nothing waits for a GPU)."""

    load_E: Tensor
    dropped: Tensor  # the call's drop rate
    entropy: Tensor | None  # mean entropy of a token's gate distribution, in nats
    tokens: Tensor  # real ones
    padded_E: Tensor  # slots that padding took: none in our layers, some in native ones
    routing: Routing | None


@dataclass(frozen=True)
class LayerSummary:
    """What the experts of one layer did, over all recorded calls."""

    load: list[float]  # share of the work of each expert; sums to one
    entropy: float | None  # mean entropy of a token's gate, in nats; None: there is no gate (hash)
    dead: list[int]  # experts that got no token
    drop_rate: float
    effective: float  # exp(entropy of the load): as many equally busy experts
    tokens: int
    calls: int
    padding: list[float]  # what padding took at each expert, as a share of all slots, its own too


def choice_alone(r: Routing) -> Routing:
    """The choice alone, without the gradient or the [T, E] tables behind it."""
    slim = r.replace(
        scores=None, probs=None, gate=None, threshold=None, noise_std=None, penalties={}
    )
    return slim.detach()


def make_record(r: Routing, with_padding: Routing, kept: Routing | None) -> Record:
    """Count a decision; `with_padding` is the same before padding was taken out of it."""
    load_E = r.load()
    padded_E = torch.zeros_like(load_E) if r.mask is None else with_padding.load() - load_E
    entropy = None
    if r.probs is not None:
        p = r.probs.detach()
        p = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
        per_row = torch.special.entr(p).sum(-1)
        entropy = masked_mean(per_row, r.mask if per_row.shape[0] == r.tokens else None)
    return Record(load_E, r.drop_rate(), entropy, r.real_tokens(), padded_E, kept)


def total(loads: list[Tensor]) -> Tensor:
    """`[E]`: the sum of all calls."""
    experts = max(load.shape[0] for load in loads)  # a layer may have grown between two calls
    return torch.stack([nn.functional.pad(n, (0, experts - n.shape[0])) for n in loads]).sum(0)


def summarise(calls: list[Record]) -> LayerSummary:
    """Numbers of all calls together; this waits for a GPU."""
    load_E = total([c.load_E for c in calls]).double().cpu()
    padded_E = total([c.padded_E for c in calls]).double().cpu()
    share_E = load_E / load_E.sum().clamp(min=1)
    tokens = torch.stack([c.tokens for c in calls]).double().cpu()
    part = tokens / tokens.sum().clamp(min=1)

    def mean(values: list[Tensor]) -> float:
        return float((torch.stack(values).double().cpu() * part).sum())

    entropies = [c.entropy for c in calls if c.entropy is not None]
    return LayerSummary(
        load=share_E.tolist(),
        entropy=mean(entropies) if len(entropies) == len(calls) else None,
        dead=(load_E == 0).nonzero().flatten().tolist(),
        drop_rate=mean([c.dropped for c in calls]),
        effective=math.exp(float(torch.special.entr(share_E).sum())),
        tokens=int(tokens.sum()),
        calls=len(calls),
        padding=(padded_E / (load_E + padded_E).sum().clamp(min=1)).tolist(),
    )
