"""Upcycled models add their balance losses to `outputs.loss`, in training only."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..moe import MoE
from ..routing import Routing


class Losses:
    """Takes the weighted losses of a model's layers while its forward runs."""

    collects = True

    def __init__(self) -> None:
        self.open = False
        self.terms: list[Tensor] = []

    def add(self, name: str, routing: Routing, terms: dict[str, Tensor]) -> None:
        if self.open:
            self.terms.extend(terms.values())


def join_losses(model: nn.Module, layers: dict[str, MoE]) -> None:
    """From now on the model's `outputs.loss` holds the balance losses of these layers."""
    losses: Any = getattr(model, "_moiety_losses", None)
    if losses is None:
        losses = Losses()
        model._moiety_losses = losses
        model.register_forward_pre_hook(_open)
        model.register_forward_hook(_close, with_kwargs=True, always_call=True)
    for name, layer in layers.items():
        if not any(recorder is losses for _, recorder in layer._watchers):
            layer._watchers = (*layer._watchers, (name, losses))


def _open(model: nn.Module, args: tuple) -> None:
    losses: Any = model._moiety_losses
    losses.open = model.training
    losses.terms = []


def _close(model: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
    losses: Any = model._moiety_losses
    terms, losses.terms, losses.open = losses.terms, [], False
    loss = _loss_of(output, kwargs)
    if not terms or loss is None:
        return output
    if torch.is_grad_enabled() and not any(t.requires_grad for t in terms):
        warnings.warn(
            "the balance losses carry no gradient: the layers ran under no_grad (reentrant "
            "gradient checkpointing does that; use_reentrant=False keeps it), or the router is frozen",
            stacklevel=2,
        )
    total = loss + share(model, kwargs) * sum(t.to(loss.device) for t in terms)
    _tell_watchers(model, losses)
    if isinstance(output, tuple):
        return (total, *output[1:])
    output.loss = total
    return output


def _loss_of(output: Any, kwargs: dict) -> Tensor | None:
    if isinstance(output, tuple):  # return_dict=False: the loss comes first, where there is one
        first = output[0] if output else None
        scalar = isinstance(first, Tensor) and first.numel() == 1 and first.is_floating_point()
        return first if scalar and kwargs.get("labels") is not None else None
    loss = getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def share(model: Any, kwargs: dict) -> Tensor | float:
    """This call's part of an optimizer step.

    With gradient accumulation the Trainer hands over `num_items_in_batch`, the labels of the whole
    step, and the task loss is this call's sum over that number. Weighing the balance losses by the
    same share keeps their part of the step at their mean, whatever the number of calls.
    """
    items, labels = kwargs.get("num_items_in_batch"), kwargs.get("labels")
    if items is None or not isinstance(labels, Tensor):
        return 1.0
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    shifts = LOSS_MAPPING.get(getattr(model, "loss_type", "")) is ForCausalLMLoss
    if shifts and not getattr(model.config, "is_encoder_decoder", False):
        labels = labels[..., 1:]
    return labels.ne(-100).sum() / items


def _tell_watchers(model: nn.Module, losses: Losses) -> None:
    watching = {
        id(recorder): recorder
        for layer in model.modules()
        if isinstance(layer, MoE)
        for _, recorder in layer._watchers
        if recorder is not losses
    }
    for recorder in watching.values():
        recorder.taken()  # type: ignore[attr-defined]
