"""The copies of a model that train in one program: stacked parameters, one vmapped step.

On a GPU the step of a small model is mostly launches. After a few steps it is captured as a CUDA
graph, which repeats all its launches by one; a step that cannot be captured, because it waits for
the host, goes on as it began.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ..modes import at_rest
from ..moe import MoE
from ..routing import Routing
from .draws import ByCounter, ByGenerator, Draws
from .fit import _device, seeded
from .graph import Graph, capture
from .layers import HAVE_TRITON, Layers, pool_first
from .stacked import Stacked, column

Loss = Callable[[Tensor, Tensor], Tensor]
WARM = 3  # steps before a capture: they allocate, and compile the kernels


@dataclass
class History:
    """The curves of one copy, up to the step at which it stopped."""

    loss: list[float] = field(default_factory=list)  # of every step
    validation: dict[int, float] = field(default_factory=dict)  # by step, counted from 1


@dataclass
class ManyFitted:
    """What `fit_many` gives back; lists and the first axis of `state` follow `seeds`."""

    seeds: list[int]
    history: list[History]
    best_step: list[int]  # of the weights kept: the best on validation (0: none was), else the last
    state: dict[str, Tensor]
    base: nn.Module

    def models(self) -> list[nn.Module]:
        """The copies as plain modules of their own."""
        models = []
        for i in range(len(self.seeds)):
            model = copy.deepcopy(self.base)
            with torch.no_grad():
                for name, t in (*model.named_parameters(), *model.named_buffers()):
                    t.copy_(self.state[name][i])
            models.append(model)
        return models


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all copies share."""

    steps: int
    batch: int
    loss: Loss
    optimizer: str
    score: Loss
    every: int
    patience: float
    min_gain: float
    graph: bool


class Block:
    """The copies that run in one program."""

    def __init__(
        self,
        plan: Plan,
        make: Callable[[int], nn.Module],
        seeds: list[int],
        numbers: dict[str, Tensor],
        rates: Tensor,
        device: torch.device | str | None,
        *,
        train: list[TensorDataset],  # one for all copies, or one for each
        validation: list[TensorDataset],  # none: not measured
    ) -> None:
        self.plan, self.seeds = plan, seeds
        models = [build(make, seed, device) for seed in seeds]
        self.base = models[0].train()
        self.device = _device(self.base)
        self.params, self.buffers = _stack(models)
        self.model = pool_first(self.base)  # what runs, with the stacked parameters
        self.layers = _routed(self.model)
        self.numbers = {name: t.to(self.device) for name, t in numbers.items()}
        self.rates = rates.to(self.device)
        self.groups: list[Stacked] = []
        self.copies = torch.arange(len(seeds), device=self.device)
        self.x, self.y = _lay_out(train, self.device)
        # Where a copy's own examples begin.
        self.first_S = torch.arange(len(train)) * len(train[0])
        self.room: dict[int, list[Tensor]] = {}  # for the examples of a batch, by their number
        self.validation = validation
        self.held = _lay_out(validation, self.device, torch.stack) if validation else []
        # The number of the step lies on the device, so that a captured step can count.
        self.step = torch.zeros(1, dtype=torch.long, device=self.device)
        dtype = next(iter(self.params.values())).dtype
        self.losses = torch.zeros(plan.steps, len(seeds), dtype=dtype, device=self.device)
        # Triton's kernels run convolutions, and draw what a captured step needs.
        self.kernels = self.device.type == "cuda" and HAVE_TRITON
        self.modes: Any = Layers if self.kernels else nullcontext
        self.graph = plan.graph and self.kernels
        self.seed_S = torch.tensor([seed % 2**63 for seed in seeds], device=self.device)
        self.graphs: dict[int, Graph | None] = {}  # by the size of a batch
        self.history = [History() for _ in seeds]
        self.best, self.best_step = [math.inf] * len(seeds), [0] * len(seeds)
        self.bad, self.last = [0] * len(seeds), [plan.steps] * len(seeds)
        self.kept = {name: t.detach().clone() for name, t in self._state().items()}

    def run(self, on_step: Callable[[int], None] | None) -> ManyFitted:
        plan = self.plan
        for step, rows_SB in zip(range(1, plan.steps + 1), self._batches()):
            self._advance(step, rows_SB)
            if self.validation and (step % plan.every == 0 or step == plan.steps):
                self._validate(step)
            if on_step is not None:
                on_step(step)
            if all(last <= step for last in self.last):
                break
        for i, curve in enumerate(self.losses.T.tolist()):  # read once: no wait a step
            self.history[i].loss = curve[: self.last[i]]
        if not self.validation:
            self.best_step, self.kept = [plan.steps] * len(self.seeds), self._state()
        kept = {name: t.detach().contiguous() for name, t in self.kept.items()}
        return ManyFitted(self.seeds, self.history, self.best_step, kept, self.base)

    def _state(self) -> dict[str, Tensor]:
        return {**self.params, **self.buffers}

    def _batches(self) -> Iterator[Tensor]:
        """The rows of each batch, in the order that `fit` takes; one transfer an epoch."""
        generators = [torch.Generator().manual_seed(seed) for seed in self.seeds]
        while True:
            count = len(self.y) // len(self.first_S)
            order_SN = torch.stack([torch.randperm(count, generator=g) for g in generators])
            order_SN += self.first_S[:, None]
            yield from order_SN.to(self.device).split(self.plan.batch, dim=1)

    def _advance(self, step: int, rows_SB: Tensor) -> None:
        """Do a step, captured if that is possible."""
        size = rows_SB.shape[1]
        if self.graph and step > WARM and size not in self.graphs:
            captured = partial(self._step, step=step)
            self.graphs[size] = capture(captured, rows_SB, type(self.base).__name__)
        graph = self.graphs.get(size)
        if graph is None:
            self._step(rows_SB, step)
        else:
            graph.replay(rows_SB)

    def _draws(self, step: int, copy: Tensor) -> Draws:
        if self.kernels:
            return ByCounter(self.seed_S, self.step, copy)
        return ByGenerator(self.seeds, step, copy)

    def _step(self, rows_SB: Tensor, step: int) -> None:
        """One step of every copy; a copy that has stopped goes on, and nobody looks."""

        def one(params: Any, buffers: Any, copy: Tensor, x: Tensor, y: Tensor) -> Tensor:
            with self._draws(step, copy), self.modes(), _balance(self.layers) as terms:
                loss = self.plan.loss(self._call(params, buffers, x), y)
                return sum(terms, loss)

        x, y = self._examples(rows_SB)
        with _explained(self.base):
            losses_S = torch.func.vmap(one)(self.params, self.buffers, self.copies, x, y)
        learned = {name: p for name, p in self.params.items() if p.requires_grad}
        # The copies share no weight, so the gradient of the sum is each copy's own.
        grads = torch.autograd.grad(losses_S.sum(), list(learned.values()), allow_unused=True)
        self._update({n: g for n, g in zip(learned, grads) if g is not None})
        self.losses.index_copy_(0, self.step, losses_S.detach().to(self.losses.dtype)[None])
        self.step += 1

    def _examples(self, rows_SB: Tensor) -> list[Tensor]:
        """Inputs and targets of a batch, in tensors that last, since fresh memory costs."""
        rows, data = rows_SB.flatten(), (self.x, self.y)
        if len(rows) not in self.room:
            self.room[len(rows)] = [t.new_empty(len(rows), *t.shape[1:]) for t in data]
        for t, room in zip(data, self.room[len(rows)]):
            # Rows at once, which on a CPU is several times as fast as an index.
            torch.index_select(t, 0, rows, out=room)
        return [room.unflatten(0, rows_SB.shape) for room in self.room[len(rows)]]

    @torch.no_grad()
    def _update(self, grads: dict[str, Tensor]) -> None:
        if not self.groups:  # what no gradient reaches is not updated, and that is known now
            self._group(grads)
        taken = [group.take(grads) for group in self.groups]
        if "clip" in self.numbers:
            norms = [g.flatten(1).norm(dim=1) for own in taken for g in own]
            shrink_S = (self.numbers["clip"] / (torch.stack(norms).norm(dim=0) + 1e-6)).clamp(max=1)
            taken = [[g * column(shrink_S, g) for g in own] for own in taken]
        numbers = {**self.numbers, "lr": self.rates[self.step].squeeze(0)}
        for group, own in zip(self.groups, taken):
            group.step(own, numbers, self.step + 1)

    def _group(self, grads: dict[str, Tensor]) -> None:
        """Lay the parameters of each dtype side by side."""
        params = {name: self.params[name] for name in grads}
        for dtype in dict.fromkeys(p.dtype for p in params.values()):
            own = {name: p for name, p in params.items() if p.dtype == dtype}
            self.groups.append(Stacked(own, grads, self.plan.optimizer, self.numbers))
            self.params.update(self.groups[-1].params)

    @torch.no_grad()
    def _validate(self, step: int) -> None:
        better = torch.tensor([self._judge(i, step, v) for i, v in enumerate(self._scores())])
        better = better.to(self.device)
        for name, t in self._state().items():
            column = better.view(-1, *[1] * (t.dim() - 1))
            self.kept[name] = torch.where(column, t, self.kept[name])

    def _judge(self, i: int, step: int, value: float) -> bool:
        """Note what a copy reached; say whether it is its best. NaN never is."""
        if step > self.last[i]:
            return False
        self.history[i].validation[step] = value
        if value < self.best[i] - self.plan.min_gain:
            self.best[i], self.best_step[i], self.bad[i] = value, step, 0
            return True
        self.bad[i] += 1
        if self.bad[i] >= self.plan.patience:
            self.last[i] = step
        return False

    def _scores(self) -> list[float]:
        def one(params: Any, buffers: Any, x: Tensor, y: Tensor) -> Tensor:
            with self.modes():
                return self.plan.score(self._call(params, buffers, x), y)

        own = len(self.validation) > 1
        many = torch.func.vmap(one, (0, 0, *(0 if own else None,) * 2))
        total = torch.zeros(len(self.seeds), dtype=torch.float64, device=self.device)
        rows = self._rows_at_once()
        with at_rest(self.model):
            for x, y in zip(*(t.split(rows, 1 if own else 0) for t in self.held)):
                with _explained(self.base):
                    total += many(self.params, self.buffers, x, y) * y.shape[1 if own else 0]
        return (total / len(self.validation[0])).tolist()

    def _rows_at_once(self) -> int:
        """Examples that all copies score together: on a GPU few launches, in a few GB."""
        if self.device.type == "cpu":
            return 256
        numbers = len(self.seeds) * max(self.x[0].numel(), self.y[0].numel())
        return min(max(2**26 // numbers, 256), 8192)

    def _call(self, params: Any, buffers: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.model, (params, buffers), (x,))


# -- the routers' part ----------------------------------------------------------------------------


class _Terms(list[Tensor]):
    """A `Recorder` of the weighted balance losses alone.

    `watch` would also record the load of every step.
    """

    collects = True

    def add(self, name: str, routing: Routing, terms: dict[str, Tensor]) -> None:
        self.extend(terms.values())


@contextmanager
def _balance(layers: list[MoE]) -> Iterator[_Terms]:
    terms = _Terms()
    for layer in layers:
        layer._watchers = (("", terms),)
    try:
        yield terms
    finally:
        for layer in layers:
            layer._watchers = ()


def build(
    make: Callable[[int], nn.Module], seed: int, device: torch.device | str | None
) -> nn.Module:
    with seeded(seed, device or "cpu"):
        model = make(seed)
    return model if device is None else model.to(device)


def _routed(model: nn.Module) -> list[MoE]:
    layers = [part for part in model.modules() if isinstance(part, MoE)]
    for layer in layers:
        if layer.backend not in ("auto", "dense"):
            raise ValueError(
                f'fit_many runs MoE layers with the dense backend: build them with backend="auto", '
                f"not {layer.backend!r}"
            )
    return layers


def _lay_out(
    data: list[TensorDataset], device: torch.device, join: Callable[..., Tensor] = torch.cat
) -> list[Tensor]:
    """Inputs and targets on the device; those of several data sets one after the other."""
    each = [[t.to(device) for t in d.tensors] for d in data]
    return each[0] if len(each) == 1 else [join(parts) for parts in zip(*each)]


def _stack(models: list[nn.Module]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    try:
        return torch.func.stack_module_state(models)
    except RuntimeError as error:
        raise ValueError(
            f"make must build the same model for every seed, only its numbers may differ: {error}"
        ) from None


@contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Say in one sentence that a model cannot be batched."""
    try:
        yield
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        reason = str(error).split(". ")[0].split("\n")[0]
        raise ValueError(
            f"{type(model).__name__} cannot be trained by fit_many ({reason}): it must not read "
            "values of tensors (if, item()) nor draw random numbers but by dropout, rand and randn"
        ) from error
