"""Upcycled models add their balance losses to `outputs.loss`, in training only."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..moe import MoE
from ..routing import Routing


class Losses:
    """Takes the weighted losses of a model's layers while its forward runs."""

    def __init__(self, model: nn.Module | None = None) -> None:
        # Weak, so that a model that is no longer used frees its memory at once.
        self._model = None if model is None else weakref.ref(model)
        self.collects = False  # a layer that is called past its model finds that nobody does
        self.terms: list[Tensor] = []
        self.told: Told | None = None
        self.warned: set[str] = set()

    def __deepcopy__(self, memo: dict) -> Losses:
        """A copy of the model has its own; a copied layer still tells those of its model (peft
        puts such copies into the model).
        """
        model = None if self._model is None else self._model()
        if model is not None and id(model) not in memo:
            return self
        copied = memo[id(self)] = Losses(None if model is None else memo[id(model)])
        return copied

    def __reduce__(self) -> tuple:
        return Losses, ()  # what is collected belongs to one call

    def add(self, name: str, routing: Routing, terms: dict[str, Tensor]) -> None:
        if self.collects:
            self.terms.extend(terms.values())

    def warn(self, problem: str) -> None:
        if problem not in self.warned and not torch.compiler.is_compiling():
            self.warned.add(problem)
            warnings.warn(problem, stacklevel=4)


class Told:
    """Stands for a model's `loss_function` during one call: does it use `num_items_in_batch`?

    The Trainer hands that number to every model whose forward takes any keywords, but only some
    hand it on to their loss; the others return the mean over this call, as without it.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.own, self.items = model, vars(model).get("_loss_function"), False
        model._loss_function = self

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.restore()
        loss = self.model.loss_function(*args, **kwargs)
        # transformers' losses of regression and of many labels take the number and ignore it.
        kind = getattr(self.model.config, "problem_type", None)
        given = kwargs.get("num_items_in_batch") is not None
        self.items = given and kind in (None, "single_label_classification")
        return loss

    def restore(self) -> None:
        if vars(self.model).get("_loss_function") is self:
            del self.model._loss_function
            if self.own is not None:
                self.model._loss_function = self.own


def join_losses(model: Any, layers: dict[str, MoE]) -> None:
    """From now on the model's `outputs.loss` holds the balance losses of these layers."""
    losses = getattr(model, "_moiety_losses", None)
    if losses is None:
        losses = model._moiety_losses = Losses(model)
        model.register_forward_pre_hook(_open, with_kwargs=True)
        model.register_forward_hook(_close, with_kwargs=True, always_call=True)
    for name, layer in layers.items():
        if not any(recorder is losses for _, recorder in layer._watchers):
            layer._watchers = (*layer._watchers, (name, losses))


def _open(model: nn.Module, args: tuple, kwargs: dict) -> None:
    losses: Any = model._moiety_losses
    losses.collects, losses.terms, losses.told = model.training, [], None
    if model.training and kwargs.get("num_items_in_batch") is not None:
        losses.told = Told(model)


def _close(model: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
    losses: Any = model._moiety_losses
    terms, losses.terms, losses.collects = losses.terms, [], False
    told, losses.told = losses.told, None
    if told is not None:
        told.restore()
    loss = _loss_of(output)
    if not terms or output is None:  # None: the forward failed
        return output
    if loss is None:
        _miss_a_loss(model, losses, terms)
        return output
    if torch.is_grad_enabled() and not any(t.requires_grad for t in terms):
        losses.warn(
            "the balance losses carry no gradient: the layers ran under no_grad (reentrant "
            "gradient checkpointing does that; use_reentrant=False keeps it), or the router is "
            "frozen"
        )
    part = share(model, kwargs) if told is not None and told.items else 1.0
    total = loss + part * sum(t.to(loss.device) for t in terms)
    for recorder in _others(model, losses):
        recorder.taken()
    if isinstance(output, tuple):
        return (total, *output[1:])
    output.loss = total
    return output


def _loss_of(output: Any) -> Tensor | None:
    """The loss in a model's output; with return_dict=False it comes first and is a scalar."""
    if isinstance(output, tuple):
        loss = output[0] if output else None
        return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None
    loss = getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def share(model: Any, kwargs: dict) -> Tensor | float:
    """This call's part of an optimizer step.

    With gradient accumulation the Trainer hands over `num_items_in_batch`, the labels of the whole
    step, and the task loss is this call's sum over that number. Weighing the balance losses by the
    same share keeps their part of the step at their mean, whatever the number of calls. The labels
    are counted as the Trainer counts them.
    """
    labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
    if shifted is not None:
        labels = shifted
    elif isinstance(labels, Tensor) and _shifts(model):
        labels = labels[..., 1:]
    if not isinstance(labels, Tensor):
        return 1.0
    return labels.ne(-100).sum() / kwargs["num_items_in_batch"]


def _shifts(model: Any) -> bool:
    """Whether the loss compares each token with the label after it, so that the first has none."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    causal = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "") is ForCausalLMLoss
    return causal and not getattr(model.config, "is_encoder_decoder", False)


def _miss_a_loss(model: nn.Module, losses: Losses, terms: list[Tensor]) -> None:
    watched = any(recorder.collects for recorder in _others(model, losses))
    if not watched and any(t.requires_grad for t in terms):
        losses.warn(
            f"{type(model).__name__} was called without labels, so that nothing collects its "
            "balance losses (the Trainer calls it so for label_smoothing_factor and "
            "compute_loss_func): give it labels, or train inside `with moiety.watch(model) as "
            "routes` and add `routes.loss()` to the loss, or set balance={}"
        )


def _others(model: nn.Module, losses: Losses) -> list[Any]:
    """What else records the layers of this model: `moiety.watch`."""
    layers = (m for m in model.modules() if isinstance(m, MoE))
    found = {id(recorder): recorder for layer in layers for _, recorder in layer._watchers}
    return [recorder for recorder in found.values() if recorder is not losses]
