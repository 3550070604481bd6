"""Steps of an attack as CUDA graphs: all launches of a step repeated by one.

Small models leave a GPU waiting for the host: a step of AutoPGD is a hundred launches of
microseconds each. A step that itself waits for the host cannot be captured. A layer does that asks
how many rows each expert has, as ours do in fp64; computing all experts
for all rows needs no such answer, and where a step is faster so, it is captured so. Everything else
runs as it is written, as all does on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .state import State

Step = Callable[[Any], None]  # of the state that the attack uses
# Lets layers compute all their experts for a while; whether there are any that can.
Dense = Callable[[], contextlib.AbstractContextManager[bool]]
HELD = 8  # graphs at once: each holds the memory of a forward and a backward pass


@dataclass(frozen=True, eq=False)
class Graph:
    """A captured step, and the state that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    held: State
    generator: torch.Generator  # the one that its random numbers come from
    step: Step  # alive as long as what it captured

    def replay(self, state: State, times: int) -> None:
        """Take the state `times` steps on, and the random numbers of the device with it."""
        live = _generator(state.x.device)
        self.generator.set_state(live.get_state())
        for name, t in state.tensors().items():
            getattr(self.held, name).copy_(t)
        for _ in range(times):
            self.graph.replay()
        for name, t in self.held.tensors().items():
            setattr(state, name, t.clone())
        live.set_state(self.generator.get_state())


class Repeater:
    """Repeats the steps of attacks on one target; the same step of the same shape is captured once.

    A captured step reads the model's tensors where they were, so their places are part of the key.
    """

    def __init__(self, tensors: Callable[[], Hashable], dense: Dense) -> None:
        self.tensors, self.dense = tensors, dense
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
            captured = self._capture(step, state)
            if captured is None:
                self.refused = True
                return None
            if len(self.graphs) == HELD:
                self.graphs.pop(next(iter(self.graphs)))  # the oldest
            self.graphs[whole] = captured
        return self.graphs[whole]

    def _capture(self, step: Step, state: State) -> Graph | None:
        if not waits(step, state):
            return capture(step, state)
        with self.dense() as changed:
            captured = capture(step, state) if changed and not waits(step, state) else None
        return captured if captured is not None and quicker(captured, step, state) else None


def quicker(graph: Graph, step: Step, state: State) -> bool:
    """Whether a captured step takes less time than the one that is written."""

    def seconds(run: Callable[[State], None]) -> float:
        copy = type(state)(**state.tensors())
        torch.cuda.synchronize(state.x.device)
        start = time.perf_counter()
        run(copy)
        torch.cuda.synchronize(state.x.device)
        return time.perf_counter() - start

    with torch.random.fork_rng(devices=[state.x.device]):
        return seconds(lambda s: graph.replay(s, 1)) < seconds(step)


def waits(step: Step, state: State) -> bool:
    """Whether a step waits for the host: one is taken, on a state that is thrown away.

    A capture would find out as well, but one that breaks off leaves torch with marks of it.
    """
    before = torch.cuda.get_sync_debug_mode()
    with torch.random.fork_rng(devices=[state.x.device]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a prototype that may overlook some waits
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(type(state)(**state.tensors()))
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return False


def capture(step: Step, state: State) -> Graph | None:
    """The graph of a step that was taken before; None where it cannot be captured."""
    device = state.x.device
    held = type(state)(**{name: t.clone() for name, t in state.tensors().items()})
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    live = _generator(device)
    # A capture that fails leaves the generator's state unusable: let it be another one.
    usual, own = live.graphsafe_get_state(), live.clone_state()
    live.graphsafe_set_state(own)
    try:
        # The outer context is for a capture that fails: it leaves its own stream the current one.
        with (
            torch.cuda.stream(torch.cuda.current_stream(device)),
            torch.cuda.graph(graph, pool=pool, stream=_side_stream(device)),
            _no_collection(),
        ):
            after = type(state)(**held.tensors())
            step(after)
            write(held, after)
    except RuntimeError:
        torch.cuda.synchronize(device)
        with contextlib.suppress(RuntimeError):  # torch before 2.12 goes on believing in a capture
            torch._C._cuda_endAllocateToPool(device.index, pool)
        return None
    finally:
        live.graphsafe_set_state(usual)
    return Graph(graph, held, own, step)


def write(held: State, after: State) -> None:
    """Put what a step left in the places it was read from.

    What it only moved (the last point is the one before, now) is still in a place that is about to
    be written, and is copied first.
    """
    places = held.tensors()
    old = {t.untyped_storage().data_ptr() for t in places.values()}
    new: dict[str, Tensor] = {}
    for name, place in places.items():
        t = getattr(after, name)
        if t is not place:
            new[name] = t.clone() if t.untyped_storage().data_ptr() in old else t
    for name, t in new.items():
        places[name].copy_(t)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without the garbage collector: an old graph that it finds cannot be freed in a capture."""
    usual = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if usual:
            gc.enable()


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index]


@functools.cache  # one for all: cuBLAS keeps a workspace for each stream that it has seen
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
