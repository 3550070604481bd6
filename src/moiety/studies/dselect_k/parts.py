"""What the studies on data sets share: embedded columns, dense experts, how a copy is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ...experts import Experts
from ...lab.study import Metrics, Running
from ...modes import at_rest
from .common import Done, draw_curve, gate_facts, on_page

USED = "experts used"
Tested = Callable[[dict[str, Tensor], Tensor], Metrics]  # outputs by task, packed targets


class Embed(nn.Module):
    """Rows `[B, numbers + categories]` -> `[B, dim]`: numbers as they are, ids embedded.

    One table holds all columns, so that a row is one look-up. It starts in ±0.05, as in Keras,
    with which the paper was made.
    """

    first: Tensor

    def __init__(self, cardinalities: Sequence[int], width: int, numbers: int = 0) -> None:
        super().__init__()
        self.numbers, self.categories = numbers, len(cardinalities)
        self.dim = numbers + width * self.categories
        self.table = nn.Embedding(sum(cardinalities), width)
        nn.init.uniform_(self.table.weight, -0.05, 0.05)
        starts = torch.tensor([0, *cardinalities[:-1]]).cumsum(0)
        self.register_buffer("first", starts)

    def forward(self, x: Tensor) -> Tensor:
        numbers, ids = x.split([self.numbers, self.categories], 1)
        embedded = self.table(ids.long() + self.first).flatten(1)
        return torch.cat([numbers.to(embedded.dtype), embedded], 1)


class Layers(Experts):
    """E experts, each Dense(width, ReLU) with dropout, as one stack of weights."""

    backends: ClassVar[tuple[str, ...]] = ("loop", "dense")

    def __init__(self, experts: int, dim: int, width: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.experts, self.dim, self.out_dim, self.dropout = experts, dim, width, dropout
        bound = dim**-0.5  # as `nn.Linear` starts
        self.weight = nn.Parameter(torch.empty(experts, width, dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(experts, width).uniform_(-bound, bound))

    def _finish(self, y: Tensor) -> Tensor:
        return F.dropout(y.relu(), self.dropout, self.training) if self.dropout else y.relu()

    def loop(self, rows: Iterable[Tensor]) -> Iterator[Tensor]:
        for x, weight, bias in zip(rows, self.weight.unbind(), self.bias.unbind(), strict=True):
            yield self._finish(F.linear(x, weight, bias))

    def answers(self, x_TD: Tensor, ids: Tensor | None = None, backend: str = "loop") -> Tensor:
        if backend != "dense" or ids is not None:
            return super().answers(x_TD, ids, backend)
        y_ETF = torch.einsum("td,efd->etf", x_TD, self.weight)
        return self._finish(y_ETF + self.bias[:, None])

    def dense(self, x_TD: Tensor, weight_TE: Tensor) -> Tensor:
        return torch.einsum("etf,te->tf", self.answers(x_TD, None, "dense"), weight_TE)

    def flops_per_row(self) -> list[float]:
        return [2.0 * self.dim * self.out_dim] * self.experts


def bottom(dim: int, width: int, dropout: float = 0.0) -> nn.Sequential:
    """One such layer, for models without experts."""
    return nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Dropout(dropout))


@torch.no_grad()
def predict(model: nn.Module, x: Tensor, batch: int = 8192) -> dict[str, Tensor]:
    """The outputs by task, in eval mode, for more examples than may fit at once."""
    device = next(model.parameters()).device
    with at_rest(model):
        parts = [model(rows.to(device)) for rows in x.split(batch)]
    return {task: torch.cat([part[task] for part in parts]) for task in parts[0]}


def finish(
    run: Running,
    one: Done,
    validation: TensorDataset,
    test: TensorDataset,
    tested: Tested,
    *,
    first: bool,
    shown: Callable[[float], float] = float,
) -> Metrics:
    """Write the curve and facts of a copy; give the experts used and what `tested` says.

    In a search the test set is left alone. first: of its block, whose gates the page shows as they
    moved.
    """
    draw_curve(run, one, shown)
    if one.lost:
        return {}
    page, some = on_page(run), validation.tensors[0][:256]
    run.extra |= gate_facts(run.settings, one.model, some, page=page, course=first)
    found = {USED: run.extra.get("selected")}
    if not page:
        return found
    x, y = test.tensors
    outputs = predict(one.model, x)
    y = y.to(next(iter(outputs.values())).device)
    return {**found, **tested(outputs, y)}
