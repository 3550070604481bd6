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
    """Keeps one decision."""

    def __init__(self) -> None:
        self.facts: tuple = ()
        self.numbers: Tensor | None = None
        self.found: Found | None = None

    def __call__(
        self,
        routers: nn.ModuleList,
        x_TD: Tensor,
        decide: Callable[[Tensor], Decisions],
        also: Iterable[Tensor] = (),
    ) -> Found:
        """The decisions, and the work that follows from them where that is known already.

        also: tensors besides those of the routers that `decide` depends on.
        """
        if not _may_keep(routers, x_TD):
            return decide(x_TD), None
        plain = (_plain(router) for router in routers)
        facts = (x_TD.shape[0], x_TD.dtype, x_TD.device, *plain)
        numbers = _numbers([*routers.parameters(), *routers.buffers(), *also])
        if self.found is None or facts != self.facts or not _equal(numbers, self.numbers):
            decisions = decide(x_TD)
            work = find_work(decisions.choice_GTE, decisions.routings)
            self.facts, self.numbers, self.found = facts, numbers, (decisions, work)
        return self.found

    def __getstate__(self) -> dict[str, Any]:  # a copy or a file has no use for it
        return {"facts": (), "numbers": None, "found": None}


def _may_keep(routers: nn.ModuleList, x_TD: Tensor) -> bool:
    if torch.is_grad_enabled() or not can_look(x_TD):
        return False
    return all(r.static and not r.training and not r._forward_hooks for r in routers)


def _plain(router: nn.Module) -> tuple:
    """The options of a router that are plain values."""
    return tuple(v for v in vars(router).values() if isinstance(v, (bool, int, float, str)))


def _numbers(tensors: list[Tensor]) -> Tensor:
    """All values as one tensor; a copy."""
    return torch.cat([t.detach().flatten().double() for t in tensors])


def _equal(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.device == b.device and torch.equal(a, b)
