"""`Trajectory`: how the gates moved in training.

trajectory = Trajectory(["income", "age"], every=10)        # in a loop of one's own
for step in range(steps):
    trajectory.step(step, model)
    …
trajectory = Trajectory.of(model)                           # from its log, after fit_many
trajectory.jumps(); trajectory.binary_step; trajectory.values()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .diagnostics import describe_gates
from .model import MultiGate

JUMP = 0.1  # of a weight, between two points


class Trajectory:
    """The gates of every task at the steps 0, every, 2 · every, …"""

    def __init__(self, tasks: Sequence[str], *, every: int = 1) -> None:
        if type(every) is not int or every < 1:
            raise ValueError(f"every must be a whole number, at least 1, got {every!r}")
        self.tasks, self.every = list(tasks), every
        self.steps: list[int] = []
        self.gates: list[Tensor] = []  # [G, E] at each of the steps
        self.selected: list[list[float]] = []  # by task, experts at work for an example
        # Since when all selectors of a task's gate are binary, among the steps that were seen.
        self.binary_step: dict[str, int | None] = dict.fromkeys(self.tasks)

    @classmethod
    def of(cls, model: MultiGate) -> Trajectory:
        """The trajectory that a model's log holds; its steps count training calls, from 0."""
        if model.log is None:
            raise ValueError("the model kept no log: build it with log=(points, every)")
        log = model.log
        made = cls([task.name for task in model.tasks], every=log.every)
        made.steps = log.steps()
        made.gates, made.selected = list(log.weights().cpu()), log.active().tolist()
        made.binary_step = dict(zip(made.tasks, log.binary_step(), strict=True))
        return made

    def step(self, step: int, model: MultiGate, x: Any = None) -> None:
        """Look at the gates if it is time; `x`: examples for gates that decide by example."""
        if step % self.every:
            return
        found = describe_gates(model, x)
        self.steps.append(step)
        self.gates.append(torch.tensor([gate.weights for gate in found]))
        self.selected.append([gate.mean_selected for gate in found])
        for gate in found:
            since = self.binary_step[gate.task]
            first = step if since is None else since
            self.binary_step[gate.task] = first if gate.is_binary else None

    def weights(self) -> Tensor:
        """`[P, G, E]`: the gates at `steps`."""
        if not self.gates:
            raise ValueError("nothing was recorded yet: call step(n, model) in the training loop")
        return torch.stack(self.gates)

    def jumps(self, size: float = JUMP) -> dict[str, int]:
        """How often, by task, some weight moved by more than `size` from one point to the next."""
        moved_PG = self.weights().diff(dim=0).abs().amax(2) > size
        return dict(zip(self.tasks, moved_PG.sum(0).tolist(), strict=True))

    def values(self) -> dict[str, dict[str, list]]:
        """By task, for the `trajectories` of a result: steps, and the weights at each."""
        gates_GPE = self.weights().transpose(0, 1).tolist()
        return {
            task: {"step": list(self.steps), "values": gate}
            for task, gate in zip(self.tasks, gates_GPE, strict=True)
        }
