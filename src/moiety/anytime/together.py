"""`fit_together`: the members of an ensemble in one program, each as if it were trained alone.

learner("ensemble", make, members=8, together=True)

`train.fit_many` takes the orders, random numbers and rules of `Fit`, so that on a CPU the members
end where `Fit` leaves them, to round-off; a GPU draws numbers of its own. It has no state: a phase
that is killed begins again, and ends in the same bits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ..train.many import fit_many
from .data import Examples
from .fitting import Fit, Training, cross_entropy, tensor_bytes

OPTIONS = ("rho", "eps", "momentum", "nesterov", "betas", "weight_decay")


def check_together(training: Training) -> None:
    """Raise where the members cannot be trained in one program."""
    strange = [name for name in training.options if name not in OPTIONS]
    if strange:
        raise ValueError(
            f"members cannot be trained together with the option {strange[0]!r}: set together=False"
        )


def fit_together(fits: Sequence[Fit], tick: Callable[[float], None] | None = None) -> None:
    """Train fits of models of one structure on the same data; the fits then know what was done."""
    first, training = fits[0], fits[0].training
    models = {fit.seed: fit.model for fit in fits}
    held = len(first.validation) > 0
    fitted = fit_many(
        lambda seed: _augmented(copy.deepcopy(models[seed]), training.augment).train(),
        _dataset(first.train),
        seeds=list(models),
        steps=int(first.last),
        batch=training.batch,
        loss=cross_entropy,
        clip=training.clip,
        validation=_dataset(first.validation) if held else None,
        score=(cross_entropy if training.score == "loss" else _wrong) if held else None,
        every=first.per_epoch if held else None,
        patience=training.patience if held else None,
        min_gain=training.min_gain,
        on_step=(lambda step: tick(step / first.last)) if tick else None,
        optimizer=training.method,
        **numbers_of(training),
    )
    ends = zip(fits, fitted.models(), fitted.history, fitted.best_step)
    for fit, model, history, kept in ends:
        if not all(map(math.isfinite, history.loss)):
            raise ValueError(f"the loss became infinite within {len(history.loss)} steps: lower lr")
        plain = model.model if isinstance(model, Augmented) else model
        fit.model.load_state_dict(plain.state_dict())
        fit.model.eval()
        fit.step, fit.checks = len(history.loss), len(history.validation)
        fit.optimizer_bytes = _state_bytes(fit)
        if held:
            value = history.validation[kept]
            fit.best = -value if training.score == "loss" else 1 - value


class Augmented(nn.Module):
    """A model that sees its training inputs augmented, with the random numbers of its own copy."""

    def __init__(self, model: nn.Module, augment: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.augment = model, augment

    def forward(self, x: Tensor) -> Tensor:
        return self.model(self.augment(x) if self.training else x)


def _augmented(model: nn.Module, augment: Callable[[Tensor], Tensor] | None) -> nn.Module:
    return model if augment is None else Augmented(model, augment)


def _state_bytes(fit: Fit) -> int:
    """Bytes of an optimizer of such a model after a step."""
    twin = copy.deepcopy(fit.model)
    optimizer = fit.training.optimizer(twin.parameters())
    for p in twin.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    return tensor_bytes(optimizer.state_dict())


def numbers_of(training: Training) -> dict[str, Any]:
    """The words of `fit_many` for the numbers of a torch optimizer."""
    group = training.optimizer([nn.Parameter(torch.zeros(1))]).param_groups[0]
    known = {name: float(group[name]) for name in OPTIONS if name in group and name != "betas"}
    if "betas" in group:
        known["beta1"], known["beta2"] = group["betas"]
    return {"lr": group["lr"], "weight_decay": known.pop("weight_decay"), "options": known}


def _dataset(data: Examples) -> TensorDataset:
    return TensorDataset(data.x, data.y)


def _wrong(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.argmax(-1) != y).float().mean()
