"""Firefly: a network that grows wider where it helps the most (Wu et al. 2020; digest 4, §3.5).

    learner = Firefly(lambda seed: MLP(64), every=1, seed=0)

At each growth every hidden layer gets candidates: a *split* of each unit into two, at ±v from it,
and new units. One pass over the data trains the candidates alone, another sums the gradient of
the loss by a gate on each; those whose gates most lower the loss stay, over all layers. The total
width grows as 1 + 0.6 t with the number t of the growth.

All candidates of all layers live at once in a wider copy of the model: a layer of h units has 2 h
(both halves of every split, weighing a half each) and the new ones. Batch norm keeps its statistics
meanwhile, and does nothing to new units.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...anytime.base import Learner, Phase

GROWTH = 0.6  # of the first width, at each growth
CANDIDATES = 70  # new units of a layer
SPLIT, NEW, OUT = 0.1, 0.01, 0.1  # starts: splits and incoming weights within ±, outgoing normal
PENALTY, PENALTY_NEW = 1e-2, 1e-4
WIDEST = 112  # channels of a layer: kernels for stacked images of 32 pixels have no room for 128

Weighted = nn.Linear | nn.Conv2d


class Firefly(Learner):
    """One model that widens its hidden layers; a growth changes its answers a little.

    every        phases between growths
    candidates   new units that are tried in each layer
    widest       units of a layer at most
    """

    options: ClassVar[tuple[str, ...]] = ("every", "candidates", "widest")

    def __init__(
        self,
        model: Callable[[int], nn.Module],
        *,
        every: int = 1,
        candidates: int = CANDIDATES,
        widest: int | None = None,
        **common: Any,
    ) -> None:
        self.every, self.candidates, self.growths = every, candidates, 0
        self.widest = widest
        super().__init__(model, **common)

    @property
    def exact(self) -> bool:
        return False

    def _grow(self, phase: Phase) -> dict[str, Any]:
        self.growths += 1
        widths = self.widths()
        ratio = (GROWTH * self.growths + 1) / (GROWTH * (self.growths - 1) + 1) - 1
        tried = Candidates(self.models[0], self.candidates)
        scores = tried.scores(self._batches(phase))
        rooms = [
            len(own) if self.widest is None else self.widest - w for own, w in zip(scores, widths)
        ]
        chosen = elites(scores, max(1, int(sum(widths) * ratio)), rooms)
        self.models[0] = tried.grown(chosen)
        self.carried[0] = None  # of an optimizer: it has the old shapes
        return {"units": [len(own) for own in chosen]}

    def widths(self) -> list[int]:
        """Units of each hidden layer."""
        return [len(layer.weight) for layer, _ in layers_of(self.models[0])[:-1]]

    def state(self) -> dict[str, Any]:
        return {**super().state(), "growths": self.growths, "widths": self.widths()}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.growths = state["growths"]

    def _rebuild(self, i: int, state: Mapping[str, Any]) -> nn.Module:
        return widened(self.build(i), state["widths"])

    def _batches(self, phase: Phase) -> list[tuple[Tensor, Tensor]]:
        """The examples of a phase, in batches of a random order."""
        data = phase.train.to(self.device)
        order = torch.randperm(len(data)).split(self.training.batch)
        return [(data.x[rows.to(self.device)], data.y[rows.to(self.device)]) for rows in order]


def layers_of(model: nn.Module) -> list[tuple[Weighted, nn.BatchNorm2d | None]]:
    """Layers with weights in order, with the norm that follows them; all but the last can grow."""
    found: list[tuple[Weighted, nn.BatchNorm2d | None]] = []
    for part in model.modules():
        if isinstance(part, Weighted):
            found.append((part, None))
        elif isinstance(part, nn.BatchNorm2d):
            found[-1] = found[-1][0], part
    return found


def elites(scores: list[Tensor], count: int, rooms: list[int]) -> list[list[int]]:
    """The candidates of each layer among those `count` whose gates lower the loss the most.

    A layer takes as many as it has room for.
    """
    owners = [(layer, unit) for layer, own in enumerate(scores) for unit in range(len(own))]
    chosen: list[list[int]] = [[] for _ in scores]
    for place in torch.cat(scores).argsort(stable=True).tolist():
        layer, unit = owners[place]
        if sum(map(len, chosen)) < count and len(chosen[layer]) < rooms[layer]:
            chosen[layer].append(unit)
    return [sorted(own) for own in chosen]


# -- candidates ------------------------------------------------------------------------------------


@dataclass
class Tried:
    """The candidates of one layer of h units, n of them new; gates `[h + n]`."""

    split: Tensor  # like the weight
    into: Tensor  # [n, …]: of the new units
    out: Tensor  # [next, n, …]: what the next layer makes of them
    gate: Tensor

    def learned(self) -> list[Tensor]:
        return [self.split, self.into, self.out]


class Candidates:
    """All candidates of a model, and the wider model in which they live."""

    def __init__(self, model: nn.Module, count: int) -> None:
        self.model, self.count = model, count
        self.layers = layers_of(model)
        self.tried = [self._try(i) for i in range(len(self.layers) - 1)]
        self.wide = widened(model, [2 * self._width(i) + count for i in range(len(self.tried))])

    def _width(self, i: int) -> int:
        return self.layers[i][0].weight.shape[0]

    def _columns(self, i: int) -> int:
        """Columns of the next layer for each unit of this one: more where images are flattened."""
        return self.layers[i + 1][0].weight.shape[1] // self._width(i)

    def _try(self, i: int) -> Tried:
        weight, following = (self.layers[k][0].weight.detach() for k in (i, i + 1))
        new = weight.new_empty(self.count, *weight.shape[1:]).uniform_(-NEW, NEW)
        shape = (len(following), self.count * self._columns(i), *following.shape[2:])
        out = weight.new_empty(shape).normal_(std=OUT)
        split = torch.empty_like(weight).uniform_(-SPLIT, SPLIT)
        gate = weight.new_ones(len(weight) + self.count)
        return Tried(*(t.requires_grad_() for t in (split, new, out, gate)))

    # -- training and scoring --------------------------------------------------------------------

    def scores(self, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The gradient of the loss by the gate of each candidate, after a pass of training them."""
        learned = [t for own in self.tried for t in own.learned()]
        optimizer = torch.optim.RMSprop(learned, lr=1e-3, momentum=0.1, alpha=0.9)
        with torch.enable_grad():
            for x, y in batches:
                loss = self._loss(x, y) + self._penalty()
                for t, g in zip(learned, torch.autograd.grad(loss, learned), strict=True):
                    t.grad = g
                optimizer.step()
            gates = [own.gate for own in self.tried]
            totals = [torch.zeros_like(gate) for gate in gates]
            for x, y in batches:
                for total, g in zip(totals, torch.autograd.grad(self._loss(x, y), gates)):
                    total += g
        return totals

    def _penalty(self) -> Tensor:
        terms = [
            PENALTY * own.split.square().sum()
            + PENALTY_NEW * (own.into.square().sum() + own.out.square().sum())
            for own in self.tried
        ]
        return torch.stack(terms).sum()

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.wide.eval()
        return F.cross_entropy(torch.func.functional_call(self.wide, self.weights(), (x,)), y)

    def weights(self) -> dict[str, Tensor]:
        """The weights of the wider model with every candidate in it, each at its gate."""
        every = [list(range(len(own.gate))) for own in self.tried]
        names = {id(part): name for name, part in self.wide.named_modules()}
        state: dict[str, Tensor] = {}
        parts = zip(layers_of(self.wide), self._composed(every), strict=True)
        for (layer, norm), made in parts:
            for part in (layer, norm) if norm is not None else (layer,):
                own = made["layer"] if part is layer else made["norm"]
                state |= {f"{names[id(part)]}.{word}": t for word, t in own.items()}
        return state

    # -- weights from candidates -----------------------------------------------------------------

    def grown(self, chosen: list[list[int]]) -> nn.Module:
        """The model with the chosen candidates, as a plain model of its own."""
        made = list(self._composed(chosen))
        model = widened(self.model, [len(one["layer"]["bias"]) for one in made[:-1]])
        with torch.no_grad():
            for (layer, norm), one in zip(layers_of(model), made, strict=True):
                for part, own in ((layer, one["layer"]), (norm, one.get("norm", {}))):
                    for word, t in own.items():
                        getattr(part, word).copy_(t.detach())
        return model.eval()

    def _composed(self, chosen: list[list[int]]) -> Iterator[dict[str, dict[str, Tensor]]]:
        """Weights of each layer: its units, the other halves of those that split, new units."""
        before: tuple[list[int], list[int]] = [], []  # of the layer before: split, and new
        for i, (layer, norm) in enumerate(self.layers):
            mine, height = chosen[i] if i < len(self.tried) else [], len(layer.weight)
            split = [unit for unit in mine if unit < height]
            new = [unit - height for unit in mine if unit >= height]
            weight = self._columned(i, layer.weight.detach(), *before)
            assert layer.bias is not None
            bias = layer.bias.detach()
            if mine:
                weight = self._rowed(i, weight, split, new, *before)
                bias = torch.cat([bias, bias[split], bias.new_zeros(len(new))])
            made = {"layer": {"weight": weight, "bias": bias}}
            if norm is not None:
                made["norm"] = _normed(norm, split, len(new))
            yield made
            before = split, new

    def _rowed(
        self,
        i: int,
        weight: Tensor,
        split: list[int],
        new: list[int],
        split_before: list[int],
        _: list[int],
    ) -> Tensor:
        """The rows of a layer: units, of which some are moved by +v, their halves at -v, new ones.

        Neither a direction nor a new unit sees the new units of the layer before.
        """
        own, ones = self.tried[i], [1] * (weight.dim() - 1)
        gate = own.gate[: len(weight)].view(-1, *ones)
        v, into = (
            self._columned(i, t, split_before, []) for t in (own.split * gate, own.into[new])
        )
        v, into = (
            torch.cat([t, t.new_zeros(len(t), weight.shape[1] - t.shape[1], *t.shape[2:])], 1)
            for t in (v, into)
        )
        moves = weight.new_zeros(len(weight))
        moves[split] = 1.0
        return torch.cat([weight + v * moves.view(-1, *ones), weight[split] - v[split], into])

    def _columned(self, i: int, weight: Tensor, split: list[int], new: list[int]) -> Tensor:
        """The columns of a layer for the units of the one before: halves of those that split, and
        what it makes of new ones, at their gates."""
        if i == 0:
            return weight
        each, own = self._columns(i - 1), self.tried[i - 1]
        by_unit = weight.unflatten(1, (-1, each))
        share = by_unit.new_ones(by_unit.shape[1])
        share[split] = 0.5
        by_unit = by_unit * share.view(1, -1, *[1] * (by_unit.dim() - 2))
        parts = [by_unit, by_unit[:, split]]
        if new:
            gate = own.gate[self._width(i - 1) :][new]
            out = own.out.unflatten(1, (-1, each))[:, new]
            parts.append(out * gate.view(1, -1, *[1] * (out.dim() - 2)))
        return torch.cat(parts, 1).flatten(1, 2)


def _normed(norm: nn.BatchNorm2d, split: list[int], new: int) -> dict[str, Tensor]:
    """The state of a norm for units, halves and new ones, which it leaves as they are."""
    words = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}
    found = {}
    for word, level in words.items():
        t = getattr(norm, word).detach()
        found[word] = torch.cat([t, t[split], t.new_full((new,), level)])
    return found


# -- models of several widths ----------------------------------------------------------------------


def widened(model: nn.Module, widths: list[int]) -> nn.Module:
    """A copy with so many units in each hidden layer, and weights of zero."""
    wide, units = copy.deepcopy(model), 0
    for i, (layer, norm) in enumerate(layers_of(wide)):
        height, columns = layer.weight.shape[:2]
        rows = widths[i] if i < len(widths) else height
        columns = widths[i - 1] * (columns // units) if i else columns
        layer.weight = nn.Parameter(
            layer.weight.new_zeros(rows, columns, *layer.weight.shape[2:], requires_grad=False)
        )
        layer.bias = nn.Parameter(layer.weight.detach().new_zeros(rows))
        if isinstance(layer, nn.Linear):  # by its sizes FLOPs are counted and told apart
            layer.out_features, layer.in_features = rows, columns
        else:
            layer.out_channels, layer.in_channels = rows, columns
        if norm is not None:
            zeros = torch.zeros_like(layer.bias.detach())
            norm.num_features = rows
            norm.weight, norm.bias = (nn.Parameter(zeros.clone()) for _ in range(2))
            norm.running_mean, norm.running_var = zeros.clone(), zeros + 1
        units = height
    return wide


def padded(models: list[nn.Module], unit: int = 1) -> list[nn.Module]:
    """Copies of one structure, so that they train in one program.

    The units that are added see nothing and are not seen: all their weights are zero, and so are
    the gradients of these, through batch norm too, so that the other weights train as they would.

    unit   widths that differ become multiples of it
    """
    heights = [[len(layer.weight) for layer, _ in layers_of(model)[:-1]] for model in models]
    if len({*chain(*heights)}) == 1:
        unit = 1
    widths = [-(-max(each) // unit) * unit for each in zip(*heights)]
    wide = [widened(model, widths) for model in models]
    for model, twin in zip(models, wide):
        _copy(model, twin, back=False)
    return wide


def unit_of(model: nn.Module) -> int:
    """In which steps the layers of a model that was not grown yet should be padded.

    On a GPU each pair of widths is a kernel to compile, which takes a second: so there are few.
    """
    first = layers_of(model)[0][0]
    if isinstance(first, nn.Linear):  # its kernels are there
        return 1
    return WIDEST // 4 if first.out_channels <= 16 else WIDEST // 2


def cut_back(model: nn.Module, twin: nn.Module) -> None:
    """Give a model the weights that its padded twin has for its units."""
    _copy(model, twin, back=True)


@torch.no_grad()
def _copy(model: nn.Module, twin: nn.Module, *, back: bool) -> None:
    wide = twin.state_dict()
    for name, t in model.state_dict().items():
        part = wide[name][tuple(slice(size) for size in t.shape)]
        _ = t.copy_(part) if back else part.copy_(t)
