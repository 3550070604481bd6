"""A training step captured as a CUDA graph: all its launches repeated by one."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Held by a capture, which breaks where another thread asks CUDA for memory, and by such threads.
ALONE = threading.Lock()


@dataclass
class Graph:
    """A step that was captured for batches of one size."""

    graph: torch.cuda.CUDAGraph
    rows: Tensor  # where it reads which examples to take
    generator: torch.Generator  # where its random numbers come from
    result: Tensor | None  # what the step returns

    def replay(self, rows: Tensor) -> Tensor | None:
        """Do the step; random numbers go on from those of the device, which it takes along."""
        live = torch.cuda.default_generators[rows.device.index]
        self.generator.set_state(live.get_state())
        self.rows.copy_(rows)
        self.graph.replay()
        live.set_state(self.generator.get_state())
        return None if self.result is None else self.result.clone()


def capture(
    step: Callable[[Tensor], Tensor | None], rows: Tensor, name: str, pool: Any = None
) -> Graph | None:
    """Capture a step that was run before; none, and a warning, where it waits for the host.

    pool   memory that graphs share which run one after the other; what a step returns keeps its
           place in it
    """
    graph, rows = torch.cuda.CUDAGraph(), rows.clone()
    live = torch.cuda.default_generators[rows.device.index]
    # A capture that fails leaves the generator's state unusable: let it be another one.
    usual, own = live.graphsafe_get_state(), live.clone_state()
    live.graphsafe_set_state(own)
    try:
        with ALONE, torch.cuda.graph(graph, pool=pool):
            result = step(rows)
    except RuntimeError as error:
        torch.cuda.synchronize()
        warnings.warn(
            f"{name} trains without a CUDA graph, a few times slower, since its step waits for the "
            f"host ({str(error).splitlines()[0]})",
            stacklevel=2,
        )
        return None
    finally:
        live.graphsafe_set_state(usual)
    return Graph(graph, rows, own, result)


def repeatable(lr: float, trained: Sequence[Tensor], captured: bool) -> dict[str, Any]:
    """Words for AdamW; captured, it reads its rate anew from the device, and is few kernels.

    On a CPU it is one pass over the weights, too, five to eight times as fast as by default; but
    that goes through memory as it lies, whatever the order of the dimensions.
    """
    if not captured:
        plain = all(
            p.device.type == "cpu" and p.is_contiguous() and p.is_floating_point() for p in trained
        )
        return {"lr": lr, "fused": True} if plain else {"lr": lr}
    rate = torch.tensor(lr, dtype=torch.float32, device=trained[0].device)
    return {"lr": rate, "capturable": True, "fused": True}
