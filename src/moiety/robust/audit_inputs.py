"""The inputs of an audit: tensors, a TensorDataset, a `Problem`, or token ids of a text model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ..data import Problem
from .target import Bounds, Normalize

Auto = Literal["auto"]
WORDS = ("pixel_values", "inputs_embeds", "input_ids")  # of what models of transformers take


@dataclass(frozen=True)
class Inputs:
    """Inputs `[N, ...]`, labels, and how the attacked model reads them."""

    x: Tensor
    y: Tensor
    name: str
    bounds: Bounds
    normalize: Normalize


def read_inputs(
    data: Any, model: nn.Module, bounds: Bounds | Auto, normalize: Normalize, name: str | None
) -> Inputs:
    """Bring data into the form that attacks take; what is not said follows from it.

    Images of a `Problem` are its test images in 0…1. Token ids `[N, L]` become the embeddings that
    the model gives them, without bounds: eps is then in units of the embeddings.
    """
    if isinstance(data, Problem):
        x, y, own, usual = _of_problem(data, model)
        normalize = usual if normalize is None else normalize
        limits: Bounds = (0.0, 1.0) if data.kind == "image" else None
    else:
        x, y = _pair(data)
        own, limits = "data", (0.0, 1.0)
        if x.dim() == 2 and not x.is_floating_point():
            x, limits = _embed(model, x), None
    return Inputs(x, y, name or own, limits if bounds == "auto" else bounds, normalize)


def _pair(data: Any) -> tuple[Tensor, Tensor]:
    if isinstance(data, DataLoader):
        x, y = zip(*map(_pair, data))
        return torch.cat(x), torch.cat(y)
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, Mapping):
        word = next((w for w in WORDS if w in data), None)
        data = data.get(word), data.get("labels")
    pair = isinstance(data, (tuple, list)) and len(data) == 2
    if not pair or not all(isinstance(t, Tensor) for t in data):
        found = [type(t).__name__ for t in data] if pair else type(data).__name__
        raise ValueError(
            "data must be two tensors (x, y), a TensorDataset or a DataLoader of them, a dict with "
            f"labels and one of {', '.join(WORDS)}, or a moiety Problem, got {found}"
        )
    return data[0], data[1]


def _of_problem(problem: Problem, model: nn.Module) -> tuple[Tensor, Tensor, str, Normalize]:
    target = problem.targets[0]
    if problem.kind == "text" or target.kind != "classes":
        raise ValueError(
            f"{problem.name} is a {problem.kind} with target {target.name!r}: an audit needs "
            "images or numbers with classes; give (x, y) tensors"
        )
    inputs, y = problem.test.inputs, problem.test.targets[target.name]
    if problem.kind == "image":
        # Our own models read bytes, those of transformers normalised values.
        ours = "pixel_values" not in inspect.signature(model.forward).parameters
        usual: Normalize = (0.0, 1 / 255) if ours else (problem.mean, problem.std)
        return inputs["images"].float() / 255, y, problem.name, usual
    if problem.categories:
        raise ValueError(f"{problem.name} has categories, which no gradient can move: give (x, y)")
    return inputs["numbers"], y, problem.name, None


@torch.no_grad()
def _embed(model: Any, ids: Tensor) -> Tensor:
    """The embeddings of token ids, as the model itself looks them up."""
    words = inspect.signature(model.forward).parameters
    if "inputs_embeds" not in words or not hasattr(model, "get_input_embeddings"):
        raise ValueError(
            f"x holds whole numbers ({ids.dtype}): give floats, or token ids of a model that takes "
            "inputs_embeds"
        )
    table = model.get_input_embeddings()
    return table(ids.to(table.weight.device)).float().to(ids.device)
