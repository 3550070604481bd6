"""Many tasks in a few operations: gates, towers and losses that are alike run as one batch.

A gate or a tower is tiny, and a GPU spends its time on launches: 128 tasks one after the other are
tens of thousands of them a step. Where nobody can look at values anyway (under vmap, on a GPU), all
that are alike run under `torch.func.vmap` over the tasks, with the same results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ..routing import Router, Routing, balance
from ..routing.value import in_vmap
from ..train.draws import Draws

# Buffers that are the same in all routers built alike.
SHARED = {"calls", "code", "shift", "temperature", "width"}


@dataclass(frozen=True)
class Decisions:
    """What the gates of all tasks decided: axis G first, one row of T where all are static."""

    routings: list[Routing]
    weight_GTE: Tensor
    choice_GTE: Tensor
    terms: list[dict[str, Tensor]]  # the weighted losses of each gate


def pays_off(t: Tensor) -> bool:
    """Whether to batch over tasks: on a GPU and under vmap, but not in code that is compiled."""
    return in_vmap() or (t.device.type == "cuda" and not torch.compiler.is_compiling())


def can_join(routers: Sequence[Router]) -> bool:
    """Whether routers, built alike, can run as one: parameters, but no state of each its own."""
    buffers = {name for router in routers for name, _ in router.named_buffers()}
    grown = any(router.families is not None for router in routers)
    learned = any(True for _ in routers[0].parameters())
    return learned and not grown and buffers <= SHARED


def decide_apart(
    routers: Sequence[Router], weights: Sequence[Mapping[str, float | Tensor]], x_TD: Tensor
) -> Decisions:
    """Ask one gate after the other."""
    routings = [router(x_TD) for router in routers]
    rows = [one_row(r) for r in routings]
    terms = [balance.terms(r, w) for r, w in zip(routings, weights, strict=True)]
    weight, choice = [r.dense() for r in rows], [r.choice() for r in rows]
    return Decisions(routings, stack_rows(weight), stack_rows(choice), terms)


class ByTask(Draws):
    """Inside a vmap over tasks: all tasks draw at once from where a single one would."""

    def __init__(self, task: Tensor, tasks: int) -> None:
        super().__init__(task)
        self.tasks = tasks

    def draw(self, kind: str, shape: Sequence[int], like: dict[str, Any], p: float = 0.0) -> Tensor:
        like = {**like, "device": self.copy.device}
        draw = torch.randn if kind == "normal" else torch.rand
        own = draw(self.tasks, *shape, **like).index_select(0, self.copy[None]).squeeze(0)
        return (own < p).to(own.dtype) if kind == "bernoulli" else own


def decide_together(
    routers: Sequence[Router], weights: Mapping[str, float | Tensor], x_TD: Tensor
) -> Decisions:
    """Ask all gates at once; those that `can_join` only."""
    first, plain = routers[0], {}

    def one(params: dict[str, Tensor], task: Tensor) -> Any:
        with ByTask(task, len(routers)) if first.stochastic else nullcontext():
            routing = functional_call(first, params, (x_TD,))
        tensors, plain["fields"] = _split(routing)
        row = one_row(routing)
        return tensors, row.dense(), row.choice(), balance.terms(routing, weights)

    tasks = torch.arange(len(routers), device=x_TD.device)
    # "same": what `ByTask` draws is for all tasks, and each takes its part.
    many = vmap(one, randomness="same")
    tensors, weight_GTE, choice_GTE, terms = many(stack_parameters(routers), tasks)
    if first.training and hasattr(first, "calls"):  # the first has counted for all
        for router in routers[1:]:
            router.calls.copy_(first.calls)  # type: ignore[operator, arg-type]
    routings = [Routing(**plain["fields"], **own) for own in _by_task(tensors, len(routers))]
    return Decisions(routings, weight_GTE, choice_GTE, _by_task(terms, len(routers)))


def run_alike(
    modules: Sequence[nn.Module], x: Tensor | Sequence[Tensor], joined: bool
) -> list[Tensor]:
    """Run each module on its own input, or all on the same; at once if joined and it pays off."""
    each = x if not isinstance(x, Tensor) else [x] * len(modules)
    if not joined or not pays_off(each[0]):
        return [module(own) for module, own in zip(modules, each, strict=True)]
    first, same = modules[0], isinstance(x, Tensor)
    inputs = x if isinstance(x, Tensor) else torch.stack(list(x))
    many = vmap(lambda params, x: functional_call(first, params, (x,)), (0, None if same else 0))
    return list(many(stack_parameters(modules), inputs).unbind(0))


def stack_parameters(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """`[G, …]` of every parameter."""
    each = [dict(module.named_parameters()) for module in modules]
    return {name: torch.stack([own[name] for own in each]) for name in each[0]}


def one_row(r: Routing) -> Routing:
    """A static decision for one token, which stands for all; any other as it is."""
    return r.replace(tokens=1, mask=None) if r.by == "all" else r


def stack_rows(each: Sequence[Tensor]) -> Tensor:
    """`[G, T, E]`: rows that stand for all tokens are repeated only beside others that do not."""
    rows = max(t.shape[0] for t in each)
    return torch.stack([t.expand(rows, -1) for t in each])


def _split(routing: Routing) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a decision, and its plain fields."""
    fields = {f.name: getattr(routing, f.name) for f in dataclasses.fields(routing)}
    tensors = {n: v for n, v in fields.items() if isinstance(v, (Tensor, dict))}
    return tensors, {n: v for n, v in fields.items() if n not in tensors}


def _by_task(values: dict[str, Any], tasks: int) -> list[dict[str, Any]]:
    """Values with the tasks in front, task by task; `unbind` has one operation as its gradient."""
    parts = {
        name: _by_task(v, tasks) if isinstance(v, dict) else v.unbind(0)
        for name, v in values.items()
    }
    return [{name: part[i] for name, part in parts.items()} for i in range(tasks)]
