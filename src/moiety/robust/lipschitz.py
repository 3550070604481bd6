"""How fast an answer can change: local Lipschitz constants, Lemma 1's bound, whole models.

    local_lipschitz(f, x)            # [B]: ||J|| at each example, from below
    layer_bound(layer, x)            # Lemma 1: what experts and what the router contribute
    measure_lipschitz(Target(model), x)      # end to end, and each MoE layer: JSON-able

All norms are Euclidean. A sparse layer is smooth between the boundaries of its routing, where the
first two speak of it, and jumps at them (`jumps`). Puigcerver et al. 2022, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..moe import MoE
from ..native import blocks
from .jumps import Function, first_of, jump_sizes, route_alone, unit
from .target import Target

NUDGE = 1e-4  # of the size of x: how far from a kink without slope its neighbour is looked at


# -- local constants -------------------------------------------------------------------------------


def local_lipschitz(
    f: Function, x: Tensor, *, iterations: int = 30, lead: int = 1, seed: int = 0
) -> Tensor:
    """Estimate the spectral norm of the Jacobian of `f` at each example, by power iteration.

    f      answers each example by itself (rows of a batch, as a model in eval mode does)
    lead   axes of x that count examples: 2 for tokens [B, L, D]
    seed   of the first directions; no other random number is drawn

    Returns [B] (the first `lead` axes). An estimate is never too large, and the more iterations the
    closer. Where `f` has no slope (NaN, as of a norm at 0), that of a point nearby is taken.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    draw = torch.Generator().manual_seed(seed)
    start = unit(torch.randn(x.shape, generator=draw).to(x), lead)
    x = x.detach()
    # The fused kernels of attention know no forward-mode derivative, nor a second one.
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        found = _power_iteration(f, x, start, iterations, lead)
        if not bool(found.isfinite().all()):
            near = x + NUDGE * _size(x, lead).clamp(min=1.0) * start
            there = _power_iteration(f, near, start, iterations, lead)
            found = torch.where(found.isfinite(), found, there)
    return found


def _power_iteration(f: Function, x: Tensor, v: Tensor, iterations: int, lead: int) -> Tensor:
    at = x.clone().requires_grad_()
    y = f(at)
    best = x.new_zeros(x.shape[:lead], dtype=y.dtype)
    if not y.requires_grad:  # a constant
        return best
    for _ in range(iterations):
        u = _push(f, x, v).to(y.dtype)
        best = torch.maximum(best, _size(u, lead).view(best.shape))
        (v,) = torch.autograd.grad(y, at, unit(u, lead), retain_graph=True)
        v = unit(v, lead)
    return best


def _push(f: Function, x: Tensor, v: Tensor) -> Tensor:
    """J v, forward; where an operation has no forward derivative, by differentiating u -> J'u."""
    try:
        return torch.func.jvp(f, (x,), (v,))[1].detach()
    except (NotImplementedError, RuntimeError):
        at = x.clone().requires_grad_()
        y = f(at)
        u = torch.zeros_like(y, requires_grad=True)
        (pulled,) = torch.autograd.grad(y, at, u, create_graph=True)
        return torch.autograd.grad(pulled, u, v)[0]


def jacobian_norm(f: Function, x: Tensor) -> Tensor:
    """`[B]`: exact spectral norms, by as many backward passes as an answer has numbers."""
    with torch.enable_grad():
        at = x.detach().clone().requires_grad_()
        y = f(at).flatten(1)
        if not y.requires_grad:  # a constant
            return x.new_zeros(len(x))
        rows = [torch.autograd.grad(o.sum(), at, retain_graph=True)[0] for o in y.unbind(1)]
    return torch.linalg.matrix_norm(torch.stack(rows, 1).flatten(2), ord=2)


def _size(v: Tensor, lead: int) -> Tensor:
    """Norms over all but the first axes, which stay, so that it divides v."""
    return v.flatten(lead).norm(dim=-1).view(*v.shape[:lead], *[1] * (v.dim() - lead))


# -- Lemma 1 ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Bound:
    """The two terms of Lemma 1 (7) for each token; their sum bounds the slope there."""

    experts: Tensor  # [T]: sum_i p_i L_i, with L_i the slope of expert i at the token
    router: Tensor  # [T]: || sum_i f_i grad p_i ||

    @property
    def total(self) -> Tensor:
        return self.experts + self.router


def smooth_bound(
    gate: Function, experts: Function, x_TD: Tensor, *, iterations: int | None = None
) -> Bound:
    """Lemma 1 at each token, for a gate `[T, D] -> [T, E]` and experts `[T, D] -> [T, E, O]`.

    iterations   None: exact norms; a number: those of `local_lipschitz`, for wide layers, which
                 come from below, so that the sum may miss a bound by what they lack
    """
    norm = _norm(iterations)
    with torch.no_grad():
        p_TE, answers_TEO = gate(x_TD), experts(x_TD)
    count = p_TE.shape[1]
    slopes = [norm(lambda z, i=i: experts(z)[:, i], x_TD) for i in range(count)]  # type: ignore[misc]
    of_router = norm(lambda z: torch.einsum("te,teo->to", gate(z), answers_TEO), x_TD)
    return Bound((p_TE.abs() * torch.stack(slopes, 1)).sum(1), of_router)


def layer_bound(layer: MoE, x_TD: Tensor, *, iterations: int | None = None) -> Bound:
    """Lemma 1 for an MoE layer; shared experts count among the experts.

    Of a sparse layer it bounds the slope between the boundaries, not the jumps at them. The layer
    is asked in eval mode, so without noise, and left as it was found.
    """
    with Target(layer).at_rest():
        bound = smooth_bound(
            lambda z: route_alone(layer, z).dense().to(z.dtype),
            lambda z: layer.experts.answers(z).transpose(0, 1),
            x_TD,
            iterations=iterations,
        )
        besides = _norm(iterations)(lambda z: _besides(layer, z), x_TD)
    return Bound(bound.experts + besides, bound.router)


def _norm(iterations: int | None) -> Callable[[Function, Tensor], Tensor]:
    return partial(local_lipschitz, iterations=iterations) if iterations else jacobian_norm


def _besides(layer: MoE, z: Tensor) -> Tensor:
    """What a token gets whatever the routing."""
    base = layer.experts.always(z)
    y = z.new_zeros(len(z), layer.experts.out_dim) if base is None else base
    return y if layer.shared is None else y + layer.shared(z)


# -- a whole model ---------------------------------------------------------------------------------


def measure_lipschitz(target: Target, x: Tensor, *, iterations: int = 20) -> dict[str, Any]:
    """`{"end_to_end": {"median", "max"}, "layers": {name: {"median", "max", "jump"}}}`.

    End to end: from an example to its logits. A layer: from a token to the layer's answer, over all
    tokens that these examples send there; "jump" is the median gap at the next change of choice,
    None where no token has one. The model is left as it was found.
    """
    with target.at_rest():
        whole = local_lipschitz(lambda z: target(z).logits, x, iterations=iterations)
        layers = {
            name: _measure_layer(layer, call, tokens, iterations)
            for name, (layer, call, tokens) in _inputs(target, x).items()
        }
    return {"end_to_end": _spread(whole), "layers": layers}


def _inputs(target: Target, x: Tensor) -> dict[str, tuple[nn.Module, Function, Tensor]]:
    """For each MoE layer: itself, how it was called first, and with which tokens `[..., D]`."""
    seen: dict[str, tuple[nn.Module, Function, Tensor]] = {}

    def hook(name: str, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if name not in seen and args:
            seen[name] = layer, lambda z: first_of(layer(z, *args[1:], **kwargs)), args[0].detach()

    named = dict(target.model.named_modules())
    ours = {name for name, part in named.items() if isinstance(part, MoE)}
    handles = [
        named[name].register_forward_pre_hook(partial(hook, name), with_kwargs=True)
        for name in [*ours, *blocks(target.model)]
    ]
    try:
        with torch.no_grad():
            target(x)
    finally:
        for handle in handles:
            handle.remove()
    return {name: seen[name] for name in named if name in seen}


def _measure_layer(
    layer: nn.Module, call: Function, tokens: Tensor, iterations: int
) -> dict[str, float | None]:
    slope = local_lipschitz(call, tokens, iterations=iterations, lead=tokens.dim() - 1)
    return {**_spread(slope), "jump": _median_jump(layer, tokens)}


def _median_jump(layer: nn.Module, tokens: Tensor) -> float | None:
    try:
        jumps = jump_sizes(layer, tokens.reshape(-1, tokens.shape[-1]))
    except ValueError:  # no token of this layer has a choice of its own
        return None
    return _spread(jumps.gap)["median"]  # NaN where there is no jump


def _spread(values: Tensor) -> dict[str, float | None]:
    """Of the finite ones; None where there is none."""
    values = values[values.isfinite()]
    if not values.numel():
        return {"median": None, "max": None}
    return {"median": float(values.median()), "max": float(values.max())}
