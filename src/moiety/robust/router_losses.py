"""What an attacker who sees the router makes large, one number per example.

router-margin  the chosen experts' scores fall below the next ones, so that routes change
overload       the tokens of an example crowd on one expert, so that a capacity drops them
overload-call  the same over all examples of a call, which share the capacity (batch threat model)
diversity      all work goes to few experts: minus the entropy of an example's mean gate
auxiliary      the model's balance losses with their training weights (Puigcerver et al., app. E)

    pgd(model, x, y, 8 / 255, loss={"ce": 1.0, "router-margin": 0.1})

Each is a mean over the real tokens of an example, then over the layers that can tell. Choices have
no gradient, so that margin, overload and diversity speak of the scores and gates behind them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from ..routing import Routing, balance
from ..routing.base import masked_mean
from ..watch import Routes
from .losses import loss
from .routes import by_example
from .target import Seen

BEYOND = 1.0  # how far below the next score a chosen one is pushed: past the boundary is enough
_SPLIT = ("index", "weight", "active", "dropped", "scores", "probs", "gate", "threshold",
          "noise_std", "mask")  # fmt: skip


@dataclass(frozen=True, eq=False)
class Anchored(Seen):
    """What was seen, beside the choices on the clean input."""

    anchors: Routes | None = None


@loss("router-margin", needs_routes=True)
def router_margin(seen: Seen, y: Tensor) -> Tensor:
    """Minus the mean over tokens of (lowest chosen score − highest other score).

    Where the target knows the choices of the clean input (`Anchored`), those are pushed out, up to
    `BEYOND` past the boundary; else the live choices, which leaves tokens at the boundary.
    """
    anchors = seen.anchors if isinstance(seen, Anchored) else None
    chosen = None if anchors is None else {name: iter(anchors[name]) for name in anchors.layers}

    def margin(r: Routing, name: str) -> Tensor | None:
        if not _of_tokens(r.scores, r) or _everyone(r):
            return None
        chosen_TE = wanted(r if chosen is None else next(chosen[name]))
        return -_margin(r.scores, chosen_TE).clamp(min=-BEYOND)

    return _mean(seen, "router-margin", "scores and experts that were not chosen", margin)


@loss("overload", needs_routes=True)
def overload(seen: Seen, y: Tensor) -> Tensor:
    """The mean gate, over an example's tokens, of the expert that most of them ask for."""
    return _overload(seen, "overload", together=False)


@loss("overload-call", needs_routes=True)
def overload_call(seen: Seen, y: Tensor) -> Tensor:
    """The mean gate, over an example's tokens, of the expert that most of the call ask for."""
    return _overload(seen, "overload-call", together=True)


@loss("diversity", needs_routes=True)
def diversity(seen: Seen, y: Tensor) -> Tensor:
    """Minus the entropy of the mean gate of an example's tokens, as a share of log E."""

    def collapse(p_BE: Tensor, r: Routing) -> Tensor:
        return -torch.special.entr(p_BE).sum(-1) / math.log(max(r.experts, 2))

    return _of_gates(seen, "diversity", collapse)


@loss("auxiliary", needs_routes=True)
def auxiliary(seen: Seen, y: Tensor) -> Tensor:
    """The weighted balance losses of each example's own tokens, summed over layers."""
    examples, out = len(seen.logits), []
    for r, name in _layers(seen, "auxiliary"):
        weights = seen.routes.balance.get(name) if seen.routes else None
        if weights:
            out.append(_terms(r, weights, examples, name))
    if not out:
        raise ValueError(
            'loss "auxiliary" needs a balance loss, and no moiety.MoE layer of this model has one: '
            "set balance= on the layers, or attack another loss"
        )
    return torch.stack(out).sum(0).to(seen.logits.dtype)


# -- the parts -----------------------------------------------------------------------------------


def wanted(r: Routing) -> Tensor:
    """`[T, E]` bool: the experts that a router chose, dropped ones included."""
    return r.replace(active=r.chosen() if r.by != "all" else r.active).choice()


def _everyone(r: Routing) -> bool:
    """Whether every real token chose every expert, dropped ones included."""
    if r.by != "token" or r.index.shape[1] < r.experts:
        return False
    if r.active is None:
        return True
    chosen_TK = r.chosen()  # a wait for the GPU, which only such wide choices cost
    return bool((chosen_TK if r.mask is None else chosen_TK | ~r.mask[:, None]).all())


def _margin(scores_TE: Tensor, chosen_TE: Tensor) -> Tensor:
    """`[T]`; zero for a token that chose nobody or everybody."""
    lowest_T = scores_TE.masked_fill(~chosen_TE, math.inf).amin(-1)
    next_T = scores_TE.masked_fill(chosen_TE, -math.inf).amax(-1)
    usable_T = chosen_TE.any(-1) & ~chosen_TE.all(-1)
    return torch.where(usable_T, lowest_T - next_T, 0.0)


def _overload(seen: Seen, loss: str, together: bool) -> Tensor:
    def mass(p_BE: Tensor, r: Routing) -> Tensor:
        asked_BE = by_example(wanted(r).long(), len(p_BE)).sum(1)
        if together:
            asked_BE = asked_BE.sum(0, keepdim=True).expand_as(asked_BE)
        # Of equally busy experts the one with the most mass: it is nearest to being crowded.
        busiest_B = (asked_BE + p_BE.detach() / 2).argmax(-1)
        return p_BE.gather(1, busiest_B[:, None])[:, 0]

    return _of_gates(seen, loss, mass)


def _of_gates(seen: Seen, loss: str, of: Callable[[Tensor, Routing], Tensor]) -> Tensor:
    """The mean over layers of a function of the examples' mean gates `[B, E]`."""
    out = []
    for r, name in _layers(seen, loss):
        gate = r.probs if r.probs is not None else r.gate
        if gate is None and r.scores is not None:
            gate = r.scores.softmax(-1)  # a native router whose gate is not known
        if not _of_tokens(gate, r):
            continue
        p_TE = gate / gate.sum(-1, keepdim=True).clamp(min=torch.finfo(gate.dtype).tiny)
        p_BE = _over_tokens(p_TE, r, len(seen.logits), name)
        out.append(of(p_BE, r))
    return _joined(out, seen, loss, "a gate")


def _mean(seen: Seen, loss: str, needs: str, of: Callable[[Routing, str], Tensor | None]) -> Tensor:
    """The mean over layers of a number per token."""
    out = []
    for r, name in _layers(seen, loss):
        value_T = of(r, name)
        if value_T is not None:
            out.append(_over_tokens(value_T, r, len(seen.logits), name))
    return _joined(out, seen, loss, needs)


def _joined(out: list[Tensor], seen: Seen, loss: str, needs: str) -> Tensor:
    if not out:
        raise ValueError(
            f'loss "{loss}" needs a router with {needs}, which no layer of this model has: attack '
            "another loss"
        )
    return torch.stack(out).mean(0).to(seen.logits.dtype)


def _of_tokens(values: Tensor | None, r: Routing) -> TypeGuard[Tensor]:
    """Whether there is a row for each token; a static router has one for all, which stays."""
    return values is not None and r.by != "all" and len(values) == r.tokens


def _layers(seen: Seen, loss: str) -> Iterator[tuple[Routing, str]]:
    if seen.routes is None or seen.routes.keep != "all":
        raise ValueError(f'loss "{loss}" needs the routes: Target(model, watch="all")')
    for name, record in seen.routes.records:
        if record.routing is not None:
            yield record.routing, name


def _over_tokens(values_T: Tensor, r: Routing, examples: int, name: str) -> Tensor:
    """`[B, …]`: the mean over each example's real tokens."""
    values_BL = by_example(values_T, examples, name)
    if r.mask is None:
        return values_BL.mean(1)
    return torch.vmap(masked_mean)(values_BL, by_example(r.mask, examples, name))


def _terms(r: Routing, weights: dict[str, float], examples: int, name: str) -> Tensor:
    """`[B]`: the weighted losses of each example's tokens alone.

    A router's own penalties (DSelect-k's entropy) are means over the call already: each example
    gets that mean, and so the sum over examples has the gradient of each example's own.
    """
    if r.by != "token":  # experts that choose, alone in a call; or a choice that no input changes
        return sum(balance.terms(r, weights).values(), r.weight.new_zeros(())).expand(examples)
    fields = {word: getattr(r, word) for word in _SPLIT}
    per_token = {
        word: by_example(t, examples, name)
        for word, t in fields.items()
        if isinstance(t, Tensor) and t.dim() and t.shape[0] == r.tokens
    }

    def one(part: dict[str, Tensor]) -> Tensor:
        routing = r.replace(**part, tokens=r.tokens // examples)
        return sum(balance.terms(routing, weights).values(), r.weight.new_zeros(()))

    return torch.vmap(one)(per_token)
