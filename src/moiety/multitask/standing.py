"""`Standing`: what static gates decided, kept between calls while nothing they depend on changes.

A static gate sees no example. In inference its decision is the same in every call, and asking for
it again costs dozens of small operations and, on a GPU, a wait until the host knows whom to run.
So without gradients and in eval mode it is asked once. It is asked anew after any other call, after
`train()` or `eval()`, and when a parameter or buffer of a gate was changed or replaced. Torch does
not say when values are changed through `.data`: call `eval()` after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .together import Decisions
from .union import Work, can_look, find_work

Found = tuple[Decisions, Work | None]


class Standing(nn.Module):
    """Keeps one decision; a module without parameters, so that `train()` and `eval()` reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.key: tuple = ()
        self.found: Found | None = None

    def forward(
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
            if self.found is not None:
                self.drop()
            return decide(x_TD), None
        key = (
            x_TD.shape[0],
            x_TD.dtype,
            x_TD.device,
            *_state([*routers.parameters(), *routers.buffers(), *also]),
        )
        if self.found is None or not _same(key, self.key):
            decisions = decide(x_TD)
            work = find_work(decisions.choice_GTE, decisions.routings)
            self.key, self.found = key, (decisions, work)
        return self.found

    def drop(self) -> None:
        self.key, self.found = (), None

    def train(self, mode: bool = True) -> Standing:
        self.drop()
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:  # a copy or a file has no use for it
        return {**self.__dict__, "key": (), "found": None}


def _may_keep(routers: nn.ModuleList, x_TD: Tensor) -> bool:
    if torch.is_grad_enabled() or not can_look(x_TD):
        return False
    return all(r.static and not r.training and not r._forward_hooks for r in routers)


def _state(tensors: Iterable[Tensor]) -> list[Any]:
    """All that says whether tensors are the same as before."""
    return [fact for t in tensors for fact in (t, t._version, t.data_ptr())]


def _same(key: tuple, other: tuple) -> bool:
    """Equal, where tensors must be the very same ones: `==` would compare their values."""
    pairs = zip(key, other, strict=False)
    equal = (a is b if isinstance(a, Tensor) else a == b for a, b in pairs)
    return len(key) == len(other) and all(equal)
