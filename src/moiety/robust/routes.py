"""What an attack did to the routes: how many choices changed, and who worked on what.

    with moiety.watch(model, keep="choice") as clean:
        model(x)
    with moiety.watch(model, keep="choice") as attacked:
        model(x_adv)
    routing_change(clean, attacked, examples=len(x))       # {"blocks.1.moe": 0.17}

Puigcerver et al. 2022: of each token, A and B are the experts with a combine weight before and
after. IoU = |A ∩ B| / |A ∪ B|, 0 where the union is empty (dropped both times); its mean is taken
over the tokens of an example, then over examples; the routing change is 1 − mean IoU. So a layer
that drops tokens has a change above 0 even between two equal runs. Padding is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..record import choice_alone
from ..routing import Routing
from ..watch import Routes


def routing_change(before: Routes, after: Routes, examples: int = 1) -> dict[str, float]:
    """1 − mean IoU of the chosen experts, by layer, over a batch of this many examples.

    With padding, examples have different numbers of tokens, so that it matters how many there are.
    """
    changes = change_per_example(before, after, examples)
    return {name: float(change_B.nanmean()) for name, change_B in changes.items()}


@torch.no_grad()
def change_per_example(before: Routes, after: Routes, examples: int) -> dict[str, Tensor]:
    """`[B]` float64 for every layer that ran: 1 − mean IoU; NaN for an example without tokens."""
    if before.layers != after.layers:
        raise ValueError(
            f"routes of different models cannot be compared: {', '.join(before.layers)} and "
            f"{', '.join(after.layers)}"
        )
    out = {}
    for name in before.layers:
        olds, news = before[name], after[name]
        if len(olds) != len(news):
            raise ValueError(f"{name} was called {len(olds)} times before and {len(news)} after")
        pairs = [_sums(old, new, examples, name) for old, new in zip(olds, news)]
        if pairs:
            iou_B, tokens_B = (torch.stack(part).sum(0) for part in zip(*pairs))
            out[name] = 1 - iou_B / tokens_B
    return out


def _sums(old: Routing, new: Routing, examples: int, name: str) -> tuple[Tensor, Tensor]:
    """`[B]` each: the summed IoU of the real tokens of one call, and their number."""
    if (old.tokens, old.experts) != (new.tokens, new.experts):
        raise ValueError(
            f"{name} routed {old.tokens} tokens to {old.experts} experts before and {new.tokens} "
            f"to {new.experts} after"
        )
    a_TE, b_TE = old.dense() != 0, new.dense() != 0
    union_T = (a_TE | b_TE).sum(-1)
    iou_T = (a_TE & b_TE).sum(-1).double() / union_T.clamp(min=1)
    real_T = torch.ones_like(union_T, dtype=torch.bool)
    for mask_T in (old.mask, new.mask):
        real_T = real_T if mask_T is None else real_T & mask_T
    real_BL = by_example(real_T, examples, name)
    iou_BL = by_example(iou_T, examples, name)
    return (iou_BL * real_BL).sum(1), real_BL.sum(1)


def by_example(values_T: Tensor, examples: int, name: str = "a layer") -> Tensor:
    """`[T, …]` as `[B, L, …]`; tokens lie example by example."""
    if examples < 1 or values_T.shape[0] % examples:
        raise ValueError(
            f"{name} routed {values_T.shape[0]} tokens, which cannot be told apart by example in a "
            f"batch of {examples}: run one example a call"
        )
    return values_T.reshape(examples, values_T.shape[0] // examples, *values_T.shape[1:])


# -- who worked on what --------------------------------------------------------------------------


@dataclass
class Use:
    """What the experts of a layer did, as counts that add up over batches and processes."""

    load_E: Tensor  # slots worked on
    dropped: int = 0  # slots cut by a capacity limit; with expert choice: tokens nobody chose
    asked: int = 0  # slots chosen, dropped ones included; with expert choice: tokens

    def joined(self, others: Sequence[Use]) -> Use:
        return sum(others, self)

    def __add__(self, other: Use) -> Use:
        load_E = self.load_E + other.load_E
        return Use(load_E, self.dropped + other.dropped, self.asked + other.asked)

    def as_dict(self) -> dict[str, list[float] | float | list[int]]:
        """Load as shares, the share of dropped slots, and the experts that got nothing."""
        share_E = self.load_E.double() / self.load_E.sum().clamp(min=1)
        dead = (self.load_E == 0).nonzero().flatten().tolist()
        return {
            "load": share_E.tolist(),
            "dropped": self.dropped / max(self.asked, 1),
            "dead": dead,
        }


def use(routes: Routes) -> dict[str, Use]:
    """What every layer's experts did in all recorded calls."""
    out: dict[str, Use] = {}
    for name in routes.layers:
        for routing in routes[name]:
            now = _use(routing)
            out[name] = out[name] + now if name in out else now
    return out


def _use(r: Routing) -> Use:
    load_E = r.load().cpu()
    if r.by == "expert":
        served_T = r.choice().any(1)
        real_T = torch.ones_like(served_T) if r.mask is None else r.mask
        return Use(load_E, int((real_T & ~served_T).sum()), int(real_T.sum()))
    dropped = 0 if r.dropped is None else int(r.dropped.sum())
    return Use(load_E, dropped, int(r.chosen().sum()))


# -- some of the examples ------------------------------------------------------------------------


def take(routes: Routes, rows: Tensor, examples: int) -> Routes:
    """The routes of some examples of a batch, in the order of `rows`, to be replayed on those.

    Where experts choose among the tokens of all examples there is no such part, and it raises.
    """
    part = Routes(list(routes.layers), "choice")
    for name in routes.layers:
        for routing in routes[name]:
            part.add(name, _take(routing, rows, examples, name), {})
    return part


def _take(r: Routing, rows: Tensor, examples: int, name: str) -> Routing:
    if r.by == "expert" and examples > 1:
        raise ValueError(
            f"the experts of {name} chose among all {examples} examples of a call, whose routes "
            "cannot be taken apart: run one example a call"
        )
    if r.by == "expert":
        return r

    def pick(values_T: Tensor | None) -> Tensor | None:
        if values_T is None:
            return None
        return by_example(values_T, examples, name)[rows].flatten(0, 1)

    r = choice_alone(r)
    part = r.replace(mask=pick(r.mask), tokens=r.tokens // examples * len(rows))
    if r.by == "all":
        return part
    chosen = {word: pick(getattr(r, word)) for word in ("index", "weight", "active", "dropped")}
    return part.replace(**chosen)
