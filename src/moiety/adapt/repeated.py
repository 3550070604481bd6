"""A training step that a GPU repeats as one CUDA graph, for every shape of its input.

    step = Repeated("further", update)              # update: tensors -> values, waits for no host
    told = step(tensors)                            # captured from its fourth call of a shape on

Launching hundreds of small kernels one by one takes longer than they do. What changes from step to
step must be in `tensors`, in the weights, or in tensors that `update` reads, such as a learning
rate. Where a step cannot be captured it runs as it is, with a warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..train.graph import Graph, capture

Tensors = Mapping[str, Tensor]
WARM = 3  # calls of a shape before it is captured, for what libraries set up once
MOST = 8  # shapes that are captured; graphs keep their memory


@dataclass
class Captured:
    """A graph, where it reads its input, and the names of what it tells."""

    graph: Graph
    inputs: dict[str, Tensor]
    names: list[str]

    def __call__(self, tensors: Tensors) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            self.inputs[name].copy_(tensor)
        told = self.graph.replay(self.graph.rows)
        assert told is not None
        return dict(zip(self.names, told.unbind(), strict=True))


class Repeated:
    """A step, captured where that can be."""

    def __init__(self, name: str, update: Callable[[Tensors], dict[str, Tensor]]) -> None:
        self.name, self.update = name, update
        self.seen: Counter[Hashable] = Counter()
        self.captured: dict[Hashable, Captured] = {}
        self.able = True
        self.pool: Any = None  # memory of all graphs

    def __call__(self, tensors: Tensors) -> dict[str, Tensor]:
        """Do the step; what it tells are numbers, not yet read."""
        shape = tuple((name, tuple(tensor.shape)) for name, tensor in sorted(tensors.items()))
        if shape not in self.captured and self.able and len(self.captured) < MOST:
            self.seen[shape] += 1
            if self.seen[shape] > WARM:
                self._capture(shape, tensors)
        if shape in self.captured:
            return self.captured[shape](tensors)
        return self.update(tensors)

    def _capture(self, shape: Hashable, tensors: Tensors) -> None:
        inputs = {name: tensor.clone() for name, tensor in tensors.items()}
        names: list[str] = []

        def step(_: Tensor) -> Tensor:
            told = self.update(inputs)
            names[:] = told
            return torch.stack([value.double() for value in told.values()])

        device = next(iter(inputs.values())).device
        if self.pool is None and device.type == "cuda":  # graphs run one after the other
            self.pool = torch.cuda.graph_pool_handle()
        graph = capture(step, torch.zeros(1, device=device), self.name, self.pool)
        self.able = graph is not None
        if graph is not None:
            self.captured[shape] = Captured(graph, inputs, names)
