"""`GateLog`: what the gates did in training, kept in buffers of the model.

Buffers work where nobody can look in: every copy of `train.fit_many` brings its own log home.

    model = MultiGate(…, log=(200, 10))         # 200 points, one every 10 training calls
    model.log.weights()                         # [P, G, E]: of a gate by example, the batch's mean
    model.log.binary_step()                     # [G]: None, or the first call with binary selectors

With validation data `fit_many` keeps the best weights and with them the log up to that step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..routing import Router, Routing
from ..routing.dselect import DSelect
from ..routing.selector import is_plateau
from .together import one_row, run_alike


class GateLog(nn.Module):
    """The weights of G gates over E experts at `points` training calls, one in `every`."""

    seen: Tensor
    gate_PGE: Tensor
    active_PG: Tensor
    binary_G: Tensor

    def __init__(self, tasks: int, experts: int, points: int, every: int = 1) -> None:
        super().__init__()
        for word, n in (("points", points), ("every", every)):
            if type(n) is not int or n < 1:
                raise ValueError(f"log: {word} must be a whole number, at least 1, got {n!r}")
        self.points, self.every = points, every
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("gate_PGE", torch.zeros(points, tasks, experts))
        self.register_buffer("active_PG", torch.zeros(points, tasks))
        self.register_buffer("binary_G", torch.full((tasks,), -1))

    @torch.no_grad()
    def forward(
        self,
        x_TD: Tensor,
        routers: Iterable[Any],
        weight_GTE: Tensor,
        choice_GTE: Tensor,
        joined: bool = False,
    ) -> None:
        """Note one training call; calls past the last point count, but leave no weights.

        joined: the routers are alike and may be asked together.
        """
        gate_GE = weight_GTE.detach().mean(1)
        active_G = choice_GTE.float().sum(2).mean(1)
        due_P = torch.arange(self.points, device=gate_GE.device) * self.every == self.seen
        self.gate_PGE.copy_(torch.where(due_P[:, None, None], gate_GE, self.gate_PGE))
        self.active_PG.copy_(torch.where(due_P[:, None], active_G, self.active_PG))
        tests = [_AllBinary(router, self.seen) for router in routers]
        binary_G = torch.stack(run_alike(tests, x_TD, joined))
        # A gate by example may leave its plateau again: the last time it became binary counts.
        first_G = torch.where(self.binary_G < 0, self.seen, self.binary_G)
        self.binary_G.copy_(torch.where(binary_G, first_G, -1))
        self.seen.add_(1)

    def steps(self) -> list[int]:
        """The training calls, from 0, that left a point."""
        return list(range(0, min(self.points * self.every, int(self.seen)), self.every))

    def weights(self) -> Tensor:
        """`[P, G, E]`: the gates at `steps()`."""
        return self.gate_PGE[: len(self.steps())]

    def active(self) -> Tensor:
        """`[P, G]`: the mean number of experts at work for an example at `steps()`."""
        return self.active_PG[: len(self.steps())]

    def binary_step(self) -> list[int | None]:
        """For each task the call since which all selectors were binary; None: they are not."""
        return [None if step < 0 else step for step in self.binary_G.tolist()]


def mean_gate(r: Routing) -> Tensor:
    """`[E]`: the weights of a static gate, or their mean over the examples."""
    return one_row(r).dense().detach().mean(0)


def mean_active(r: Routing) -> Tensor:
    """Scalar: how many experts work for an example, on average."""
    return one_row(r).choice().float().sum(1).mean()


def binary(router: Router, x_TD: Tensor, step: Tensor | int) -> Tensor | None:
    """`[T]` (`[1]` if static) bool: all selectors are binary; None for gates without selectors.

    `step`: the training calls before, on which an annealed width depends.
    """
    if not isinstance(router, DSelect):
        return None
    x_TD = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
    step = torch.as_tensor(step, device=x_TD.device)
    return is_plateau(router.logits(x_TD)[1], router.width_at(step, x_TD.dtype))


class _AllBinary(nn.Module):
    """A gate's binary test as a module, which `run_alike` can batch."""

    def __init__(self, router: Router, step: Tensor) -> None:
        super().__init__()
        self.router, self.step = router, step

    def forward(self, x_TD: Tensor) -> Tensor:
        found = binary(self.router, x_TD, self.step)
        return torch.zeros_like(self.step, dtype=torch.bool) if found is None else found.all()
