"""Which gate makes the weights of a router's scores, found out from a decision.

    find_rule(routing, exact=True)      # Rule(gate="softmax", renormalise=True, scale=1.0)

The known gates are tried: the softmax or the sigmoid of the scores, or the scores as they are;
renormalised over the chosen experts or not; times a constant. Where none fits, there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .routing import Routing

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda scores_TE: scores_TE.softmax(-1),
    "sigmoid": torch.sigmoid,
    "as it is": lambda scores_TE: scores_TE,  # some routers give out probabilities
}


@dataclass(frozen=True)
class Rule:
    """How a block makes weights of its router's scores."""

    gate: str
    renormalise: bool
    scale: float


@torch.no_grad()
def find_rule(r: Routing, exact: bool) -> Rule | None:
    """The gate that explains the weights; `exact` where they were not rounded to half precision."""
    assert r.scores is not None
    tolerance, digits = (1e-4, 6) if exact else (2e-2, 3)
    used, fitting = r.used(), []
    weight = r.weight[used]
    for gate in GATES if weight.numel() else ():
        for renormalise in (False, True):
            trial = Routing.choose(r.index, GATES[gate](r.scores), renormalise=renormalise)
            base = trial.weight[used]
            ratio = (weight / base)[base.abs() > 1e-6]
            scale = float(f"{float(ratio.median()):.{digits}g}") if ratio.numel() else math.nan
            gap = float((base * scale - weight).abs().max() / weight.abs().max())
            if gap <= tolerance:  # not so where scale is NaN
                fitting.append((scale != 1.0, gap, Rule(gate, renormalise, scale)))
    return min(fitting, key=lambda f: f[:2])[2] if fitting else None


def tells(r: Routing) -> bool:
    """Whether a call tells gates apart: all gates explain one slot, or scores that are all zero."""
    assert r.scores is not None
    spread = r.scores.detach().amax(-1) - r.scores.detach().amin(-1)
    return r.index.numel() >= 8 and bool(spread.max() > 1e-3)
