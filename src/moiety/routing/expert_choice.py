"""Expert choice: each expert takes the tokens it likes best, so that all work equally much.

router = moiety.build_router("expert-choice", dim=64, experts=8, capacity_factor=2.0)
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import LinearRouter, Opt, top_k
from .capacity import group_of, real_per_group, slots_for
from .registry import register
from .value import Routing


@register(
    "expert-choice",
    paper="Zhou et al. 2022",
    equation="S = softmax(X W); G, I = TopK(Sᵀ, C), C = n c / e, (1)–(2)",
)
class ExpertChoice(LinearRouter):
    """Let each expert choose its C tokens of a group; weigh them by the softmax over experts.

    C = ceil(S · capacity_factor / E) of the S real tokens of a group, at most S; of equal gates the
    earlier token's goes first. A token's experts depend on the other tokens of its group, later
    ones included; it may get none, or all.
    """

    causal = False
    weights_sum = "at most one"

    def __init__(
        self,
        dim: int,
        experts: int,
        *,
        capacity_factor: Annotated[
            float, Opt("experts a token, on average", alt=1.0, low=0.01)
        ] = 2.0,
    ) -> None:
        super().__init__(dim, experts)
        self.capacity_factor = capacity_factor

    def route(
        self, x_TD: Tensor, mask: Tensor | None, ids: Tensor | None, group: int | None
    ) -> Routing:
        scores = self.scores(x_TD)
        gate = scores.softmax(-1)
        tokens = x_TD.shape[0]
        if tokens == 0:
            index, active = torch.zeros_like(gate.t(), dtype=torch.long), None
        else:
            index, active = self.choose(gate.detach(), mask, group)
        return Routing(
            index=index,
            weight=gate.t().gather(1, index),
            experts=self.experts,
            tokens=tokens,
            by="expert",
            active=active,
            scores=scores,
            probs=gate,
            gate=gate,
        )

    def choose(
        self, gate_TE: Tensor, mask: Tensor | None, group: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """`[E, G·C]`: each expert's tokens, group by group, and which of these slots are used."""
        tokens = gate_TE.shape[0]
        size = tokens if group is None or group >= tokens else group
        groups = -(-tokens // size)
        slots = min(math.ceil(size * (self.capacity_factor / self.experts) - 1e-9), size)
        if mask is not None:
            gate_TE = torch.where(mask[:, None], gate_TE, -1.0)  # below any real token
        gate_ET = F.pad(gate_TE.t(), (0, groups * size - tokens), value=-2.0)
        index_EGC = top_k(gate_ET.reshape(self.experts, groups, size), slots)
        start_G = torch.arange(groups, device=gate_TE.device) * size
        index = (index_EGC + start_G[:, None]).flatten(1).clamp(max=tokens - 1)
        if mask is None and size == tokens:
            return index, None
        # A last group that is not full, or one with padding, has fewer slots to give.
        real_G = real_per_group(group_of(tokens, size, gate_TE.device), groups, mask)
        limit_G = slots_for(real_G, self.capacity_factor, self.experts).minimum(real_G)
        used_GC = torch.arange(slots, device=gate_TE.device) < limit_G[:, None]
        return index, used_GC.flatten().expand(self.experts, -1)
