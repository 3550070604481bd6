"""Checks of the balance losses, their precision, and the gradients that come of them."""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor, nn

from ..experts import FeedForward
from ..moe import MoE
from ..routing import Routing, balance
from ..watch import watch
from .contract import DIM, Case, call, differing, losses, need, objective, tokens


def losses_are_per_layer(case: Case) -> None:
    """The loss of two layers, one of them collapsed, is the sum of the loss of each alone."""
    found = losses(call(case.build().train(), tokens(32)))
    weights = {n: 1.0 for n, t in found.items() if n in balance.LOSSES and t.requires_grad}
    if weights:
        model = _two_layers(case, weights)
        alone = [_loss(model, (i,))[0] for i in (0, 1)]
        together, _ = _loss(model, (0, 1))
        seen = f"{alone[0]:.6g} and {alone[1]:.6g} alone, {together:.6g} together"
        need(torch.allclose(together, alone[0] + alone[1], rtol=1e-5), seen)
    if "importance" in weights:
        # Pooled over the layers, the collapse of one would be diluted by the other.
        together, routings = _loss(_two_layers(case, {"importance": 1.0}), (0, 1))
        pooled = 2 * balance.importance(_pooled(*routings))
        static = routings[0].by == "all"  # it cannot collapse: its input says nothing
        near = torch.allclose(together, pooled, rtol=1e-3)
        need(static or not near, f"the importance loss {together:.6g} is that of pooled layers")


def _two_layers(case: Case, weights: dict[str, float]) -> nn.ModuleList:
    layers = []
    for seed in (0, 1):
        experts = FeedForward(8, DIM, 4, activation=torch.relu)
        layers.append(MoE(case.build(seed=seed), experts, balance=weights))
    return nn.ModuleList(layers).train()


def _loss(model: nn.ModuleList, which: tuple[int, ...]) -> tuple[Tensor, list[Routing]]:
    """The collected loss of some layers: the first sees equal tokens, the second different ones."""
    model = copy.deepcopy(model)  # a training call may change a layer
    inputs = (tokens(1).expand(64, -1), tokens(64))
    with watch(model, keep="all") as routes:
        for i in which:
            torch.manual_seed(i)
            model[i](inputs[i])
        loss = routes.loss()
    return torch.as_tensor(loss).detach(), [r for i in which for r in routes[str(i)]]


def _pooled(a: Routing, b: Routing) -> Routing:
    """One decision with the gate distributions of two layers."""
    both = [r.probs.expand(r.tokens, -1) for r in (a, b) if r.probs is not None]
    return a.replace(probs=torch.cat(both), tokens=a.tokens + b.tokens)


def fp32_under_autocast(case: Case) -> None:
    """Under autocast to bfloat16 scores, probabilities, weights and losses stay in fp32."""
    for training in (False, True):
        plain, cast = (case.build().train(training) for _ in range(2))
        torch.manual_seed(1)
        expected = call(plain, tokens(32))
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            seen = call(cast, tokens(32))
            half = call(cast, tokens(32).bfloat16())
            found = {**_floats(seen), **losses(seen), **_floats(half), **losses(half)}
        wrong = [f"{name} is {t.dtype}" for name, t in found.items() if t.dtype != torch.float32]
        need(not wrong, ", ".join(wrong))
        changed = differing(expected, seen)
        need(not changed, f"autocast changes {', '.join(changed)}: part of it ran in bfloat16")


def fp32_in_a_half_model(case: Case) -> None:
    """A router whose parameters are bfloat16 still decides in fp32."""
    router = case.build().bfloat16().train()
    r = call(router, tokens(32).bfloat16())
    found = {**_floats(r), **losses(r)}
    wrong = [f"{name} is {t.dtype}" for name, t in found.items() if t.dtype != torch.float32]
    need(not wrong, ", ".join(wrong))


def _floats(r: Routing) -> dict[str, Tensor]:
    found = {f.name: getattr(r, f.name) for f in dataclasses.fields(r)}
    return {n: t for n, t in found.items() if isinstance(t, Tensor) and t.is_floating_point()}


def gradients_reach_parameters(case: Case) -> None:
    """In training every parameter gets a finite gradient, and not always zero."""
    router = case.build().train()
    learned = [(name, p) for name, p in router.named_parameters() if p.requires_grad]
    for seed in range(3):
        if learned:
            objective(call(router, tokens(32, seed=seed))).backward()
    for name, p in learned:
        need(p.grad is not None, f"{name} gets no gradient")
        need(
            p.grad is not None and p.grad.isfinite().all(), f"the gradient of {name} is not finite"
        )
        need(p.grad is not None and p.grad.any(), f"the gradient of {name} is zero")


def weights_carry_a_gradient(case: Case) -> None:
    """The task reaches the router through the combine weights alone, without any loss."""
    router = case.build().train()
    learned = [p for p in router.parameters() if p.requires_grad]
    if not learned:
        return
    torch.manual_seed(1)
    r = call(router, tokens(32))
    need(r.weight.requires_grad, "the weights carry no gradient: the gate is detached")
    pattern = torch.linspace(-1, 1, r.weight.numel(), dtype=r.weight.dtype).view_as(r.weight)
    gradients = torch.autograd.grad((r.weight * pattern).sum(), learned, allow_unused=True)
    moved = any(g is not None and bool(g.any()) for g in gradients)
    need(moved, "no parameter has a gradient from the combine weights")
