"""`Experts`: who does the work. E is the leading axis of every stacked parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..routing.value import Plan, Routing, in_vmap
from .dispatch import combine, dispatch
from .grouped import native


class Experts(nn.Module):
    """Base of all experts: three ways to do the same sum, chosen by a word.

    loop     one expert after the other in plain torch: the truth
    grouped  all experts in one grouped product
    dense    every expert on every token, masked: no sorting, so it runs under vmap
    """

    backends: ClassVar[tuple[str, ...]] = ("loop", "grouped", "dense")

    experts: int
    dim: int
    out_dim: int

    # -- what a kind of experts writes ---------------------------------------------------------

    def loop(self, rows: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the outputs of each expert for its rows `[n, D]`, first to last."""
        raise NotImplementedError

    def grouped(self, rows_ND: Tensor, plan: Plan) -> Tensor:
        """Outputs `[N, out_dim]` of rows sorted by expert."""
        raise NotImplementedError

    def dense(self, x_TD: Tensor, weight_TE: Tensor) -> Tensor:
        """Weighted sum over all experts."""
        raise NotImplementedError

    def answers(self, x_TD: Tensor, ids: Tensor | None = None, backend: str = "loop") -> Tensor:
        """`[U, T, out_dim]`: what these experts (ascending ids; None: all) answer to every token.

        Unweighted; parameters of the others get a gradient of zero. Experts that can only run one
        after the other do so whatever the backend.
        """
        chosen = set(range(self.experts) if ids is None else ids.tolist())
        rows = (x_TD if e in chosen else x_TD[:0] for e in range(self.experts))
        return torch.cat(list(self.loop(rows))).view(len(chosen), x_TD.shape[0], self.out_dim)

    def always(self, x_TD: Tensor) -> Tensor | None:
        """What every token gets besides its experts (a base that low-rank experts correct)."""
        return None

    def flops_per_row(self) -> list[float]:
        """Forward FLOPs (matrix products) of each expert for one token."""
        raise NotImplementedError

    def copy(self, parents: list[int]) -> dict[str, list[int] | str]:
        """Append a copy of each parent expert.

        Returns, for each parameter that was replaced, the old row behind each new row; for each
        that was added, the name of the one it is a copy of.
        """
        raise NotImplementedError

    # -- what a layer calls ----------------------------------------------------------------------

    def forward(self, x_TD: Tensor, routing: Routing, backend: str = "auto") -> Tensor:
        """`[T, out_dim]`: what the experts answer to a routing decision."""
        if routing.experts != self.experts:
            raise ValueError(
                f"the routing is for {routing.experts} experts, but there are {self.experts}"
            )
        if backend == "auto":
            backend, _ = self.choose(x_TD, routing)
        elif backend not in self.backends:
            raise ValueError(
                f"{type(self).__name__} has no backend {backend!r}; it has "
                f"{', '.join(('auto', *self.backends))}"
            )
        if backend == "dense":
            real_TD = x_TD
            if routing.mask is not None:  # a weight of zero would not keep NaN out of gradients
                real_TD = torch.where(routing.mask[:, None], x_TD, 0.0)
            y_TD = self.dense(real_TD, routing.dense().to(x_TD.dtype))
        else:
            plan = routing.plan()
            y_TD = combine(self.rows(x_TD, plan, backend), routing, plan)
        base_TD = self.always(x_TD)
        return y_TD if base_TD is None else base_TD + y_TD.to(base_TD.dtype)

    def rows(self, x_TD: Tensor, plan: Plan, backend: str) -> Tensor:
        """`[N, out_dim]`: the unweighted answers to a plan, by "loop" or "grouped"."""
        if backend == "loop":
            return self._one_by_one(x_TD, plan)
        return self.grouped(dispatch(x_TD, plan), plan)

    def _one_by_one(self, x_TD: Tensor, plan: Plan) -> Tensor:
        ends = [0, *plan.ends_E.tolist(), plan.rows]
        sizes = [end - start for start, end in pairwise(ends)]  # the last: rows of nobody
        if torch.is_grad_enabled():
            # One split has one concatenation as its gradient; E slices would make E full-size ones.
            *rows, nobody = dispatch(x_TD, plan).split(sizes)
            out = list(self.loop(rows))
            return torch.cat([*out, out[0].new_zeros(nobody.shape[0], self.out_dim)])
        # No graph to keep: an expert's rows are taken when its turn comes and stay in the cache.
        tokens = plan.token_N.split(sizes)[:-1]
        y_ND = None
        for start, y in zip(ends, self.loop(x_TD.index_select(0, t) for t in tokens), strict=False):
            if y_ND is None:
                y_ND = y.new_empty(plan.rows, self.out_dim)
            y_ND[start : start + y.shape[0]] = y
        assert y_ND is not None
        return y_ND

    def choose(self, x_TD: Tensor, routing: Routing) -> tuple[str, str]:
        """The backend that `auto` takes here, and why."""
        if in_vmap() or forward_ad._current_level >= 0:
            return "dense", "vmap and forward-mode AD need plain torch without sorting"
        return "loop", "these experts can only run one after the other"

    def flops(self, routing: Routing) -> float:
        """Active forward FLOPs of one decision: slots worked on times the cost of their expert."""
        load = routing.load().tolist()
        return sum(n * cost for n, cost in zip(load, self.flops_per_row(), strict=True))


class StackedExperts(Experts):
    """Experts whose parameters are stacks along E."""

    def stacks(self) -> tuple[Tensor, Tensor]:
        """The matrices `[E, out, in]` that a token meets, one after the other."""
        raise NotImplementedError

    def forward(self, x_TD: Tensor, routing: Routing, backend: str = "auto") -> Tensor:
        own = self.stacks()[0].dtype
        if x_TD.dtype != own and not torch.is_autocast_enabled(x_TD.device.type):
            names = [str(t).removeprefix("torch.") for t in (x_TD.dtype, own)]
            raise ValueError(
                f"the tokens are {names[0]} and the experts {names[1]}: cast one, or use autocast"
            )
        return super().forward(x_TD, routing, backend)

    def choose(self, x_TD: Tensor, routing: Routing) -> tuple[str, str]:
        if torch.compiler.is_compiling():
            return "grouped", "compiled code takes the grouped product"
        if in_vmap() or forward_ad._current_level >= 0:
            return "dense", "vmap and forward-mode AD need plain torch without sorting"
        first, second = self.stacks()
        why_not = native(active_dtype(x_TD), x_TD.device, *first.shape[1:], *second.shape[1:])
        if x_TD.device.type == "cpu":
            rows = routing.by_token().index.numel() / self.experts
            if why_not is not None:
                return "loop", f"on a CPU one expert after the other, since {why_not}"
            if rows * first.shape[1] >= LOOP_FROM:
                return "loop", "on a CPU large experts one after the other keep to the cache"
            return "grouped", "grouped_mm, one call for many small experts"
        if why_not is not None:
            return "grouped", f"our own grouped product, since {why_not}"
        return "grouped", "grouped_mm"

    def copy(self, parents: list[int]) -> dict[str, list[int] | str]:
        rows = [*range(self.experts), *parents]
        changed: dict[str, list[int] | str] = {}
        for name, p in list(self.named_parameters(recurse=False)):
            grown = nn.Parameter(p.data[rows], requires_grad=p.requires_grad)
            setattr(self, name, grown)
            changed[name] = rows
        self.experts = len(rows)
        return changed


# Hidden values (rows × width) of an average expert from which, on a CPU, one expert after the other
# is faster: a temporary for all of them at once costs more in page faults than E calls do.
LOOP_FROM = 2**16


def active_dtype(t: Tensor) -> torch.dtype:
    """The dtype matrix products run in: autocast's where it is on (grouped_mm does not ask)."""
    kind = t.device.type
    if torch.is_autocast_enabled(kind) and t.dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ):
        return torch.get_autocast_dtype(kind)
    return t.dtype
