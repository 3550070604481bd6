"""Steps of an attack as CUDA graphs: all launches of a step repeated by one.

Small models leave a GPU waiting for the host: a step of AutoPGD is a hundred launches of
microseconds each. On a CPU, and where a step waits for the host (some experts loop over the tokens
they were given), steps run as they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from .state import State

Step = Callable[[Any], None]  # of the state that the attack uses
HELD = 8  # graphs at once: each holds the memory of a forward and a backward pass


@dataclass(frozen=True, eq=False)
class Graph:
    """A captured step, and the state that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    held: State
    step: Step  # alive as long as what it captured

    def replay(self, state: State, times: int) -> None:
        """Take the state `times` steps on."""
        for name, t in state.tensors().items():
            getattr(self.held, name).copy_(t)
        for _ in range(times):
            self.graph.replay()
        for name, t in self.held.tensors().items():
            setattr(state, name, t.clone())


class Repeater:
    """Repeats the steps of attacks on one target; the same step of the same shape is captured once.

    A captured step reads the model's tensors where they were, so their places are part of the key.
    """

    def __init__(self, tensors: Callable[[], Hashable]) -> None:
        self.tensors = tensors
        self.graphs: dict[Hashable, Graph] = {}
        self.refused = False

    def __call__(self, key: Hashable, step: Step, state: State, times: int) -> None:
        """Take `times` steps; one must have been taken before, as a capture cannot be the first."""
        graph = self._graph(key, step, state) if state.x.is_cuda and times > 1 else None
        if graph is not None:
            graph.replay(state, times)
            return
        for _ in range(times):
            step(state)

    def _graph(self, key: Hashable, step: Step, state: State) -> Graph | None:
        if self.refused:
            return None
        shapes = tuple((n, t.shape, t.dtype, t.device) for n, t in state.tensors().items())
        whole = (key, self.tensors(), shapes)
        if whole not in self.graphs:
            captured = capture(step, state)
            if captured is None:
                self.refused = True
                return None
            if len(self.graphs) == HELD:
                self.graphs.pop(next(iter(self.graphs)))  # the oldest
            self.graphs[whole] = captured
        return self.graphs[whole]


def capture(step: Step, state: State) -> Graph | None:
    """The graph of a step that was taken before; None where it waits for the host."""
    held = type(state)(**{name: t.clone() for name, t in state.tensors().items()})
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[state.x.device.index]
    usual = generator.graphsafe_get_state()
    # A capture that fails leaves the generator's state unusable: let it be another one.
    generator.graphsafe_set_state(generator.clone_state())
    try:
        with torch.cuda.graph(graph):
            after = type(state)(**held.tensors())
            step(after)
            for name, t in held.tensors().items():
                if getattr(after, name) is not t:
                    t.copy_(getattr(after, name))
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    finally:
        generator.graphsafe_set_state(usual)
    return Graph(graph, held, step)
