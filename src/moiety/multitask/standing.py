"""`Standing`: what static gates decided, kept between calls while nothing they depend on changes.

A static gate sees no example. In inference its decision is the same in every call, and asking for
it again costs dozens of small operations. So without gradients and in eval mode it is asked once,
and again when a number that it depends on is another. Its few numbers themselves are compared, and
not torch's count of their changes, since changes through `.data` are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .together import Decisions
from .union import Work, can_look, find_work

Found = tuple[Decisions, Work | None]


class Standing:
    """Keeps one decision, with the plain values and the numbers that it was made of."""

    def __init__(self) -> None:
        self.kept: tuple[tuple, Tensor, Found] | None = None  # in one: threads may share a model

    def __call__(
        self,
        routers: nn.ModuleList,
        x_TD: Tensor,
        decide: Callable[[Tensor], Decisions],
        also: Iterable[Tensor] = (),
        plain: tuple = (),
    ) -> Found:
        """The decisions, and the work that follows from them where that is known already.

        also, plain: tensors and plain values, besides the routers' own, that `decide` depends on.
        """
        if not _may_keep(routers, x_TD):
            return decide(x_TD), None
        own = (_plain(router) for router in routers)
        # Tensors made in inference mode are of no use outside it.
        where = (x_TD.shape[0], x_TD.dtype, x_TD.device, torch.is_inference_mode_enabled())
        facts = (*where, plain, *own)
        numbers = _numbers([*routers.parameters(), *routers.buffers(), *also])
        kept = self.kept
        if kept is not None and facts == kept[0] and _equal(numbers, kept[1]):
            return kept[2]
        decisions = decide(x_TD)
        found = decisions, find_work(decisions.choice_GTE, decisions.routings)
        self.kept = facts, numbers, found
        return found

    def __getstate__(self) -> dict[str, Any]:  # a copy or a file has no use for it
        return {"kept": None}


def _may_keep(routers: nn.ModuleList, x_TD: Tensor) -> bool:
    if torch.is_grad_enabled() or not can_look(x_TD):
        return False
    heard = any(r._forward_hooks or r._forward_pre_hooks for r in routers)
    return not heard and all(r.static and not r.training for r in routers)


def _plain(router: nn.Module) -> tuple:
    """The kind of a router, and its options that are plain values."""
    values = (v for v in vars(router).values() if isinstance(v, (bool, int, float, str)))
    return type(router), *values


def _numbers(tensors: list[Tensor]) -> Tensor:
    """All values as one tensor; a copy."""
    return torch.cat([t.detach().flatten().double() for t in tensors])


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and torch.equal(a, b)
