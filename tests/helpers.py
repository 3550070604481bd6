"""Routings and experts to test with, and the sum they must give, written as slowly as it reads."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from moiety import FeedForward, LowRank, ModuleExperts, Routing
from moiety.routing import capacity

E, D, F = 5, 16, 24
TIGHT = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


# -- routings ------------------------------------------------------------------------------------


def slots(routing: Routing) -> list[tuple[int, int, Tensor]]:
    """(token, expert, weight) of every slot that is worked on, read off the fields one by one."""
    found = []
    rows, columns = routing.index.shape
    for i in range(routing.tokens if routing.by == "all" else rows):
        row = 0 if routing.by == "all" else i
        for j in range(columns):
            token, expert = i, int(routing.index[row, j])
            if routing.by == "expert":
                token, expert = expert, i
            if routing.active is not None and not routing.active[row, j]:
                continue
            if routing.by == "all" and routing.mask is not None and not routing.mask[token]:
                continue
            found.append((token, expert, routing.weight[row, j]))
    return found


def routing_of(case: str, tokens: int = 13, experts: int = E, k: int = 2, dtype=None) -> Routing:
    """A decision of the named kind; its weight is a leaf that wants a gradient."""
    draw = torch.Generator().manual_seed(tokens + 31 * experts)
    mask = active = dropped = None
    by = "token"
    index = torch.rand(tokens, experts, generator=draw).argsort(1)[:, :k]
    if case == "empty":  # nobody asks for expert 1, nor for the last
        index = torch.stack([torch.zeros(tokens), torch.full((tokens,), 2.0)], 1).long()
    elif case == "one":  # everybody asks for expert 3
        index = torch.full((tokens, 1), min(3, experts - 1))
    elif case == "inactive":
        active = torch.rand(index.shape, generator=draw) < 0.6
    elif case == "nobody":
        active = torch.zeros(index.shape, dtype=torch.bool)
    elif case == "padding":
        mask = torch.rand(tokens, generator=draw) < 0.6
        active = mask[:, None].expand_as(index)
    elif case == "expert":
        by, index = "expert", torch.rand(experts, tokens, generator=draw).argsort(1)[:, :4]
        active = torch.rand(index.shape, generator=draw) < 0.8
    elif case in ("static", "static-padding"):
        by, index = "all", torch.randperm(experts, generator=draw)[None, :3]
        active = torch.tensor([[True, False, True]])[:, : index.shape[1]]
        if case == "static-padding":
            mask = torch.rand(tokens, generator=draw) < 0.6
    elif case not in ("plain", "capacity"):
        raise ValueError(case)
    weight = torch.rand(index.shape, generator=draw, dtype=dtype or torch.float32)
    routing = Routing(
        index=index,
        weight=weight.requires_grad_(),
        experts=experts,
        tokens=tokens,
        by=by,
        active=active,
        dropped=dropped,
        mask=mask,
    )
    return capacity.limit(routing, 0.7) if case == "capacity" else routing


def moved(routing: Routing, device: str) -> Routing:
    """The decision on another device, its weight again a leaf."""
    tensors = {k: v.detach().to(device) for k, v in vars(routing).items() if torch.is_tensor(v)}
    tensors["weight"].requires_grad_()
    return routing.replace(**tensors)


CASES = (
    "plain", "empty", "one", "inactive", "nobody", "padding", "capacity", "expert", "static",
    "static-padding",
)  # fmt: skip


# -- experts, and what they compute ----------------------------------------------------------------


def feedforward(experts: int = E, dim: int = D, hidden: int = F, **options) -> FeedForward:
    return FeedForward(experts, dim, hidden, **options)


def lowrank(experts: int = E, dim: int = D, rank: int = 4, **options) -> LowRank:
    made = LowRank(nn.Linear(dim, dim), experts, dim, rank, **options)
    nn.init.normal_(made.up)  # not the zero it starts from, or there is nothing to compare
    return made


def cnn(channels: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, 1, 3, padding=1)
    )


def modules(experts: int = E, dim: int = D) -> ModuleExperts:
    """CNNs of different sizes on tokens that are small pictures."""
    return ModuleExperts([cnn(2 + e) for e in range(experts)], dim=dim, shape=(1, dim // 4, 4))


def one_row(experts: nn.Module, e: int, x_D: Tensor) -> Tensor:
    """What expert e answers to one token."""
    if isinstance(experts, LowRank):
        return experts.up[e] @ (experts.down[e] @ x_D)
    if isinstance(experts, ModuleExperts):
        x = x_D[None] if experts.shape is None else x_D.view(1, *experts.shape)
        return experts.members[e](x).flatten()
    h = experts.w_in[e] @ x_D
    if experts.b_in is not None:
        h = h + experts.b_in[e]
    if experts.gated:
        h = experts.activation(h[: experts.hidden]) * h[experts.hidden :]
    else:
        h = experts.activation(h)
    y = experts.w_out[e] @ h
    return y if experts.b_out is None else y + experts.b_out[e]


def reference(experts: nn.Module, x_TD: Tensor, routing: Routing) -> Tensor:
    """The layer's sum, one token and one expert at a time."""
    rows = [[x.new_zeros(experts.out_dim) + 0 * x.sum()] for x in x_TD]
    for token, expert, weight in slots(routing):
        rows[token].append(weight.to(x_TD.dtype) * one_row(experts, expert, x_TD[token]))
    y = [torch.stack(parts).sum(0) for parts in rows]
    y_TD = torch.stack(y) if y else x_TD.new_zeros(0, experts.out_dim) + 0 * x_TD.sum()
    base = experts.always(x_TD)
    return y_TD if base is None else base + y_TD


def gradients(y: Tensor, leaves: list[Tensor], up: Tensor) -> list[Tensor]:
    got = torch.autograd.grad(y, leaves, up, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, got)]


def close(got: Tensor, want: Tensor, tol: float, what: str = "") -> None:
    """Compare relative to the largest value, so that one number fits all shapes."""
    assert got.shape == want.shape, what
    if not want.numel():
        return
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    gap = (got - want).abs().max() / want.abs().max().clamp(min=1e-3)
    assert float(gap) <= tol, f"{what}: off by {float(gap):.2e}, allowed {tol:.0e}"


def check_parity(experts, x_TD: Tensor, routing: Routing, backend: str, tol: float) -> None:
    """Forward and every gradient of a backend, against the slow sum in float64."""
    y, names, leaves = _run(experts, x_TD, routing, lambda m, x, r: m(x, r, backend))
    slow = copy.deepcopy(experts).cpu().double()
    exact = moved(routing, "cpu")
    exact = exact.replace(weight=exact.weight.detach().double().requires_grad_())
    want, _, exact_leaves = _run(slow, x_TD.cpu().double(), exact, reference)
    close(y, want, tol, f"{backend} output")
    up = torch.randn(y.shape).to(y.dtype)
    for name, g, w in zip(
        names, gradients(y, leaves, up.to(y.device)), gradients(want, exact_leaves, up.double())
    ):
        assert torch.isfinite(g).all(), name
        close(g, w, tol, f"{backend} gradient of {name}")


def _run(experts, x_TD: Tensor, routing: Routing, forward):
    x = x_TD.detach().requires_grad_()
    named = {n: p for n, p in experts.named_parameters() if p.requires_grad}
    y = forward(experts, x, routing)
    return y, ["x", *named, "weight"], [x, *named.values(), routing.weight]
