"""`Meter`: the FLOPs of a training step, counted once per model structure and batch size.

meter = Meter()
meter.step(model, x, y)                  # Step(forward=…, whole=…), of a batch like this

A copy of the model is counted: neither its weights, nor its statistics, nor the caller's random
numbers change. Where the cost depends on the data (a capacity that drops tokens), the first batch
of its size speaks for all, so what was counted is part of a learner's state.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import cost
from .data import Examples
from .fitting import loss_of


class Step(NamedTuple):
    """FLOPs of one step."""

    forward: float
    whole: float  # forward and backward


class Meter:
    """Counted costs by what was counted."""

    def __init__(self) -> None:
        self._steps: dict[str, Step] = {}
        self._forwards: dict[str, float] = {}

    def state(self) -> dict[str, Any]:
        """What was counted so far."""
        return {"steps": {k: [*v] for k, v in self._steps.items()}, "forwards": {**self._forwards}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what was counted."""
        self._steps.update({key: Step(*step) for key, step in state["steps"].items()})
        self._forwards.update(state["forwards"])

    def step(self, model: nn.Module, x: Tensor, y: Tensor) -> Step:
        """FLOPs of a training step on such a batch."""
        key = _key(model, x)
        if key not in self._steps:
            twin, held = copy.deepcopy(model).train(), []
            cuda = [x.device] if x.device.type == "cuda" else []
            with torch.random.fork_rng(devices=cuda):
                forward = cost.flops(lambda: held.append(loss_of(twin, x, y)))
            self._steps[key] = Step(forward, forward + cost.flops(held[0].backward))
        return self._steps[key]

    def forward(self, model: nn.Module, x: Tensor) -> float:
        """FLOPs of an answer to such a batch."""
        key = _key(model, x)
        if key not in self._forwards:
            self._forwards[key] = cost.forward_flops(lambda: model(x), model)
        return self._forwards[key]

    def training(self, model: nn.Module, train: Examples, batches: Mapping[int, int]) -> Step:
        """FLOPs of so many steps with batches of each size."""
        forward = whole = 0.0
        for rows, steps in batches.items():
            one = self.step(model, train.x[:rows], train.y[:rows])
            forward, whole = forward + steps * one.forward, whole + steps * one.whole
        return Step(forward, whole)

    def answers(self, model: nn.Module, x: Tensor, batch: int) -> float:
        """FLOPs of the answers to all rows, a batch at a time."""
        return sum(self.forward(model, part) for part in x.split(batch)) if len(x) else 0.0


def _key(model: nn.Module, x: Tensor) -> str:
    """Of what decides the cost: modules with their options, shapes, what is trained, the batch."""
    shapes = [(name, p.shape, p.requires_grad) for name, p in model.named_parameters()]
    return hashlib.sha256(repr((model, shapes, x.shape)).encode()).hexdigest()[:16]
