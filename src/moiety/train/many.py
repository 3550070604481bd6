"""`fit_many`: train S copies of a model in one batched program, each as if it were alone.

fitted = fit_many(lambda seed: MLP(), train, seeds=range(32), epochs=10, lr=1e-3)
models = fitted.models()            # 32 plain modules
fitted.history[0].loss              # the curve of the first seed

Parameters and buffers are stacked along a first axis S and the model runs under `torch.func.vmap`;
`moiety.MoE` layers then run their `dense` backend. The plain loop with the same results is: build
the model inside `seeded(seed)`, take the batches in the order of `fit`, and call
`torch.manual_seed(step_seed(seed, step))` before each step (on a GPU dropout draws differently).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ..moe import MoE
from ..routing import Routing
from .draws import Draws
from .fit import _batches, _device, seeded
from .stacked import OPTIMIZERS, column

Numbers = float | Sequence[float]  # one for all copies, or one for each
Loss = Callable[[Tensor, Tensor], Tensor]
Schedule = Callable[[int], float]


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
class _Plan:
    """What all copies share."""

    train: TensorDataset
    steps: int
    batch: int
    loss: Loss
    optimizer: str
    validation: TensorDataset | None
    score: Loss
    every: int
    patience: float
    min_gain: float


def fit_many(
    make: Callable[[int], nn.Module],
    train: TensorDataset,
    *,
    seeds: Sequence[int],
    epochs: int | None = None,
    steps: int | None = None,
    batch: int = 64,
    lr: Numbers = 1e-3,
    loss: Loss = F.cross_entropy,
    optimizer: str = "adam",
    options: dict[str, Numbers] | None = None,
    weight_decay: Numbers = 0.0,
    schedule: Schedule | Sequence[Schedule] | None = None,
    clip: Numbers | None = None,
    validation: TensorDataset | None = None,
    score: Loss | None = None,
    every: int | None = None,
    patience: int | None = None,
    min_gain: float = 0.0,
    block: int | None = None,
    device: torch.device | str | None = None,
    on_step: Callable[[int], None] | None = None,
) -> ManyFitted:
    """Train one copy of the model per seed, all at once; the losses of routers are included.

    make          builds the model of a seed; it is called inside `seeded(seed)`
    seeds         each decides initialisation, order of the examples, dropout and routing noise;
                  a seed may occur again with other settings
    lr, weight_decay, clip, schedule and each of `options`: one for all, or a list with one for each
    loss          (output, target) -> scalar, of one copy
    optimizer     "adam", "adamw", "adagrad", "adadelta" or "sgd", as in torch.optim
    options       of the optimizer: beta1, beta2, eps; eps; rho, eps; momentum, nesterov (0 or 1)
    schedule      step, from 0 -> factor of the learning rate
    clip          the largest norm of a copy's own gradient
    validation    measured every `every` steps (an epoch) with `score` (the loss), a mean over
                  examples that is better when lower; each copy keeps its best weights
    patience      a copy stops after so many measurements that are not better by `min_gain`
    block         train so many copies at a time; the results are the same
    on_step       called after each step of a block with its number, from 1
    """
    seeds, count = list(seeds), len(seeds)
    per_epoch = math.ceil(len(train) / batch)
    plan = _Plan(
        train=train,
        steps=_steps(epochs, steps, per_epoch),
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        validation=validation,
        score=score or loss,
        every=every or per_epoch,
        patience=math.inf if patience is None else patience,
        min_gain=min_gain,
    )
    if validation is None and (patience is not None or score is not None or every is not None):
        raise ValueError("patience, score and every are about validation data: give validation")
    if validation is not None and len(validation) == 0:
        raise ValueError("validation is empty: give examples, or leave it out")
    if not seeds:
        raise ValueError("seeds is empty: give at least one seed")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    numbers = _numbers(optimizer, options or {}, count, weight_decay, clip)
    rates = _column_of("lr", lr, count) * _factors(schedule, plan.steps, count)
    blocks = []
    for ids in torch.arange(count).split(block or count):
        own = {name: t[ids] for name, t in numbers.items()}
        one = _Block(plan, make, [seeds[i] for i in ids], own, rates[:, ids], device)
        blocks.append(one.run(on_step))
    return ManyFitted(
        seeds,
        [h for b in blocks for h in b.history],
        [s for b in blocks for s in b.best_step],
        {n: torch.cat([b.state[n] for b in blocks]) for n in blocks[0].state},
        blocks[0].base,
    )


class _Block:
    """The copies that run in one program."""

    def __init__(
        self,
        plan: _Plan,
        make: Callable[[int], nn.Module],
        seeds: list[int],
        numbers: dict[str, Tensor],
        rates: Tensor,
        device: torch.device | str | None,
    ) -> None:
        self.plan, self.seeds = plan, seeds
        models = [_build(make, seed, device) for seed in seeds]
        self.base = models[0].train()
        self.device = _device(self.base)
        self.params, self.buffers = _stack(models)
        self.layers = _routed(self.base)
        self.numbers = {name: t.to(self.device) for name, t in numbers.items()}
        self.rates = rates.to(self.device)
        self.moments: dict[str, list[Tensor]] = {}
        self.copies = torch.arange(len(seeds), device=self.device)
        self.history = [History() for _ in seeds]
        self.best, self.best_step = [math.inf] * len(seeds), [0] * len(seeds)
        self.bad, self.last = [0] * len(seeds), [plan.steps] * len(seeds)
        self.kept = {name: t.detach().clone() for name, t in self._state().items()}

    def run(self, on_step: Callable[[int], None] | None) -> ManyFitted:
        plan = self.plan
        x, y = (t.to(self.device) for t in plan.train.tensors)
        epochs = math.ceil(plan.steps * plan.batch / len(y)) + 1
        orders = zip(*(_batches(len(y), plan.batch, epochs, seed) for seed in self.seeds))
        losses = []
        for step, chosen in zip(range(1, plan.steps + 1), orders):
            rows = torch.stack(chosen).to(self.device)
            losses.append(self._step(step, x[rows], y[rows]))
            if plan.validation is not None and (step % plan.every == 0 or step == plan.steps):
                self._validate(step, plan.validation)
            if on_step is not None:
                on_step(step)
            if all(last <= step for last in self.last):
                break
        for i, curve in enumerate(torch.stack(losses, 1).tolist()):  # read once: no wait a step
            self.history[i].loss = curve[: self.last[i]]
        if plan.validation is None:
            self.best_step, self.kept = [plan.steps] * len(self.seeds), self._state()
        kept = {name: t.detach() for name, t in self.kept.items()}
        return ManyFitted(self.seeds, self.history, self.best_step, kept, self.base)

    def _state(self) -> dict[str, Tensor]:
        return {**self.params, **self.buffers}

    def _step(self, step: int, x: Tensor, y: Tensor) -> Tensor:
        """One step of every copy; a copy that has stopped goes on, and nobody looks."""

        def one(params: Any, buffers: Any, copy: Tensor, x: Tensor, y: Tensor) -> Tensor:
            with Draws(self.seeds, step, copy), _balance(self.layers) as terms:
                loss = self.plan.loss(self._call(params, buffers, x), y)
                return sum(terms, loss)

        with _explained(self.base):
            losses = torch.func.vmap(one)(self.params, self.buffers, self.copies, x, y)
        learned = {name: p for name, p in self.params.items() if p.requires_grad}
        # The copies share no weight, so the gradient of the sum is each copy's own.
        grads = torch.autograd.grad(losses.sum(), list(learned.values()), allow_unused=True)
        self._update(step, {n: g for n, g in zip(learned, grads) if g is not None})
        return losses.detach()

    @torch.no_grad()
    def _update(self, step: int, grads: dict[str, Tensor]) -> None:
        _, moments, update = OPTIMIZERS[self.plan.optimizer]
        if "clip" in self.numbers:
            norm = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
            shrink = (self.numbers["clip"] / (norm + 1e-6)).clamp(max=1.0)
            grads = {name: g * column(shrink, g) for name, g in grads.items()}
        numbers = {**self.numbers, "lr": self.rates[step - 1]}
        for name, g in grads.items():
            p = self.params[name]
            if name not in self.moments:
                self.moments[name] = [torch.zeros_like(p) for _ in range(moments)]
            update(p, g, *self.moments[name], numbers, step)

    @torch.no_grad()
    def _validate(self, step: int, data: TensorDataset) -> None:
        better = torch.tensor([self._judge(i, step, v) for i, v in enumerate(self._scores(data))])
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

    def _scores(self, data: TensorDataset) -> list[float]:
        def one(params: Any, buffers: Any, x: Tensor, y: Tensor) -> Tensor:
            return self.plan.score(self._call(params, buffers, x), y)

        many = torch.func.vmap(one, (0, 0, None, None))
        total = torch.zeros(len(self.seeds), dtype=torch.float64, device=self.device)
        modes = {part: part.training for part in self.base.modules()}
        self.base.eval()
        for x, y in zip(*(t.to(self.device).split(256) for t in data.tensors)):
            with _explained(self.base):
                total += many(self.params, self.buffers, x, y) * len(y)
        for part, training in modes.items():
            part.training = training
        return (total / len(data)).tolist()

    def _call(self, params: Any, buffers: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.base, (params, buffers), (x,))


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


# -- what the caller gave -------------------------------------------------------------------------


def _steps(epochs: int | None, steps: int | None, per_epoch: int) -> int:
    if (epochs is None) == (steps is None):
        raise ValueError("give either steps or epochs")
    wanted = steps if steps is not None else (epochs or 0) * per_epoch
    if wanted < 1:
        raise ValueError("there is nothing to train: steps, epochs and the data must not be empty")
    return wanted


def _column_of(name: str, value: Numbers, count: int) -> Tensor:
    # float64: 1 - 0.999 in float32 is wrong in the fifth digit, where torch.optim is not.
    number_S = torch.as_tensor(value, dtype=torch.float64, device="cpu")
    if number_S.dim() == 0:
        return number_S.expand(count)
    if len(number_S) != count:
        raise ValueError(f"{name} has {len(number_S)} values for {count} seeds: give one for each")
    return number_S


def _numbers(
    optimizer: str, options: dict[str, Numbers], count: int, weight_decay: Numbers, clip: Any
) -> dict[str, Tensor]:
    defaults = OPTIMIZERS[optimizer][0]
    unknown = [name for name in options if name not in defaults]
    if unknown:
        raise ValueError(
            f"{optimizer} has no option {unknown[0]!r}; its options are {', '.join(defaults)}"
        )
    given: dict[str, Numbers] = {**defaults, **options, "weight_decay": weight_decay}
    if clip is not None:
        given["clip"] = clip
    numbers = {name: _column_of(name, value, count) for name, value in given.items()}
    if not numbers["weight_decay"].any():
        del numbers["weight_decay"]  # a pass over all parameters less
    return numbers


def _factors(schedule: Schedule | Sequence[Schedule] | None, steps: int, count: int) -> Tensor:
    """`[steps, S or 1]`: what the learning rates are multiplied with."""
    if schedule is None:
        return torch.ones(steps, 1, dtype=torch.float64)
    each = list(schedule) if isinstance(schedule, Sequence) else [schedule]
    if isinstance(schedule, Sequence) and len(each) != count:
        raise ValueError(f"schedule has {len(each)} values for {count} seeds: give one for each")
    rows = [[factor(step) for factor in each] for step in range(steps)]
    return torch.tensor(rows, dtype=torch.float64)


def _build(
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
