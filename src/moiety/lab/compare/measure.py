"""What an arm costs, measured: active FLOPs, parameters, memory; and where its tokens go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ... import cost
from ...modes import at_rest
from ...moe import MoE
from ...multitask import MultiGate
from ...watch import watch
from .task import Task

COUNTED = 64  # examples that FLOPs are counted on


def flops(model: nn.Module, task: Task) -> float:
    """Active forward FLOPs of an example of the validation data, hardly any padding counted."""
    rows = typical(task)
    with _plain_backend(model):
        total = cost.forward_flops(lambda: task.answer(model, "validation", rows), model)
    return total / len(rows)


def typical(task: Task) -> Tensor:
    """Some examples of the validation data; of texts, those nearest to the mean length.

    A dense model works for padding and experts do not: texts of one length keep that out.
    """
    split = task.splits["validation"]
    mask = split.inputs.get("attention_mask")
    if mask is None:
        return torch.arange(min(COUNTED, len(split)))
    lengths = mask.sum(1)
    distance = (lengths - lengths.double().mean()).abs()
    return distance.argsort(stable=True)[:COUNTED]


@contextlib.contextmanager
def _plain_backend(model: nn.Module) -> Iterator[None]:
    """Run experts one by one, so that torch counts all products and no others."""
    layers: list[Any] = [part for part in model.modules() if isinstance(part, MoE | MultiGate)]
    usual = [layer.backend for layer in layers]
    for layer in layers:
        layer.backend = "loop"
    try:
        yield
    finally:
        for layer, backend in zip(layers, usual):
            layer.backend = backend


def memory(model: nn.Module, task: Task, batch: int) -> int:
    """Bytes of a training step: weights, gradients, AdamW's two states, and what a batch saves.

    An estimate, for a CPU, which keeps no account; on a GPU `torch.cuda` is asked instead.
    """
    saved: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return t

    rows = slice(0, min(batch, len(task.splits["train"])))
    # At rest: the same sizes, and nothing is drawn or counted.
    with at_rest(model), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        task.batch_loss(model, "train", rows)
    copies = ((p, 4 if p.requires_grad else 1) for p in model.parameters())
    weights = sum(p.numel() * p.element_size() * number for p, number in copies)
    return weights + sum(storage.nbytes() for storage in saved.values())


def loads(model: nn.Module, task: Task) -> tuple[Tensor, dict[str, list[float]]]:
    """The answers to the validation data, and the share of every expert in each block's work."""
    if not any(isinstance(part, MoE) for part in model.modules()):
        return task.answers(model, "validation"), {}
    with watch(model) as routes:
        answers = task.answers(model, "validation")
    found = {}
    for number, load in enumerate(routes.load().values(), start=1):
        share = load.double() / load.sum().clamp(min=1)
        found[f"block {number}"] = [round(float(value), 6) for value in share]
    return answers, found


def costs(model: nn.Module, task: Task, batch: int) -> dict[str, Any]:
    """FLOPs, parameters and memory, by the names that the page knows."""
    return {
        "flops": flops(model, task),
        "parameters": cost.parameters(model),
        "memory": memory(model, task, batch),
    }
