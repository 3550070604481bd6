"""`Router`: decides which experts work for which token.

A router writes `route`; the public call checks the input, works in fp32 outside autocast, keeps
padding out, lets grown experts join their families, and returns a `Routing`.

    router = moiety.build_router("top-k", dim=64, experts=8, k=2)
    routing = router(x_TD)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .families import Families
from .value import Routing, in_vmap, readable


@dataclass(frozen=True)
class Opt:
    """What an option of a router means and may be, written in the signature's annotation.

    `alt` is a value, other than the default, that must change something: `check_router` tries it,
    together with the options in `given` where the option says nothing without them.
    """

    doc: str
    alt: object = None
    low: float | None = None
    high: float | None = None
    choices: tuple | None = None
    given: dict[str, object] = field(default_factory=dict)
    optional: bool = False  # None is allowed though it is not the default

    def check(self, router: str, name: str, value: object, default: object = None) -> None:
        if value is None and (default is None or self.optional):
            return
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        if self.choices is not None and value not in self.choices:
            raise ValueError(f"{router}: {name} must be one of {list(self.choices)}, got {value!r}")
        if isinstance(default, bool) and not isinstance(value, bool):
            raise ValueError(f"{router}: {name} must be True or False, got {value!r}")
        if self.low is None and self.high is None:
            return
        wrong = not numeric or not math.isfinite(value)  # type: ignore[arg-type]
        wrong = wrong or (isinstance(self.low, int) and not isinstance(value, int))
        wrong = wrong or (self.low is not None and value < self.low)  # type: ignore[operator]
        wrong = wrong or (self.high is not None and value > self.high)  # type: ignore[operator]
        if wrong:
            kind = "a whole number" if isinstance(self.low, int) else "a number"
            upper = "" if self.high is None else f" and at most {self.high}"
            raise ValueError(
                f"{router}: {name} must be {kind}, at least {self.low}{upper}, got {value!r}"
            )


class Router(nn.Module):
    """Base of all routers.

    Attributes that a router declares, on its class or (where options decide) on itself:
        causal      a token's choice never depends on what later tokens hold
        stochastic  draws random numbers in training
        noisy       they are added to the scores, and the Routing tells the load loss about them
        static      the choice is the same for every token
        dense       every expert works for every token (growth then shifts logits)
        positional  in eval the choice depends on a token's place among the tokens of a call
        needs_ids   it cannot decide without token ids (the contract then gives it some)
        per_expert  names of parameters and buffers with a row for each expert, where there are any
    Instance attribute:
        weights_sum "one" (the weights of a real token sum to one), "at most one", or "free"
        options     what `build_router` was given, to build it again; None: not built by name
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    causal: bool = True
    stochastic: bool = False
    noisy: bool = False
    static: ClassVar[bool] = False
    dense: bool = False
    positional: ClassVar[bool] = False
    needs_ids: ClassVar[bool] = False
    per_expert: ClassVar[tuple[str, ...]] = ()

    weights_sum: Literal["one", "at most one", "free"] = "one"
    options: dict[str, Any] | None = None
    families: Families | None

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        for word, n in (("dim", dim), ("experts", experts)):
            if not isinstance(n, int) or n < 1:
                raise ValueError(f"{word} must be a whole number, at least 1, got {n!r}")
        self.dim = dim
        self.experts = experts  # the experts (after growth: families) that this router scores
        self.families = None

    # -- what a router writes ------------------------------------------------------------------

    def route(
        self, x_TD: Tensor, mask: Tensor | None, ids: Tensor | None, group: int | None
    ) -> Routing:
        """Decide. `x_TD` is fp32 (or float64), `group` the tokens that share a capacity."""
        raise NotImplementedError

    def default_balance(self) -> dict[str, float]:
        """Loss weights used by a layer that names none."""
        return {}

    def split(self, parents: list[int]) -> dict[str, list[int]] | None:
        """Score a copy of each parent expert from now on, keeping the layer's function.

        Returns, for each parameter that was replaced, the old row behind each new one (−1 for a
        row that is new), so that optimizer state can follow. `None` (every sparse router): copies
        join their parent's family instead. Parents are distinct.
        """
        return None

    def check_rows(self) -> None:
        """Raise unless rows can be copied."""
        if not self.per_expert or self.families is not None:
            why = "has grown by families already" if self.per_expert else "has no row for an expert"
            raise ValueError(f'{self.name} {why}: grow it with how="family"')

    def copy_rows(self, parents: list[int]) -> dict[str, list[int]]:
        """Copy the parents' rows as they are, as ALMA does; this changes the layer's function."""
        self.check_rows()
        return self._append_rows(parents)

    def _append_rows(self, parents: list[int]) -> dict[str, list[int]]:
        rows = [*range(self.experts), *parents]
        names = [n for n in self.per_expert if getattr(self, n, None) is not None]
        for name in names:
            old = getattr(self, name)
            new = old.data[rows]
            learned = isinstance(old, nn.Parameter)
            setattr(self, name, nn.Parameter(new, old.requires_grad) if learned else new)
        self.experts = len(rows)
        return {n: rows for n in names if isinstance(getattr(self, n), nn.Parameter)}

    def diagnostics(self) -> dict[str, object]:
        """Facts about the gate for a report: selected experts, binary or not, and the like."""
        return {}

    # -- what a user calls ---------------------------------------------------------------------

    @property
    def total(self) -> int:
        """The number of experts served, grown ones included."""
        return self.experts if self.families is None else self.families.total

    @property
    def slots_per_token(self) -> int:
        """The most experts that can work for one token."""
        return min(getattr(self, "k", None) or self.experts, self.experts)

    def forward(
        self,
        x_TD: Tensor,
        mask: Tensor | None = None,
        ids: Tensor | None = None,
        group: int | None = None,
    ) -> Routing:
        self._check_input(x_TD, mask, ids)
        # A half-precision softmax over experts loses the small differences that decide a tie and
        # that the balance losses are made of, so routing is never done below fp32.
        with torch.autocast(x_TD.device.type, enabled=False):
            x_TD = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
            if mask is not None:  # padding may hold anything, NaN too: select, never multiply
                x_TD = torch.where(mask[:, None], x_TD, 0.0)
            routing = self.route(x_TD, mask, ids, group)
            if not isinstance(routing, Routing):
                found = type(routing).__name__
                raise TypeError(f"{type(self).__name__}.route must return a Routing, got {found}")
            if self.families is not None:
                routing = self.families(routing, x_TD)
            return keep_real(routing, mask)

    def _check_input(self, x_TD: Tensor, mask: Tensor | None, ids: Tensor | None) -> None:
        if x_TD.dim() != 2 or x_TD.shape[1] != self.dim:
            raise ValueError(
                f"{self.name}: expected tokens of shape [T, {self.dim}], got {list(x_TD.shape)}"
            )
        for word, t in (("mask", mask), ("ids", ids)):
            if t is not None and (t.dim() != 1 or t.shape[0] != x_TD.shape[0]):
                raise ValueError(
                    f"{self.name}: {word} must have shape [{x_TD.shape[0]}], got {list(t.shape)}"
                )
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"{self.name}: mask must be bool (True = real token)")

    def check_scores(self, scores: Tensor) -> Tensor:
        """Raise on NaN or infinite scores where looking costs no wait.

        On a GPU, in compiled code and under vmap the check would make the host wait; there a NaN
        goes through to the output, where a loss shows it, and is never hidden.
        """
        if readable(scores) and not bool(torch.isfinite(scores).all()):
            raise ValueError(
                f"{self.name}: router scores are NaN or infinite; look at the layer's input "
                "and the router's weights (too large a learning rate is the usual cause)"
            )
        return scores

    def extra_repr(self) -> str:
        grown = "" if self.families is None else f", grown to {self.total}"
        return f"{self.name!r}, dim={self.dim}, experts={self.experts}{grown}"


class LinearRouter(Router):
    """A router whose scores are a bias-free linear map of the token."""

    per_expert: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__(dim, experts)
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.dim**-0.5)

    def scores(self, x_TD: Tensor) -> Tensor:
        return self.check_scores(F.linear(x_TD, self.weight.to(x_TD.dtype)))


def need_k(name: str, k: int, experts: int) -> None:
    """Raise unless k experts can be chosen."""
    if k > experts:
        raise ValueError(f"{name}: k = {k} experts a token, but there are only {experts}")


def top_k(scores_TE: Tensor, k: int) -> Tensor:
    """`[T, k]`: the experts with the largest scores; of equal ones, the lower id."""
    scores_TE = scores_TE.detach()
    if scores_TE.dtype == torch.float64 or in_vmap():  # torch 2.11 views no bits under vmap
        return torch.sort(scores_TE, dim=-1, descending=True, stable=True).indices[..., :k]
    # torch.topk breaks ties as it likes. Unique integer keys leave it no choice: the bits of a
    # float, read as an integer, order like the float once negative ones are flipped.
    experts = scores_TE.shape[-1]
    bits = (scores_TE + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = bits * experts - torch.arange(experts, device=scores_TE.device)
    return key.topk(k, dim=-1).indices


def keep_real(routing: Routing, mask: Tensor | None) -> Routing:
    """Take padding out of a decision: no slot, no load, no drop."""
    if mask is None:
        return routing
    if routing.by == "all":
        return routing.replace(mask=mask)
    real = mask[:, None].expand_as(routing.index) if routing.by == "token" else mask[routing.index]
    active = real if routing.active is None else routing.active & real
    dropped = None if routing.dropped is None else routing.dropped & real
    return routing.replace(active=active, dropped=dropped, mask=mask)


def masked_mean(values_T: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over real tokens along the first axis; zero where there are none."""
    if mask is None:
        return values_T.sum(0) / max(values_T.shape[0], 1)
    shape = (-1,) + (1,) * (values_T.dim() - 1)
    # `where`, not a product: a padding row may hold NaN.
    kept = torch.where(mask.view(shape), values_T, 0.0)
    return kept.sum(0) / mask.sum().clamp(min=1)


def recomputing() -> bool:
    """Whether this forward runs inside a backward: gradient checkpointing repeats it there."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1
