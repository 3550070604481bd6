"""Capacity: how many slots an expert may take, and who goes without.

As in V-MoE (Riquelme et al. 2021): an expert takes ceil(S · K · factor / E) slots of a group of S
real tokens. All first choices are placed before any second choice; within a rank, earlier tokens
first ("order") or tokens with the larger gate first ("priority", which sees the whole batch).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .families import Families
from .value import Routing

Overflow = Literal["order", "priority"]


def limit(
    routing: Routing,
    factor: float,
    *,
    overflow: Overflow = "order",
    group: int | None = None,
    mask: Tensor | None = None,
    families: Families | None = None,
) -> Routing:
    """Drop the slots past the capacity of their expert. `group` = tokens that share a capacity.

    A grown expert shares the capacity of its family, so that growth drops nobody else.
    """
    if routing.by == "expert":
        raise ValueError(
            "expert choice has its capacity built in: set the router's capacity_factor, "
            "not the layer's"
        )
    if routing.tokens == 0:
        return routing
    routing = routing.by_token()
    wants_TK = torch.ones_like(routing.index, dtype=torch.bool)
    if routing.active is not None:
        wants_TK = routing.active
    if mask is not None:
        wants_TK = wants_TK & mask[:, None]
    group_T = group_of(routing.tokens, group, routing.index.device)
    owners, owner_TK = routing.experts, routing.index
    if families is not None:
        owners, owner_TK = families.scored, families.family[routing.index]
    place_TK = _place(routing, owner_TK, wants_TK, group_T, overflow)
    limit_T = _capacity(routing, owners, factor, group_T, mask)
    kept_TK = wants_TK & (place_TK < limit_T[:, None])
    dropped_TK = wants_TK & ~kept_TK
    if routing.dropped is not None:  # a router with a limit of its own, within the layer's
        dropped_TK = dropped_TK | routing.dropped
    return routing.replace(active=kept_TK, dropped=dropped_TK)


def group_of(tokens: int, group: int | None, device: torch.device) -> Tensor:
    """`[T]`: the group of each token; groups are runs of `group` consecutive tokens."""
    return torch.arange(tokens, device=device) // (group or max(tokens, 1))


def real_per_group(group_T: Tensor, groups: int, mask: Tensor | None) -> Tensor:
    """`[G]`: the number of tokens in each group that are not padding."""
    real_T = torch.ones_like(group_T) if mask is None else mask.long()
    return torch.zeros(groups, dtype=torch.long, device=group_T.device).scatter_add(
        0, group_T, real_T
    )


def slots_for(real_tokens: Tensor, per_token: float, experts: int) -> Tensor:
    """ceil(tokens · per_token / experts), safe against the last bit of a product."""
    return torch.ceil(real_tokens.double() * (per_token / experts) - 1e-9).long()


def _capacity(
    routing: Routing, owners: int, factor: float, group_T: Tensor, mask: Tensor | None
) -> Tensor:
    groups = routing.tokens  # an upper bound that needs no look at the data
    real_G = real_per_group(group_T, groups, mask)
    return slots_for(real_G, routing.index.shape[1] * factor, owners)[group_T]


def _place(
    routing: Routing, owner_TK: Tensor, wants_TK: Tensor, group_T: Tensor, overflow: Overflow
) -> Tensor:
    """`[T, K]`: how many slots of the same group and owner (expert or family) come before this."""
    tokens, k = routing.index.shape
    order_T = torch.arange(tokens, device=group_T.device)
    if overflow == "priority":
        # By the gate itself: renormalised weights no longer tell a sure token from another.
        gate_TK = routing.weight
        if routing.gate is not None:
            gate_TK = routing.gate.expand(tokens, -1).gather(1, routing.index)
        gate_T = gate_TK.detach().masked_fill(~wants_TK, -1.0).amax(1)
        order_T = torch.sort(gate_T, descending=True, stable=True).indices
    # Slots in the order in which they are served: rank by rank, in each rank token by token.
    served = order_T.repeat(k) * k + torch.arange(k, device=order_T.device).repeat_interleave(
        tokens
    )
    bucket = owner_TK + group_T[:, None] * routing.experts
    bucket = bucket.masked_fill(~wants_TK, tokens * routing.experts)  # waits behind everybody
    bucket_N, by_bucket = torch.sort(bucket.flatten()[served], stable=True)
    place_N = torch.arange(tokens * k, device=order_T.device)
    place_N = place_N - torch.searchsorted(bucket_N, bucket_N)
    place = torch.empty_like(place_N).scatter(0, served[by_bucket], place_N)
    return place.view(tokens, k)
