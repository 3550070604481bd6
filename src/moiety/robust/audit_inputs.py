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
# Of what else they take: the value that says nothing, so that leaving it out changes nothing.
USUAL = {"attention_mask": 1, "pixel_mask": 1, "token_type_ids": 0}
ONE_LENGTH = (
    "an audit takes texts without padding; cut them to one length, or audit those of each length "
    "by themselves"
)


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
        x, y = _pair(data, model)
        own, limits = "data", (0.0, 1.0)
        if x.dim() == 2 and not x.is_floating_point():
            x, limits = _embed(model, x), None
    return Inputs(x, y, name or own, limits if bounds == "auto" else bounds, normalize)


def _pair(data: Any, model: nn.Module) -> tuple[Tensor, Tensor]:
    if isinstance(data, DataLoader):
        x, y = zip(*(_pair(batch, model) for batch in data))
        return torch.cat(x), torch.cat(y)
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, Mapping):
        word = next((w for w in WORDS if w in data), None)
        rest = {w: t for w, t in data.items() if w not in (word, "labels") and t is not None}
        _check_rest(rest, model)
        data = data.get(word), data.get("labels")
    pair = isinstance(data, (tuple, list)) and len(data) == 2
    if not pair or not all(isinstance(t, Tensor) for t in data):
        found = [type(t).__name__ for t in data] if pair else type(data).__name__
        raise ValueError(
            "data must be two tensors (x, y), a TensorDataset or a DataLoader of them, a dict with "
            f"labels and one of {', '.join(WORDS)}, or a moiety Problem, got {found}"
        )
    return data[0], data[1]


def _check_rest(rest: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse what the model would read beside x: an attack calls it with x alone."""
    read = inspect.signature(model.forward).parameters
    for word, t in rest.items():
        usual = word in USUAL and bool((torch.as_tensor(t) == USUAL[word]).all())
        if usual or word not in read:
            continue
        if word == "attention_mask":
            raise ValueError(f"attention_mask hides some tokens: {ONE_LENGTH}")
        raise ValueError(
            f"data hold {word}, which the attacked model would not get: leave it out, or give a "
            "module that has it built in"
        )


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
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    if padding is not None and bool((ids[:, [0, -1]] == padding).any()):
        raise ValueError(f"ids begin or end with pad_token_id {padding}: {ONE_LENGTH}")
    table = model.get_input_embeddings()
    return table(ids.to(table.weight.device)).float().to(ids.device)
