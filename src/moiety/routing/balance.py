"""Losses on a routing decision. Definitions and numbers worked by hand: docs/losses.md.

Each is a function of one `Routing`, so of one layer and one call; none counts padding. A layer
multiplies them by its `balance={"name": weight}`, and `watch(...)` collects the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .base import masked_mean
from .value import Routing


def importance(r: Routing) -> Tensor:
    """Squared coefficient of variation of the summed gate of each expert (V-MoE; Shazeer (6))."""
    return _cv2(_mean_probs(r, "importance"))


def load(r: Routing) -> Tensor:
    """Squared coefficient of variation of the smooth load (V-MoE; Shazeer (8)–(11)).

    p_te = 1 − Φ((threshold_t − score_te) / σ): the chance that expert e is still among the chosen
    of token t when its noise alone is drawn anew. Defined only where noise was drawn: in eval, and
    for a router without noise, it is zero.
    """
    if r.threshold is None or r.noise_std is None or r.scores is None:
        return _zero(r)
    z_TE = (r.threshold[:, None] - r.scores) / r.noise_std
    return _cv2(masked_mean(torch.special.ndtr(-z_TE), r.mask))


def switch(r: Routing) -> Tensor:
    """E · Σ_e f_e P_e with f the share of all chosen slots (Switch Transformer (4)–(6)).

    For k = 1 it is the paper's; capacity does not change f, since f is what the router wanted.
    """
    share_E = r.demand().to(r.weight.dtype)
    share_E = share_E / share_E.sum().clamp(min=1)
    return _product(share_E, _mean_probs(r, "switch"))


def gshard(r: Routing) -> Tensor:
    """E · Σ_e f_e P_e with f the share of first choices (GShard, algorithm 1; V-MoE's variant)."""
    probs_TE = _probs(r, "gshard")
    first_T = _first_choice(r)
    one_TE = torch.zeros_like(probs_TE).scatter(1, first_T[:, None], 1.0)
    return _product(masked_mean(one_TE, r.mask), _mean_probs(r, "gshard"))


def z(r: Routing) -> Tensor:
    """Mean squared log-sum-exp of the scores (ST-MoE (5))."""
    if r.scores is None:
        raise ValueError("the z-loss needs router scores, and this router has none")
    return masked_mean(torch.logsumexp(r.scores, -1).square().expand(_rows(r)), _row_mask(r))


def entropy(r: Routing) -> Tensor:
    """DSelect-k's entropy of the selectors, Ω; low means sparse."""
    return _own(r, "entropy")


def reachability(r: Routing) -> Tensor:
    """DSelect-k's mass on codes that no expert has."""
    return _own(r, "reachability")


def sparsity(r: Routing) -> Tensor:
    """The Gumbel gate's Σ log p."""
    return _own(r, "sparsity")


LOSSES: dict[str, Callable[[Routing], Tensor]] = {
    f.__name__: f for f in (importance, load, switch, gshard, z, entropy, reachability, sparsity)
}


def check_weights(weights: dict[str, Any]) -> dict[str, Any]:
    """Raise on a loss that does not exist or a weight that is not a finite number."""
    if not isinstance(weights, dict):
        raise ValueError(f'balance must be weights by name, {{"switch": 0.01}}, got {weights!r}')
    for name, weight in weights.items():
        if name not in LOSSES:
            raise ValueError(f"no balance loss is named {name!r}; there are {', '.join(LOSSES)}")
        if not isinstance(weight, (int, float)) or not abs(weight) < float("inf"):
            raise ValueError(f"the weight of {name!r} must be a finite number, got {weight!r}")
    return dict(weights)


def terms(r: Routing, weights: Mapping[str, float | Tensor]) -> dict[str, Tensor]:
    """The weighted losses of one decision; a weight that is the number zero costs nothing."""
    used = {n: w for n, w in weights.items() if isinstance(w, Tensor) or w != 0}
    return {name: weight * LOSSES[name](r) for name, weight in used.items()}


def _probs(r: Routing, loss: str) -> Tensor:
    if r.probs is None:
        raise ValueError(f"the {loss} loss needs a gate distribution, and this router has none")
    return r.probs.expand(r.tokens, -1)


def _mean_probs(r: Routing, loss: str) -> Tensor:
    probs_TE = _probs(r, loss)
    # A gate that is not a distribution (sigmoid scores) is made one, as DeepSeek-V3 does.
    total = probs_TE.sum(-1, keepdim=True)
    return masked_mean(probs_TE / total.clamp(min=torch.finfo(probs_TE.dtype).tiny), r.mask)


def _product(share_E: Tensor, probs_E: Tensor) -> Tensor:
    return share_E.shape[0] * (share_E.detach() * probs_E).sum()


def _cv2(values_E: Tensor) -> Tensor:
    mean = values_E.mean()
    variance = (values_E - mean).square().mean()  # population variance
    return variance / mean.square().clamp(min=torch.finfo(values_E.dtype).tiny)


def _first_choice(r: Routing) -> Tensor:
    if r.by == "expert":
        return _probs(r, "gshard").argmax(-1)
    r = r.by_token()
    weight_TK = r.weight.detach().masked_fill(~r.chosen(), -1.0)
    return r.index.gather(1, weight_TK.argmax(1, keepdim=True)).squeeze(1)


def _own(r: Routing, name: str) -> Tensor:
    if name not in r.penalties:
        has = f"only {', '.join(r.penalties)}" if r.penalties else "no term of its own"
        raise ValueError(f"there is no {name} term to weigh: this router has {has}")
    return r.penalties[name]


def _zero(r: Routing) -> Tensor:
    return r.weight.new_zeros(())


def _rows(r: Routing) -> int:
    return r.tokens if r.scores is None else r.scores.shape[0]


def _row_mask(r: Routing) -> Tensor | None:
    return r.mask if _rows(r) == r.tokens else None
