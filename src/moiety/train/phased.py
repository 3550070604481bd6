"""`Phased`: copies of a model that train phase after phase in one program, each as if alone.

    phased = Phased(models, x, y, Rules(optimizer="adadelta", lr=1.0, epochs=100, patience=25))
    ended = phased.phase(train_SN, held_SV, seeds)      # row numbers of each copy's own examples
    ended.steps, ended.best                             # by copy
    p_SNC = phased.probabilities(test_x)

A phase ends as that of `anytime.fitting.Fit` with the same seed does, to round-off: its batches and
random numbers (on a CPU; a GPU draws others), a fresh optimizer, a check after each epoch, the best
weights kept, and an end for each copy after `patience` checks without a gain.

What `fit_many` sets up for each call is set up once here and lasts: the examples lie on the device,
and a step is told row numbers. Who has stopped is known on the device alone (a copy that has goes
on, and nothing of it is kept), and the host asks now and then whether all have. So on a GPU a step
and a check are captured once as CUDA graphs and replayed in all phases. A batch that is not full is
filled up with the row -1, which weighs nothing; where examples of a batch see each other, as in
batch norm, there is a graph for each size instead.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ..moe import MoE
from .block import WARM, _balance, _explained, _routed, _stack
from .draws import ByCounter, ByGenerator, Draws
from .fit import _device
from .graph import Graph, capture
from .layers import HAVE_TRITON, LARGEST, pool_first
from .many import _column_of, _numbers
from .norms import Norms
from .stacked import OPTIMIZERS, Stacked

AHEAD = 16  # steps whose row numbers are sent at once
ASK = 4  # steps between two questions whether all copies have ended
OWN, SHARED = 2**11, 2**14  # examples that a copy answers at once on a GPU; 256 on a CPU


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How every phase trains; the words are those of `fit_many`."""

    optimizer: str = "adam"
    lr: float = 1e-3
    options: Mapping[str, float] = field(default_factory=dict)
    weight_decay: float = 0.0
    batch: int = 128
    epochs: int = 100  # at most, in a phase
    patience: int = 25  # checks without a gain, after which a copy stops
    min_gain: float = 0.001
    score: Literal["accuracy", "loss"] = "accuracy"  # what a check is about; a loss counts negative
    augment: Callable[[Tensor], Tensor] | None = None  # of the inputs of a copy's batch

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}"
            )
        if min(self.batch, self.epochs, self.patience) < 1:
            raise ValueError("batch, epochs and patience must be at least 1")


@dataclass(frozen=True)
class Ended:
    """How a phase ended, by copy."""

    steps: list[int]
    checks: list[int]
    best: list[float]  # score of the weights that were kept, larger is better


class Phased:
    """The copies; `models` start them, and stay as they are."""

    def __init__(
        self, models: Sequence[nn.Module], x: Tensor, y: Tensor, rules: Rules, *, graph: bool = True
    ) -> None:
        if not models:
            raise ValueError("there is nothing to train: give at least one model")
        self.rules, self.base = rules, models[0]
        self.device, copies = _device(self.base), len(models)
        self.x, self.y = x.to(self.device), y.to(self.device)
        self.params, self.buffers = _stack(list(models))
        self.model = pool_first(self.base)  # what runs, with the stacked parameters
        self.layers = _routed(self.model)
        alone = (_BatchNorm, MoE)  # whose examples see each other, or count in a balance loss
        self.fills = not any(isinstance(part, alone) for part in self.model.modules())
        numbers = _numbers(rules.optimizer, dict(rules.options), copies, rules.weight_decay, None)
        numbers["lr"] = _column_of("lr", rules.lr, copies)
        self.numbers = {name: t.to(self.device) for name, t in numbers.items()}
        self.groups: list[Stacked] = []
        self.live: list[Tensor] = []  # all that a copy is, and below it as it was at its best
        self.kept: list[Tensor] = []
        self.kernels = self.device.type == "cuda" and HAVE_TRITON
        self.modes: Any = Norms
        self.graphs: dict[tuple[str, int], Graph | None] = {}
        self.called: dict[tuple[str, int], int] = {}  # until a graph is captured
        self.captures = graph and self.kernels
        # There may be a graph for each of many sizes, and they run one after the other.
        self.pool = torch.cuda.graph_pool_handle() if self.captures else None
        self.seeds, self.now = [0] * copies, 0  # of the present phase, and its step
        # All that changes within a phase lies on the device, so that a graph finds it there.
        self.copies, self.seed_S, self.steps_S, self.checks_S, self.bad_S, self.most_S = (
            torch.arange(copies, device=self.device).repeat(6, 1).unbind()
        )
        self.step = torch.zeros(1, dtype=torch.long, device=self.device)
        self.best_S = torch.zeros(copies, dtype=torch.float64, device=self.device)
        self.going_S, self.broken_S = torch.zeros(
            2, copies, dtype=torch.bool, device=self.device
        ).unbind()
        self.patience = torch.zeros_like(self.step)

    # -- a phase ---------------------------------------------------------------------------------

    def phase(
        self,
        train_SN: Tensor,
        held_SV: Tensor,
        seeds: Sequence[int],
        *,
        every: int | None = None,
        checks: Sequence[int] | None = None,
        tick: Callable[[float], None] | None = None,
    ) -> Ended:
        """Train all copies, each on its own rows of the data, in the order that its seed gives.

        every    steps between two checks; an epoch where it is not given
        checks   how many each copy takes, neither more nor less: epochs and patience do not count
        tick     called now and then with the share of the steps that is done
        """
        size = train_SN.shape[1]
        if not size or not held_SV.shape[1]:
            raise ValueError("a phase needs examples to train on and examples for validation")
        per_epoch = math.ceil(size / self.rules.batch)
        every = every or per_epoch
        last = self.rules.epochs * per_epoch if checks is None else max(checks) * every
        self._begin(seeds, checks)
        held_SV, often = self._held(held_SV), max(ASK // every, 1)
        surely = self.rules.patience if checks is None else 0  # checks before any copy ends
        for step, rows_SB in zip(range(1, last + 1), self._batches(train_SN)):
            self._do("step", self._step, rows_SB, step)
            if step % every == 0 or step == last:
                self._do("check", self._check, held_SV, step)
                if (step // every) % often == 0:
                    if tick is not None:
                        tick(step / last)
                    # The only wait for the device.
                    if step // every > surely and not bool(self.going_S.any()):
                        break
        return self._end()

    def _begin(self, seeds: Sequence[int], checks: Sequence[int] | None) -> None:
        self.seeds = list(seeds)
        if len(self.seeds) != len(self.seed_S):
            raise ValueError(f"there are {len(self.seed_S)} copies and {len(self.seeds)} seeds")
        self.seed_S.copy_(torch.tensor([seed % 2**63 for seed in self.seeds]))
        for group in self.groups:
            group.reset()
        for counted in (self.step, self.steps_S, self.checks_S, self.bad_S, self.broken_S):
            counted.zero_()
        self.best_S.fill_(-math.inf)
        self.going_S.fill_(True)
        forever = 2**62
        self.patience.fill_(self.rules.patience if checks is None else forever)
        self.most_S.copy_(torch.tensor([forever] * len(self.seeds) if checks is None else checks))

    @torch.no_grad()
    def _end(self) -> Ended:
        for live, kept in zip(self.live, self.kept):
            live.copy_(kept)
        if bool(self.broken_S.any()):
            raise ValueError("the loss of a copy became infinite: lower lr")
        return Ended(self.steps_S.tolist(), self.checks_S.tolist(), self.best_S.tolist())

    def _batches(self, train_SN: Tensor) -> Iterator[Tensor]:
        """The rows of each batch, in the order of `fit`, without an end; few transfers."""
        generators = [torch.Generator().manual_seed(seed) for seed in self.seeds]
        size, batch = train_SN.shape[1], self.rules.batch
        epochs = max(AHEAD // math.ceil(size / batch), 1)
        empty = -size % batch if self.fills else 0
        train_SN = F.pad(train_SN, (0, empty), value=-1).to(self.device)
        while True:
            each = [torch.randperm(size, generator=g) for _ in range(epochs) for g in generators]
            order_ESN = torch.stack(each).view(epochs, len(generators), size)
            if self.device.type == "cuda":  # so that the host draws the next while these are used
                order_ESN = order_ESN.pin_memory().to(self.device, non_blocking=True)
            for order_SN in order_ESN:
                rows_SN = train_SN.gather(1, order_SN)
                if empty:
                    rows_SN = torch.cat([rows_SN, train_SN[:, size:]], 1)
                yield from rows_SN.split(batch, dim=1)

    def _held(self, held_SV: Tensor) -> Tensor:
        """The rows of validation, filled up to a size that few graphs serve."""
        size = held_SV.shape[1]
        unit = min(1 << (size - 1).bit_length(), self._at_once(OWN))
        return F.pad(held_SV, (0, -size % unit), value=-1).to(self.device)

    def _do(self, name: str, act: Callable[[Tensor], None], rows: Tensor, step: int) -> None:
        """Do a step or a check, captured if that is possible."""
        key = name, rows.shape[1]
        self.now = step
        if self.captures and key not in self.graphs:
            self.called[key] = self.called.get(key, 0) + 1
            if self.called[key] > WARM:
                self.graphs[key] = capture(act, rows, type(self.base).__name__, self.pool)
        graph = self.graphs.get(key)
        if graph is None:
            act(rows)
        else:
            graph.replay(rows)

    # -- what is captured ------------------------------------------------------------------------

    def _step(self, rows_SB: Tensor) -> None:
        """One step of every copy."""

        def one(params: Any, buffers: Any, copy: Tensor, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
            with self._draws(copy), self.modes(), _balance(self.layers) as terms:
                x = x if self.rules.augment is None else self.rules.augment(x)
                logits = self._call(params, buffers, x)
                return sum(terms, (F.cross_entropy(logits, y, reduction="none") * w).sum())

        self.model.train()
        x, y, real_SB = self._examples(rows_SB)
        weight_SB = real_SB.to(self.x.dtype) / real_SB.sum(1, keepdim=True)
        with _explained(self.base):
            many = torch.func.vmap(one)
            losses_S = many(self.params, self.buffers, self.copies, x, y, weight_SB)
        learned = {name: p for name, p in self.params.items() if p.requires_grad}
        # The copies share no weight, so the gradient of the sum is each copy's own.
        grads = torch.autograd.grad(losses_S.sum(), list(learned.values()), allow_unused=True)
        self._update({n: g for n, g in zip(learned, grads) if g is not None})
        self.broken_S |= self.going_S & ~losses_S.detach().isfinite()
        self.step += 1

    @torch.no_grad()
    def _update(self, grads: dict[str, Tensor]) -> None:
        if not self.groups:  # what no gradient reaches is not updated, and that is known now
            self._group(grads)
        for group in self.groups:
            group.step(group.take(grads), self.numbers, self.step + 1)

    def _group(self, grads: dict[str, Tensor]) -> None:
        """Lay the parameters of each dtype side by side, and make room for the best ones."""
        params = {name: self.params[name] for name in grads}
        for dtype in dict.fromkeys(p.dtype for p in params.values()):
            own = {name: p for name, p in params.items() if p.dtype == dtype}
            self.groups.append(Stacked(own, grads, self.rules.optimizer, self.numbers))
            self.params.update(self.groups[-1].params)
        self.live = [part[0].detach() for group in self.groups for part in group.parts]
        self.live += [*self.buffers.values()]
        self.kept = [t.clone() for t in self.live]

    @torch.no_grad()
    def _check(self, rows_SV: Tensor) -> None:
        """Score every copy on its validation examples, keep the better ones, let others end."""
        self.model.eval()
        total_S = torch.zeros_like(self.best_S)
        for rows in rows_SV.split(self._at_once(OWN), 1):
            x, y, real = self._examples(rows)
            with _explained(self.base):
                total_S += torch.func.vmap(self._score)(self.params, self.buffers, x, y, real)
        score_S = total_S / (rows_SV >= 0).sum(1)
        going_S = self.going_S
        better_S = going_S & (score_S > self.best_S + self.rules.min_gain)
        self.best_S.copy_(torch.where(better_S, score_S, self.best_S))
        self.bad_S.copy_((self.bad_S + 1).masked_fill(better_S, 0))
        self.checks_S += going_S
        self.steps_S.copy_(torch.where(going_S, self.step, self.steps_S))
        for live, kept in zip(self.live, self.kept):
            kept.copy_(torch.where(better_S.view(-1, *[1] * (live.dim() - 1)), live, kept))
        going_S &= (self.bad_S < self.patience) & (self.checks_S < self.most_S)

    def _score(self, params: Any, buffers: Any, x: Tensor, y: Tensor, real: Tensor) -> Tensor:
        """The sum over the examples of a copy."""
        with self.modes():
            logits = self._call(params, buffers, x)
        if self.rules.score == "accuracy":
            return ((logits.argmax(-1) == y) & real).sum()
        losses = F.cross_entropy(logits, y, reduction="none").double()
        return -losses.masked_fill(~real, 0.0).sum()

    def _examples(self, rows_SB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs and targets of these rows, and which of them are real."""
        rows = rows_SB.clamp(min=0).flatten()
        x, y = (t.index_select(0, rows).unflatten(0, rows_SB.shape) for t in (self.x, self.y))
        return x, y, rows_SB >= 0

    def _draws(self, copy: Tensor) -> Draws:
        if self.kernels:
            return ByCounter(self.seed_S, self.step, copy)
        return ByGenerator(self.seeds, self.now, copy)

    def _call(self, params: Any, buffers: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.model, (params, buffers), (x,))

    # -- what came of it -------------------------------------------------------------------------

    @torch.no_grad()
    def probabilities(self, x: Tensor) -> Tensor:
        """The answers `[S, N, C]` of all copies to the same inputs `[N, …]`."""

        def one(params: Any, buffers: Any, x: Tensor) -> Tensor:
            with self.modes():
                return self._call(params, buffers, x).softmax(-1)

        self.model.eval()
        many = torch.func.vmap(one, (0, 0, None))
        parts = x.to(self.device).split(self._at_once(SHARED))
        with _explained(self.base):
            return torch.cat([many(self.params, self.buffers, part) for part in parts], 1)

    def _at_once(self, most: int) -> int:
        """Examples that a copy answers at once: a power of two; kernels have a limit for images."""
        if self.device.type == "cpu":
            return 256
        channels = [p.shape[0] for p in self.base.parameters() if p.dim() == 4]
        if not channels:
            return most
        fits = (LARGEST - 1) // (max(channels) * self.x.shape[-1] * self.x.shape[-2])
        return min(most, 1 << max(fits.bit_length() - 1, 0))

    def state(self) -> dict[str, Any]:
        """All copies as they are between two phases; its tensors are the live ones."""
        return {"params": dict(self.params), "buffers": dict(self.buffers)}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""
        for mine, theirs in ((self.params, state["params"]), (self.buffers, state["buffers"])):
            for name, t in mine.items():
                t.copy_(theirs[name])

    @torch.no_grad()
    def write_to(self, models: Sequence[nn.Module]) -> None:
        """Copy the weights into plain models of the same structure, one for each copy."""
        for i, model in enumerate(models):
            for name, t in (*model.named_parameters(), *model.named_buffers()):
                t.copy_({**self.params, **self.buffers}[name][i])

    def models(self) -> list[nn.Module]:
        """The copies as plain models."""
        made = [copy.deepcopy(self.base) for _ in self.seeds]
        self.write_to(made)
        return made
