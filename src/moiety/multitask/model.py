"""`MultiGate`: shared experts, and for each task a gate of its own, a tower and a loss.

    tasks = [Task("income", size=2), Task("age", "number")]
    model = MultiGate(tasks, FeedForward(8, dim=32, hidden=64), router="dselect-k-static", k=2)
    loss = model.loss(model(x), {"income": ids, "age": years})

Multi-gate mixture of experts (Ma et al. 2018); with sparse gates as in DSelect-k (Hazimeh et al.
2021). Each expert is computed once for all tasks, and only where some gate has it active: in eval,
and in training as soon as a gate is exactly zero on a plateau. In inference static gates are asked
once, not in every call (see standing.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..experts import Experts, ModuleExperts
from ..modes import at_rest
from ..routing import Router, balance, build_router
from ..routing.registry import one_number
from .base import MultiTask, Outputs, Tower
from .gate_log import GateLog
from .standing import Standing
from .task import Task, check_tasks
from .together import Decisions, can_join, decide_apart, decide_together, pays_off
from .union import mix_weights
from .weighting import Weighting, check_names


class MultiGate(MultiTask):
    """A multi-gate mixture of experts.

    experts     an `Experts` object, or modules (then `dim` is the shape of their input)
    router      a router's name, with its options; or built routers by task name
    k           the router's option of that name
    trunk       a module before gates and experts; of a Hugging Face encoder the pooled output, or
                the first token's, is taken
    tower       None: a linear map; hidden widths; a function task -> module; or modules by name
    dim         the shape of what the experts get; only where experts are plain modules
    balance     weights of the routers' losses by name; None: the routers' own defaults. A weight
                given as a tensor becomes a buffer, as an option of the router does: copies that
                `train.fit_many` trains together may differ in it
    weighting   "fixed" or "uncertainty"
    backend     "auto", "loop", "grouped" or "dense", as of an `MoE` layer
    log         keep the gates of so many training calls in a buffer: (points, every), or None
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        experts: Experts | Sequence[nn.Module],
        *,
        router: str | Mapping[str, Router] = "dselect-k-static",
        k: int | None = None,
        trunk: nn.Module | None = None,
        tower: Tower = None,
        dim: int | Sequence[int] | None = None,
        balance: Mapping[str, float | Tensor] | None = None,
        weighting: Weighting = "fixed",
        backend: str = "auto",
        log: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        tasks = check_tasks(tasks)
        experts = as_experts(experts, dim)
        super().__init__(
            tasks, width=experts.out_dim, trunk=trunk, tower=tower, weighting=weighting
        )
        if k is not None:
            options["k"] = k
        self.experts = experts
        routers = _routers(tasks, experts, router, options)
        self.routers, self.standing = nn.ModuleList(routers), Standing()
        self.joined = isinstance(router, str) and len(routers) > 1 and can_join(routers)
        self.balance = [_weights(r, balance) for r in routers]
        varied = {name: w for name, w in (balance or {}).items() if isinstance(w, Tensor)}
        self.varied = list(varied)  # of these the numbers in `balance` are those of the start
        for name, weight in varied.items():
            own = weight.detach().clone().reshape(())
            self.register_buffer(f"weight_{name}", own, persistent=False)
        if backend not in ("auto", *experts.backends):
            raise ValueError(
                f"backend must be one of {', '.join(('auto', *experts.backends))}, got {backend!r}"
            )
        self.backend = backend
        self.log = None if log is None else GateLog(len(tasks), experts.experts, *log)

    def features(self, x: Tensor, outputs: Outputs) -> Sequence[Tensor]:
        x_TD = x.flatten(1)
        if x_TD.shape[1] != self.experts.dim:
            raise ValueError(
                f"the experts take {self.experts.dim} values an example, got {x_TD.shape[1]} "
                f"(shape {list(x.shape)})"
            )
        also = self.buffers(recurse=False)
        strengths = tuple(tuple(own.items()) for own in self.balance)
        found, work = self.standing(self.routers, x_TD, self._decide, also, strengths)
        names = [task.name for task in self.tasks]
        outputs.routings = dict(zip(names, found.routings, strict=True))
        outputs.terms = dict(zip(names, found.terms, strict=True))
        if self.log is not None and self.training:
            self.log(x_TD, self.routers, found.weight_GTE, found.choice_GTE, self.joined)
        weight, choice = found.weight_GTE, found.choice_GTE
        routings = found.routings
        y_GTD = mix_weights(self.experts, x_TD, weight, choice, routings, self.backend, work)
        return y_GTD.unbind(0)

    def _decide(self, x_TD: Tensor) -> Decisions:
        routers: list[Any] = list(self.routers)
        varied = {name: getattr(self, f"weight_{name}") for name in self.varied}
        weights = [{**own, **varied} for own in self.balance]
        alike = self.joined and all(own == weights[0] for own in weights)  # some may be set by hand
        if alike and pays_off(x_TD) and (x_TD.is_cuda or not routers[0].stochastic):
            return decide_together(routers, weights[0], x_TD)
        return decide_apart(routers, weights, x_TD)


def as_experts(experts: Experts | Sequence[nn.Module], dim: int | Sequence[int] | None) -> Experts:
    """Experts as they are; plain modules are tried on zeros to learn the width of their answer."""
    if isinstance(experts, Experts):
        if dim is not None and torch.Size(_shape(dim)).numel() != experts.dim:
            raise ValueError(f"dim = {dim} does not fit experts of width {experts.dim}")
        return experts
    modules = list(experts) if isinstance(experts, (Sequence, nn.ModuleList)) else []
    if not modules or not all(isinstance(m, nn.Module) for m in modules):
        raise ValueError("experts must be an Experts object or a list of modules")
    if dim is None:
        raise ValueError("with plain modules as experts, dim must say the shape of their input")
    shape = _shape(dim)
    like = next(modules[0].parameters(), torch.empty(()))
    probe = torch.zeros(1, *shape, device=like.device, dtype=like.dtype)
    with torch.no_grad(), at_rest(modules[0]):
        width = modules[0](probe).flatten(1).shape[1]
    whole = torch.Size(shape).numel()
    return ModuleExperts(modules, dim=whole, out_dim=width, shape=shape if len(shape) > 1 else None)


def _shape(dim: int | Sequence[int]) -> tuple[int, ...]:
    return (dim,) if isinstance(dim, int) else tuple(dim)


def _routers(
    tasks: Sequence[Task],
    experts: Experts,
    router: str | Mapping[str, Router],
    options: dict[str, Any],
) -> list[Router]:
    if isinstance(router, str):
        routers = [
            build_router(router, dim=experts.dim, experts=experts.experts, **options) for _ in tasks
        ]
    else:
        if options:
            raise ValueError(f"with built routers, {', '.join(options)} belong to their makers")
        check_names(tasks, router, "router")
        routers = [router[task.name] for task in tasks]
    for task, one in zip(tasks, routers, strict=True):
        if one.total != experts.experts or one.dim != experts.dim:
            raise ValueError(
                f"the router of task {task.name!r} is for {one.total} experts of width {one.dim}, "
                f"the experts are {experts.experts} of width {experts.dim}"
            )
        if one.needs_ids:
            raise ValueError(f"router {one.name!r} needs token ids, and examples have none")
    return routers


def _weights(router: Router, weights: Mapping[str, float | Tensor] | None) -> dict[str, float]:
    if not isinstance(weights, Mapping):
        return balance.check_weights(router.default_balance() if weights is None else weights)
    plain = {n: one_number(f"the weight of {n!r}", w) for n, w in weights.items()}
    return balance.check_weights(plain)
