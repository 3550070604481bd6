"""A step of an attack as a CUDA graph: all its launches repeated by one.

Small models leave a GPU waiting for the host: a step of AutoPGD is a hundred launches of
microseconds each. On a CPU, and where a step waits for the host (some experts loop over the tokens
they were given), steps run as they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .state import State

Step = Callable[[Any], None]  # of the state that the attack uses


class Repeater:
    """Repeats the steps of one batch; a graph for each number of examples in play."""

    def __init__(self) -> None:
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, State]] = {}
        self.refused = False

    def __call__(self, step: Step, state: State, times: int) -> None:
        """Take `times` steps; one must have been taken before, as a capture cannot be the first."""
        if state.x.is_cuda and not self.refused and times > 1:
            times -= self._replay(step, state, times)
        for _ in range(times):
            step(state)

    def _replay(self, step: Step, state: State, times: int) -> int:
        """The steps that were taken: all of them, or none."""
        count = len(state.row)
        if count not in self.graphs:
            captured = capture(step, state)
            if captured is None:
                self.refused = True
                return 0
            self.graphs[count] = captured
        graph, held = self.graphs[count]
        now = state.tensors()
        for name, t in held.tensors().items():
            if now[name] is not t:
                t.copy_(now[name])
        for _ in range(times):
            graph.replay()
        for name, t in held.tensors().items():
            setattr(state, name, t.clone())  # the graph writes into its own again
        return times


def capture(step: Step, state: State) -> tuple[torch.cuda.CUDAGraph, State] | None:
    """The graph of a step and the state it reads and writes; None where it waits for the host."""
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
                new: Tensor = getattr(after, name)
                if new is not t:
                    t.copy_(new)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    finally:
        generator.graphsafe_set_state(usual)
    return graph, held
