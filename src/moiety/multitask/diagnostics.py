"""What the gates of a `MultiGate` do, as plain values for a report.

    for gate in describe_gates(model, x): print(gate.task, gate.selected, gate.mean_selected)
    print(gate_table(model, x))                         # the same as text
    similarity(model, x)                                # {"tasks": […], "values": [[…], …]}

Static gates need no data. A gate by example is described on `x`: its weights are means over the
examples, and an expert is selected if it works for any of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..modes import at_rest
from ..routing import Router, Routing
from .base import run_trunk
from .gate_log import binary, mean_active, mean_gate
from .model import MultiGate
from .similar import cosine_matrix, jaccard_by_group, random_jaccard


@dataclass(frozen=True)
class Gate:
    """The gate of one task."""

    task: str
    router: str
    selected: list[int]  # experts that work for some example
    count: int  # how many those are
    mean_selected: float  # experts at work for an example, on average
    is_binary: bool | None  # all selectors of all examples; None: this gate has no selectors
    weights: list[float]  # by expert; of a gate by example the mean


def describe_gates(model: MultiGate, x: Any = None) -> list[Gate]:
    """The gate of every task, in eval mode; `x` only where a gate decides by example."""
    if not isinstance(model, MultiGate):
        raise ValueError(f"only a MultiGate has gates to describe, got {type(model).__name__}")
    x_TD = _inputs(model, x)
    routings = gate_routings(model, x_TD)
    return [
        _describe(task.name, router, routing, x_TD)  # type: ignore[arg-type]
        for task, router, routing in zip(model.tasks, model.routers, routings, strict=True)
    ]


@torch.no_grad()
def gate_routings(model: MultiGate, x_TD: Tensor) -> list[Routing]:
    """The decisions of all gates in eval mode; no expert runs."""
    with at_rest(model.routers):
        return [router(x_TD) for router in model.routers]


@torch.no_grad()
def _inputs(model: MultiGate, x: Any) -> Tensor:
    """What the gates see."""
    if x is None:
        if not all(router.static for router in model.routers):
            raise ValueError("these gates decide by example: give examples, x")
        like = next(model.routers.parameters(), torch.empty(()))
        return torch.zeros(1, model.experts.dim, device=like.device)
    with at_rest(model):
        return run_trunk(model.trunk, x).flatten(1)


@torch.no_grad()
def _describe(task: str, router: Router, routing: Routing, x_TD: Tensor) -> Gate:
    selected = routing.choice().any(0).nonzero().flatten().tolist()
    exact = binary(router, x_TD, getattr(router, "calls", 0))
    return Gate(
        task=task,
        router=router.name,
        selected=selected,
        count=len(selected),
        mean_selected=float(mean_active(routing)),
        is_binary=None if exact is None else bool(exact.all()),
        weights=mean_gate(routing).tolist(),
    )


def gate_table(model: MultiGate, x: Any = None) -> str:
    """One line for each task: experts, how many, binary or not, weights of the selected."""
    gates = describe_gates(model, x)
    wide = max(len("task"), *(len(gate.task) for gate in gates))
    lines = [f"{'task':{wide}}  experts  a time  binary  weights"]
    words = {None: "–", True: "yes", False: "no"}
    for gate in gates:
        weights = ", ".join(f"{e}: {gate.weights[e]:.3f}" for e in gate.selected)
        lines.append(
            f"{gate.task:{wide}}  {gate.count:7}  {gate.mean_selected:6.2f}  "
            f"{words[gate.is_binary]:6}  {weights}"
        )
    return "\n".join(lines)


def similarity(model: MultiGate, x: Any = None) -> dict[str, Any]:
    """The cosine between the (mean) gates of every pair of tasks, for the report's picture."""
    gates = describe_gates(model, x)
    values = cosine_matrix(torch.tensor([gate.weights for gate in gates]))
    return {"tasks": [gate.task for gate in gates], "values": values}


def overlap(
    model: MultiGate, groups: Mapping[str, Hashable], x: Any = None
) -> dict[str, float | None]:
    """Jaccard indices within and between groups of tasks, beside a random gate's expectation.

    `random` is for as many experts as the tasks select on average, rounded; None if that is 0.
    """
    gates = describe_gates(model, x)
    missing = [gate.task for gate in gates if gate.task not in groups]
    if missing:
        raise ValueError(f"groups lacks task {missing[0]!r}")
    selected = [gate.selected for gate in gates]
    within, between = jaccard_by_group(selected, [groups[gate.task] for gate in gates])
    k = round(sum(gate.count for gate in gates) / len(gates))
    chance = random_jaccard(model.experts.experts, k) if k else None
    return {"within": within, "between": between, "random": chance}
