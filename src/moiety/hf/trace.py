"""Record one forward pass, call by call: who read what, who answered what, and which dropouts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import native
from ..moe import MoE
from .linear import is_linear
from .probe import Probe, evaluating


@dataclass
class Call:
    """One call of one module; `start` and `end` order the events of a trace."""

    name: str
    module: nn.Module
    x: Tensor
    y: Tensor
    start: int
    end: int
    plain: bool  # one tensor in, by place or as hidden_states, and one tensor out


@dataclass
class Trace:
    calls: list[Call]
    dropouts: list[tuple[int, float]]  # when, and with which p

    def between(self, start: int, end: int) -> float:
        """The largest p of the dropouts in a stretch of time."""
        return max((p for when, p in self.dropouts if start < when < end), default=0.0)


@torch.no_grad()
def record(model: nn.Module, probe: Probe) -> Trace:
    """Run the probe and note every call that reads a tensor and answers one.

    What is inside a mixture, ours or the model's own, is passed over. Tensors are copied, since
    layers may add to them in place, where anybody will look at them.
    """
    trace = Trace([], [])
    clock = iter(range(10**9))
    open_calls: dict[nn.Module, list[tuple[int, Tensor | None, bool]]] = {}

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
        x = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        alone = len(args) + len(kwargs) == 1 and (len(args) == 1 or "hidden_states" in kwargs)
        x = None if x is None else _kept(x, module, alone)
        open_calls.setdefault(module, []).append((next(clock), x, alone))

    def leave(module: nn.Module, args: tuple, output: Any) -> None:
        start, x, alone = open_calls[module].pop()
        y = output[0] if isinstance(output, tuple) and output else output
        if x is not None and isinstance(y, Tensor):
            plain = alone and y is output
            y = _kept(y, module, plain)
            call = Call(names[module], module, x, y, start, next(clock), plain)
            trace.calls.append(call)

    mixed: list[nn.Module] = [m for m in model.modules() if isinstance(m, MoE)]
    mixed += [block.experts for block in native.blocks(model).values()]
    inside = {part for m in mixed for part in m.modules()}
    names = {module: name for name, module in model.named_modules() if module not in inside}
    with contextlib.ExitStack() as stack:
        for module in names:
            hooks = (
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave),
            )
            for handle in hooks:
                stack.callback(handle.remove)
        stack.enter_context(evaluating(model))
        stack.enter_context(_Dropouts(lambda p: trace.dropouts.append((next(clock), p))))
        probe.run(model)
    return trace


def _kept(t: Tensor, module: nn.Module, plain: bool) -> Tensor:
    """A copy where blocks are sought: linear maps, and modules that may be a whole block."""
    holds = plain and next(module.children(), None) is not None
    return t.clone() if holds or is_linear(module) else t.new_empty(0)


class _Dropouts(TorchFunctionMode):
    """Tell about every dropout with p > 0, a module's or a plain call, though eval skips it."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        super().__init__()
        self.tell = tell

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            if p > 0:
                self.tell(float(p))
        return func(*args, **kwargs)
