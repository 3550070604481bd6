"""What all multi-task models share: towers, one loss, and a forward that gives `Outputs`.

    outputs = model(x)                          # a dict: task name -> [B, size]
    model.loss(outputs, targets).backward()     # task losses by weight, and the routers' own terms
    model.metrics(outputs, targets)             # {"income": {"accuracy": 0.84, "auc": 0.9, …}, …}

`Outputs` carries all that the loss needs besides the targets, so that the loss is a plain function
and `train.fit_many` can take it: `fit_many(make, data, loss=packed_loss(tasks))`, where the targets
of `data` come from `pack(tasks, targets)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .. import cost
from ..routing import Routing
from ..routing.value import readable
from .metrics import task_metrics
from .task import Task, check_tasks, unpack
from .together import run_alike
from .weighting import (
    WEIGHTINGS,
    SampleWeights,
    Weighting,
    check_names,
    presence,
    task_losses,
    uncertain_loss,
    weight_of,
)

Tower = int | Sequence[int] | Callable[[Task], nn.Module] | Mapping[str, nn.Module] | None


class Outputs(dict[str, Tensor]):
    """The outputs by task, and what the loss needs of the model besides them."""

    routings: dict[str, Routing]  # the gate's decision of each task, where there are gates
    terms: dict[str, dict[str, Tensor]]  # the routers' weighted losses, by task and name
    log_variance: dict[str, Tensor]  # s_t of "uncertainty" weighting

    def __init__(self, outputs: Mapping[str, Tensor]) -> None:
        super().__init__(outputs)
        self.routings, self.terms, self.log_variance = {}, {}, {}


class MultiTask(nn.Module):
    """Base of the models: a subclass writes `features`.

    tower       None: a linear map; a number or several: hidden widths of an MLP with ReLU; a
                function task -> module; or modules by task name
    weighting   "fixed" (the tasks' weights) or "uncertainty" (learned besides)
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        width: int,
        trunk: nn.Module | None = None,
        tower: Tower = None,
        weighting: Weighting = "fixed",
    ) -> None:
        super().__init__()
        if weighting not in WEIGHTINGS:
            raise ValueError(f"weighting must be one of {', '.join(WEIGHTINGS)}, got {weighting!r}")
        self.tasks = check_tasks(tasks)
        self.trunk = trunk
        self.towers = build_towers(self.tasks, width, tower)
        plain = tower is None or isinstance(tower, (int, Sequence))
        self.towers_alike = plain and len({task.outputs for task in self.tasks}) == 1
        learned = weighting == "uncertainty"
        self.log_variance = nn.Parameter(torch.zeros(len(self.tasks))) if learned else None

    def features(self, x: Tensor, outputs: Outputs) -> Sequence[Tensor]:
        """What each tower gets, `[B, width]` in the order of the tasks; gates report to outputs."""
        raise NotImplementedError

    def forward(self, x: Any) -> Outputs:
        """`x`: what the trunk takes (a dict for a Hugging Face encoder, a tuple), or a tensor."""
        _check_input(x)
        outputs = Outputs({})
        each = self.features(run_trunk(self.trunk, x), outputs)
        answers = run_alike(list(self.towers), each, self.towers_alike)
        for task, y in zip(self.tasks, answers, strict=True):
            if y.shape[-1] != task.outputs:
                raise ValueError(
                    f"the tower of task {task.name!r} gives {y.shape[-1]} values, "
                    f"not {task.outputs}"
                )
            outputs[task.name] = y
        if self.log_variance is not None:
            names = [task.name for task in self.tasks]
            outputs.log_variance = dict(zip(names, self.log_variance.unbind(), strict=True))
        return outputs

    def loss(
        self,
        outputs: Outputs,
        targets: Mapping[str, Tensor],
        sample_weights: SampleWeights = None,
    ) -> Tensor:
        """The weighted losses of the tasks, plus the routers' own terms.

        sample_weights: `[B]` for all tasks, or by task name.
        """
        return total_loss(self.tasks, outputs, targets, sample_weights)

    def metrics(
        self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> dict[str, dict[str, float | None]]:
        """Metrics of each task over its labelled examples; None where nothing defines them."""
        check_names(self.tasks, outputs, "outputs")
        check_names(self.tasks, targets, "targets")
        return {t.name: task_metrics(t, outputs[t.name], targets[t.name]) for t in self.tasks}

    def flops(self, x: Any) -> float:
        """Counted forward FLOPs on these examples in eval mode, skipped experts left out."""
        return cost.forward_flops(lambda: self(x), self)


def total_loss(
    tasks: Sequence[Task],
    outputs: Outputs,
    targets: Mapping[str, Tensor],
    sample_weights: SampleWeights = None,
) -> Tensor:
    """The loss of a batch: a function of outputs and targets alone."""
    if not isinstance(outputs, Outputs):
        found = type(outputs).__name__
        raise ValueError(
            f"outputs must be what the model gave, got {found}: call model.loss(model(x), …)"
        )
    losses = task_losses(tasks, outputs, targets, sample_weights)
    parts = []
    for task in tasks:
        loss, s = losses[task.name], outputs.log_variance.get(task.name)
        if s is not None:
            there = presence(task, targets[task.name], weight_of(task, sample_weights))
            loss = uncertain_loss(task, loss, s, there)
        parts.append(loss if task.weight == 1 else task.weight * loss)
    parts += [term for own in outputs.terms.values() for term in own.values()]
    return torch.stack([part.to(parts[0].dtype) for part in parts]).sum()


def packed_loss(tasks: Sequence[Task]) -> Callable[[Outputs, Tensor], Tensor]:
    """The loss for `fit_many`, whose targets are one tensor (see `pack`)."""
    tasks = check_tasks(tasks)
    return lambda outputs, packed: total_loss(tasks, outputs, unpack(tasks, packed))


def _check_input(x: Any) -> None:
    """Raise on NaN or infinity where looking costs no wait; elsewhere it reaches the loss."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or not readable(x):
        return
    if x.sum().isfinite():  # far cheaper than a look at each value, and it misses none
        return
    wrong = ~x.isfinite()
    if not bool(wrong.any()):  # finite values whose sum is not
        return
    where = "x is"
    if x.dim() == 2:
        where = f"column {int(wrong.sum(0).argmax())} of x is"
        wrong = wrong[:, wrong.sum(0).argmax()]
    many = int(wrong.reshape(len(x), -1).any(1).sum())
    raise ValueError(
        f"{where} NaN or infinite in {many} of {len(x)} examples: fill in or leave out what is "
        "missing"
    )


def run_trunk(trunk: nn.Module | None, x: Any) -> Tensor:
    """One vector (or image) for each example: the trunk's answer, pooled if it is an encoder's."""
    if trunk is None:
        if not isinstance(x, Tensor):
            raise ValueError(f"without a trunk, x must be a tensor, got {type(x).__name__}")
        return x
    if isinstance(x, Mapping):
        h = trunk(**x)
    else:
        h = trunk(*x) if isinstance(x, (tuple, list)) else trunk(x)
    if isinstance(h, Tensor):
        return h
    pooled = getattr(h, "pooler_output", None)
    if pooled is not None:
        return pooled
    hidden = getattr(h, "last_hidden_state", None)
    if hidden is None:
        raise ValueError(
            "the trunk must give a tensor, or pooler_output or last_hidden_state as encoders of "
            f"transformers do; got {type(h).__name__}"
        )
    return hidden[:, 0]


def build_towers(tasks: Sequence[Task], width: int, tower: Tower) -> nn.ModuleList:
    """One network for each task, from features of `width` to its outputs."""
    if isinstance(tower, (Mapping, nn.ModuleDict)):
        given = dict(tower.items())
        check_names(tasks, given, "tower")
        return nn.ModuleList(given[task.name] for task in tasks)
    if callable(tower) and not isinstance(tower, nn.Module):
        return nn.ModuleList(tower(task) for task in tasks)
    sizes = () if tower is None else (tower,) if isinstance(tower, int) else tower
    if not isinstance(sizes, Sequence) or not all(type(n) is int and n > 0 for n in sizes):
        raise ValueError(
            "tower must be None, hidden widths, a function of the task, or modules by task name; "
            f"got {tower!r}"
        )
    return nn.ModuleList(mlp([width, *sizes, task.outputs]) for task in tasks)


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Linear maps of these sizes with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
