"""Functions of tensors as torch's compiler makes them: a few kernels in the place of many.

    programs = Programs()
    step = programs.of(key, function, *args)        # traced and compiled once for a key
    found = step(*args)

`torch.compile` reads Python, which it cannot where weights are exchanged inside a vmapped call. So
a function is traced by what it runs, and all that is no tensor among its arguments is frozen: it
must follow from the key. Arguments and what is returned are lists and dicts of tensors; nothing is
differentiated from outside, but the function may take gradients itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

# Which tile is the fastest would be measured, and decides in which order numbers are added.
OPTIONS = {"deterministic": True}
Function = Callable[..., Any]
Compiler = Callable[[GraphModule, list[Tensor]], Callable[..., Any]]


def inductor(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """torch's own compiler; what one process made, others find in its cache on the disk."""
    import torch._inductor
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = FakeTensorMode(shape_env=ShapeEnv(assume_static_by_default=True))  # for the cache
    with deterministic(), tracing(TracingContext(shapes)):
        return torch._inductor.compile(graph, [*inputs], options=dict(OPTIONS))


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that add in fixed order, where there are such; afterwards as before."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


class Programs:
    """Compiled functions by key, for as long as this lives; one that cannot be stays as it is."""

    def __init__(self, compiler: Compiler = inductor) -> None:
        self.compiler = compiler
        self.known: dict[Hashable, Function | None] = {}

    def of(self, key: Hashable, function: Function, *args: Any) -> Function:
        """The function, compiled for arguments of these shapes."""
        leaves, spec = pytree.tree_flatten(args)
        whole = (key, str(spec), *((tuple(t.shape), t.dtype, t.device) for t in leaves))
        if whole not in self.known:
            try:
                self.known[whole] = traced(function, args, self.compiler)
            except Exception as error:
                self.known[whole] = None
                said = f"{type(error).__name__}: {error}".splitlines()[0]
                warnings.warn(f"a step is not compiled, and slower for it ({said})", stacklevel=2)
        return self.known[whole] or function


def traced(function: Function, args: tuple[Any, ...], compiler: Compiler = inductor) -> Function:
    """A function as the operations that it runs for these arguments, compiled."""
    from torch.fx.experimental.proxy_tensor import make_fx

    leaves, spec = pytree.tree_flatten(args)
    shapes: list[Any] = []  # of what it returns

    def flat(*leaves: Tensor) -> list[Tensor]:
        found, shape = pytree.tree_flatten(function(*pytree.tree_unflatten(list(leaves), spec)))
        shapes.append(shape)
        return found

    graph = make_fx(flat)(*leaves)
    settle_constants(graph, leaves[0].device)
    made = compiler(graph, leaves)

    def call(*args: Any) -> Any:
        with torch.no_grad():
            return pytree.tree_unflatten(list(made(*pytree.tree_leaves(args))), shapes[0])

    return call


def settle_constants(graph: GraphModule, device: torch.device) -> None:
    """Bring what was frozen into a graph to the device, so that no step waits for the host.

    Numbers that another call would have otherwise raise: weights that are no argument, and all that
    a kernel wrote which torch does not see.
    """
    names = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for name in names:
        held = getattr(graph, name)
        if isinstance(held, Tensor):
            if held.is_floating_point() and held.numel() > 1:
                raise ValueError(f"it reads {list(held.shape)} numbers that are no argument of it")
            setattr(graph, name, held.to(device))
