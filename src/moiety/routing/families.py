"""Families: how a sparse router serves experts that were copied after it was built.

A copied expert joins its parent's family. The router goes on scoring families; the chosen family
gets the parent's weight, and one member serves the token. So the layer computes the same function
right after growth, whatever the router. Each copy adds one split: a linear gate that decides, for
the tokens that would have gone to the parent, between parent and copy. Splits are applied in the
order in which they were made, which makes a family a tree with the first expert as its root.
(The growth of ALMA, Caccia et al. 2022, for any router.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .value import Routing


class Families(nn.Module):
    """E experts in families, of which a router scores `scored`."""

    parents: Tensor  # [S] the expert that split s was made from; its copy is expert scored + s
    family: Tensor  # [E] the family of each expert

    def __init__(self, dim: int, scored: int, like: Tensor) -> None:
        super().__init__()
        self.scored = scored
        self.weight = nn.Parameter(like.new_empty(0, dim))
        self.register_buffer("parents", torch.empty(0, dtype=torch.long, device=like.device))
        self.register_buffer("family", torch.arange(scored, device=like.device))

    @property
    def total(self) -> int:
        return self.scored + self.parents.shape[0]

    def add(self, parents: list[int]) -> dict[str, list[int]]:
        """Let a copy of each parent join its family; returns the old row behind each new one."""
        old = self.weight.data
        rows = old.new_empty(len(parents), old.shape[1]).normal_(std=old.shape[1] ** -0.5)
        self.weight = nn.Parameter(torch.cat([old, rows]), self.weight.requires_grad)
        ids = self.parents.new_tensor(parents)
        self.family = torch.cat([self.family, self.family[ids]])
        self.parents = torch.cat([self.parents, ids])
        return {"weight": [*range(old.shape[0]), *[-1] * len(parents)]}

    def forward(self, routing: Routing, x_TD: Tensor) -> Routing:
        """Turn a decision about families into one about experts."""
        z_TS = F.linear(x_TD, self.weight.to(x_TD.dtype))
        share_TE = self._shares(z_TS)
        if routing.by == "expert":
            routing = self._by_expert(routing, z_TS, share_TE)
        else:
            routing = self._by_token(routing.by_token(), z_TS, share_TE)
        gate = None if routing.gate is None else routing.gate[:, self.family] * _live(share_TE)
        probs = None if routing.probs is None else routing.probs[:, self.family] * share_TE
        return routing.replace(experts=self.total, gate=gate, probs=probs)

    def _shares(self, z_TS: Tensor) -> Tensor:
        """`[T, E]`: each expert's soft share of its family; the shares of a family sum to one."""
        table = z_TS.new_ones(z_TS.shape[0], self.scored)
        for s in range(self.parents.shape[0]):
            parent = self.parents[s : s + 1]
            part = table.index_select(1, parent)
            copy = part * torch.sigmoid(z_TS[:, s : s + 1])
            table = torch.cat([table.index_copy(1, parent, part - copy), copy], 1)
        return table

    def _member(self, z: Tensor, family: Tensor) -> Tensor:
        """The expert that serves a slot, by its family and its token's split scores `[..., S]`."""
        expert = family
        for s in range(self.parents.shape[0]):
            moves = (expert == self.parents[s]) & (z[..., s] > 0)
            expert = torch.where(moves, self.scored + s, expert)
        return expert

    def _by_token(self, routing: Routing, z_TS: Tensor, share_TE: Tensor) -> Routing:
        index = self._member(z_TS[:, None, :], routing.index)
        live = _live(share_TE).gather(1, index)
        return routing.replace(index=index, weight=routing.weight * live)

    def _by_expert(self, routing: Routing, z_TS: Tensor, share_TE: Tensor) -> Routing:
        token = routing.index[self.family]  # every member lists the family's tokens ...
        family = self.family[:, None].expand_as(token)
        ids = torch.arange(self.total, device=token.device)[:, None]
        serves = self._member(z_TS[token], family) == ids  # ... and serves its own
        active = serves if routing.active is None else serves & routing.active[self.family]
        live = _live(share_TE).t().gather(1, token)
        return routing.replace(
            index=token, weight=routing.weight[self.family] * live, active=active
        )


def _live(share: Tensor) -> Tensor:
    """One, with the gradient of log share: the member serves with the whole weight of its family,
    and its gate still learns.

    Also where the share is zero to the bit, which a replayed choice may fall on.
    """
    now = share.detach()
    return 1 + (share - now) / now.clamp(min=torch.finfo(share.dtype).tiny)
