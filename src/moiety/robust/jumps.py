"""What happens at a routing boundary: how far the next change of choice is, and how large a gap.

    jumps = jump_sizes(layer, x)     # x [T, D]
    jumps.distance, jumps.gap        # [T] each

A smooth mixture has no gaps; a sparse one has, unless the experts on both sides agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..moe import MoE
from ..routing import Routing
from ..watch import watch
from .target import Target

Function = Callable[[Tensor], Tensor]
Scores = Callable[[Tensor], Tensor | None]  # None: the router keeps them to itself


@dataclass(frozen=True, eq=False)
class Jumps:
    """The next change of choice on each token's way."""

    distance: Tensor  # [T]; inf: no change within reach
    gap: Tensor  # [T]: || answer just after - answer just before ||; NaN where there is none

    @property
    def found(self) -> Tensor:
        """`[T]` bool: tokens with a boundary within reach."""
        return self.distance.isfinite()


def jump_sizes(
    layer: nn.Module,
    x_TD: Tensor,
    *,
    direction: Tensor | None = None,
    reach: float = 2.0,
    points: int = 64,
) -> Jumps:
    """Walk from each token to the nearest change of its chosen experts, and measure the gap there.

    layer      an `MoE`, each token routed as if alone (so without capacity), or a native block
    direction  [T, D]; None: the way on which the last chosen expert loses most of its lead, which
               for a linear router leads straight to the nearest boundary
    reach      how far to walk, in units of the token's norm
    points     looks on the way; a choice that changes and changes back between two is not seen

    The layer is asked in eval mode, so without noise, and left as it was found.
    """
    x_TD = x_TD.detach()
    answer, choose, scores = _views(layer)
    with Target(layer).at_rest(), torch.no_grad():
        if direction is None:
            direction = _downhill(scores, choose, x_TD)
        way = unit(direction, 1) * x_TD.norm(dim=1, keepdim=True) * reach
        low, high, found = _bracket(choose, x_TD, way, points)
        before, after = x_TD + low * way, x_TD + high * way
        gap = (answer(after) - answer(before)).norm(dim=1)
        distance = (before - x_TD).norm(dim=1)
        return Jumps(distance.where(found, torch.inf), gap.where(found, torch.nan))


def _bracket(
    choose: Function, x: Tensor, way: Tensor, points: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`[T, 1]` twice: the parts of the way just before and after a change; `[T]`: is there one."""
    first, low = choose(x), x.new_zeros(len(x), 1)
    high, found = torch.ones_like(low), torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for step in range(1, points + 1):
        here = torch.full_like(low, step / points)
        new = (choose(x + here * way) != first).any(1)
        low = torch.where((found | new)[:, None], low, here)
        high = torch.where((new & ~found)[:, None], here, high)
        found |= new
    # As many halvings as the type has bits: then nothing lies between the two.
    for _ in range(60 if x.dtype == torch.float64 else 30):
        middle = (low + high) / 2
        same = (choose(x + middle * way) == first).all(1, keepdim=True)
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    return low, high, found


def _views(layer: nn.Module) -> tuple[Function, Function, Scores]:
    """What a layer answers to tokens `[T, D]`, whom it chooses `[T, E]`, and its scores."""
    if isinstance(layer, MoE):
        moe = layer

        def answer(z: Tensor) -> Tensor:
            y = moe.experts(z, route_alone(moe, z), moe.backend)
            return y if moe.shared is None else y + moe.shared(z)

        return answer, lambda z: route_alone(moe, z).choice(), lambda z: route_alone(moe, z).scores

    def routing(z: Tensor) -> Any:
        with watch(layer, keep="all") as routes:
            layer(z[:, None])
        return routes[routes.layers[0]][0]

    return (
        lambda z: first_of(layer(z[:, None]))[:, 0],
        lambda z: routing(z).choice(),
        lambda z: routing(z).scores,
    )


def _downhill(scores: Scores, choose: Function, x: Tensor) -> Tensor:
    """Against the slope of (least chosen score - best other score); random where there is none."""
    chosen = choose(x)
    anyhow = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    with torch.enable_grad():
        at = x.clone().requires_grad_()
        found = scores(at)
        if found is None or not found.requires_grad or bool(chosen.all()):
            return anyhow
        found = found.expand(len(x), -1)
        lead = found.masked_fill(~chosen, torch.inf).amin(1) - found.masked_fill(
            chosen, -torch.inf
        ).amax(1)
        (slope,) = torch.autograd.grad(lead.where(lead.isfinite(), 0.0).sum(), at)
    useful = slope.isfinite().all(1) & slope.ne(0).any(1)
    return torch.where(useful[:, None], -slope, anyhow)


def route_alone(layer: MoE, z_TD: Tensor) -> Routing:
    """The router's decision for each token as if there were no other: nobody is dropped."""
    routing = layer.router(z_TD, None, None, 1)
    if routing.by == "expert":
        raise ValueError(
            f"in {layer.router.name!r} experts choose among the tokens of a batch: no token has a "
            "choice, and so a boundary, of its own"
        )
    return routing


def first_of(answer: Any) -> Tensor:
    """The states among what a block answers."""
    return answer[0] if isinstance(answer, (tuple, list)) else answer


def unit(v: Tensor, lead: int) -> Tensor:
    """v with norm one over all but the first axes; what is zero stays zero."""
    size = v.flatten(lead).norm(dim=-1).view(*v.shape[:lead], *[1] * (v.dim() - lead))
    return v / torch.where(size == 0, 1.0, size)
