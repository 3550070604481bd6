"""Hash gate: a fixed function of the token, nothing learned. A baseline that is hard to beat.

router = moiety.build_router("hash", dim=64, experts=8)
router(x_TD, ids=input_ids.flatten())
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import Opt, Router, need_k
from .registry import register
from .value import Routing

BITS = 16  # of the code of a token without an id
MASK = 0xFFFFFFFF
Number = TypeVar("Number", int, Tensor)


@register(
    "hash",
    paper="Hash Layers (Roller et al. 2021)",
    equation="expert = hash(token id), section 3.1",
)
class Hash(Router):
    """Choose experts by a hash of the token's id, or of its direction where ids are not given.

    Balanced: of E consecutive ids (from a multiple of E) each expert gets exactly one, in an order
    that the seed decides. Without ids, the signs of a fixed random projection are the id.
    """

    projection: Tensor

    def __init__(
        self,
        dim: int,
        experts: int,
        *,
        k: Annotated[int, Opt("different experts a token", alt=2, low=1)] = 1,
        seed: Annotated[int, Opt("of hash and projection", alt=1, low=0)] = 0,
    ) -> None:
        super().__init__(dim, experts)
        need_k(self.name, k, experts)
        self.k, self.seed = k, seed
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("projection", torch.randn(BITS, dim, generator=generator))

    def route(
        self, x_TD: Tensor, mask: Tensor | None, ids: Tensor | None, group: int | None
    ) -> Routing:
        ids = self.code(x_TD) if ids is None else ids
        if ids.is_floating_point():
            raise ValueError(f"{self.name}: ids must be whole numbers, got {ids.dtype}")
        ids = ids.long()
        order_TE = shuffled(ids // self.experts, self.experts, self.seed)
        place_TK = (ids % self.experts)[:, None] + torch.arange(self.k, device=ids.device)
        return even(order_TE.gather(1, place_TK % self.experts), x_TD, self.experts)

    def code(self, x_TD: Tensor) -> Tensor:
        """`[T]`: the signs of the projected token, read as a binary number."""
        signs = self.check_scores(F.linear(x_TD, self.projection.to(x_TD.dtype))) > 0
        return (signs * 2 ** torch.arange(BITS, device=x_TD.device)).sum(-1)


def shuffled(row_T: Tensor, experts: int, seed: int) -> Tensor:
    """`[T, E]`: for each row number an order of all experts that depends on it and the seed."""
    key_TE = row_T[:, None] * experts + torch.arange(experts, device=row_T.device)
    return mixed(mixed(key_TE) + mixed(seed + 1)).argsort(dim=-1, stable=True)


def mixed(n: Number) -> Number:
    """Scramble 32-bit whole numbers, tensor or int, one to one.

    The multiplier is below 2^31, so that no product leaves 63 bits: what overflow does differs
    between compilers.
    """
    n = n & MASK
    for _ in range(2):
        n = ((n ^ (n >> 16)) * 0x45D9F3B) & MASK
    return n ^ (n >> 16)


def even(index_TK: Tensor, x_TD: Tensor, experts: int) -> Routing:
    """The decision that gives each chosen expert the weight 1/k."""
    weight = torch.full_like(index_TK, 1 / index_TK.shape[1], dtype=x_TD.dtype)
    return Routing(index=index_TK, weight=weight, experts=experts, tokens=index_TK.shape[0])
