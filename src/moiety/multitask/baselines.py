"""What mixtures are compared with: a shared bottom, a model for each task, and PLE.

The softmax mixture (MMoE, Ma et al. 2018) is `MultiGate(…, router="softmax")`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..experts import FeedForward
from .base import MultiTask, Outputs, Tower, run_trunk
from .task import Task, check_tasks


class SharedBottom(MultiTask):
    """One network for all tasks, and a tower for each; `width` is that of the bottom's answer."""

    def __init__(self, tasks: Sequence[Task], bottom: nn.Module, *, width: int, **words: Any):
        super().__init__(tasks, width=width, **words)
        self.bottom = bottom

    def features(self, x: Tensor, outputs: Outputs) -> Sequence[Tensor]:
        return [self.bottom(x).flatten(1)] * len(self.tasks)


class SingleTask(MultiTask):
    """A network of its own for every task: `make(task)` builds one; nothing is shared."""

    def __init__(
        self,
        tasks: Sequence[Task],
        make: Callable[[Task], nn.Module],
        *,
        width: int,
        tower: Tower = None,
        **words: Any,
    ) -> None:
        super().__init__(tasks, width=width, tower=tower, **words)
        if self.trunk is not None:
            raise ValueError("single tasks share no trunk: build it in `make`")
        self.bottoms = nn.ModuleList(make(task) for task in self.tasks)

    def features(self, x: Tensor, outputs: Outputs) -> Sequence[Tensor]:
        return [run_trunk(bottom, x).flatten(1) for bottom in self.bottoms]


class PLE(MultiTask):
    """Progressive layered extraction (Tang et al. 2020): shared experts and experts of each task.

    In every level a task mixes its own experts with the shared ones by a softmax gate on its own
    input; below the last level a shared gate mixes all experts for the shared path.

    shared, own   experts of the shared path and of each task, in every level
    hidden        width inside an expert; `out_dim` that of its answer (None: dim)
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        dim: int,
        hidden: int,
        shared: int = 2,
        own: int = 2,
        levels: int = 2,
        out_dim: int | None = None,
        dropout: float = 0.0,
        **words: Any,
    ) -> None:
        tasks, width = check_tasks(tasks), dim if out_dim is None else out_dim
        super().__init__(tasks, width=width, **words)
        for word, n in (("shared", shared), ("own", own), ("levels", levels)):
            if type(n) is not int or n < 1:
                raise ValueError(f"PLE: {word} must be a whole number, at least 1, got {n!r}")
        self.levels = nn.ModuleList(
            _Level(
                len(tasks),
                dim if i == 0 else width,
                hidden,
                width,
                shared,
                own,
                dropout,
                last=i == levels - 1,
            )
            for i in range(levels)
        )

    def features(self, x: Tensor, outputs: Outputs) -> Sequence[Tensor]:
        paths = [x.flatten(1)] * (len(self.tasks) + 1)  # one for each task, and the shared one
        for level in self.levels:
            paths = level(paths)
        return paths[: len(self.tasks)]


class _Level(nn.Module):
    """Paths of the tasks and the shared one in; the same out, but the last level has no shared."""

    def __init__(
        self,
        tasks: int,
        dim: int,
        hidden: int,
        width: int,
        shared: int,
        own: int,
        dropout: float,
        *,
        last: bool,
    ) -> None:
        super().__init__()
        sizes = [own] * tasks + [shared]
        self.experts = nn.ModuleList(
            FeedForward(n, dim, hidden, out_dim=width, activation=torch.relu, dropout=dropout)
            for n in sizes
        )
        self.gates = nn.ModuleList(nn.Linear(dim, own + shared) for _ in range(tasks))
        if not last:
            self.gates.append(nn.Linear(dim, sum(sizes)))

    def forward(self, paths: Sequence[Tensor]) -> list[Tensor]:
        groups: list[Any] = list(self.experts)
        *own, shared = (
            group.answers(x, None, "dense") for group, x in zip(groups, paths, strict=True)
        )
        seen = [torch.cat([y, shared]) for y in own] + [torch.cat([*own, shared])]
        return [
            torch.einsum("te,etd->td", gate(x).softmax(-1), y)
            for gate, x, y in zip(self.gates, paths, seen)
        ]
