"""A training step captured as a CUDA graph: all its launches repeated by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Graph:
    """A step that was captured for batches of one size."""

    graph: torch.cuda.CUDAGraph
    rows: Tensor  # where it reads which examples to take

    def replay(self, rows: Tensor) -> None:
        self.rows.copy_(rows)
        self.graph.replay()


def capture(step: Callable[[Tensor], None], rows: Tensor, name: str) -> Graph | None:
    """Capture a step that was run before; none, and a warning, where it waits for the host."""
    graph, rows = torch.cuda.CUDAGraph(), rows.clone()
    generator = torch.cuda.default_generators[rows.device.index]
    usual = generator.graphsafe_get_state()
    # A capture that fails leaves the generator's state unusable: let it be another one.
    generator.graphsafe_set_state(generator.clone_state())
    try:
        with torch.cuda.graph(graph):
            step(rows)
    except RuntimeError as error:
        torch.cuda.synchronize()
        warnings.warn(
            f"fit_many runs {name} without a CUDA graph, a few times slower, since its step waits "
            f"for the host ({str(error).splitlines()[0]})",
            stacklevel=2,
        )
        return None
    finally:
        generator.graphsafe_set_state(usual)
    return Graph(graph, rows)
