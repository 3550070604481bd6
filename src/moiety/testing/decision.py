"""Checks of one decision: its shapes and ranges, and that it is what the router declares."""

from __future__ import annotations

import torch
from torch import Tensor

from ..routing import Router, Routing
from .contract import Case, call, differing, mode, need, objective, tokens


def shapes_and_ranges(case: Case) -> None:
    """A decision is well formed for 0, 1, 7 and 64 tokens and 1, 2, 5 and 8 experts."""
    for experts in (1, 2, 5, 8):
        router = case.build_for(experts)
        if router is None:
            need(experts < 8, "it cannot be built for 8 experts")
            continue
        for count in (0, 1, 7, 64):
            for training in (False, True):
                where = f"{count} tokens, {experts} experts, {mode(training)}: "
                r = call(router.train(training), tokens(count))
                well_formed(r, router, count, torch.float32, where)
        where = f"7 tokens in float64, {experts} experts: "
        well_formed(call(router.eval(), tokens(7).double()), router, 7, torch.float64, where)


def well_formed(r: Routing, router: Router, count: int, dtype: torch.dtype, where: str) -> None:
    experts = router.experts
    need(r.tokens == count, f"{where}Routing.tokens is {r.tokens}")
    need(r.experts == experts, f"{where}Routing.experts is {r.experts}")
    need(r.by in ("token", "expert", "all"), f"{where}Routing.by is {r.by!r}")
    need((r.by == "all") == router.static, f"{where}by is {r.by!r} and static {router.static}")
    _slots(r, where)
    _tables(r, dtype, where)
    need(r.dense().shape == (count, experts), f"{where}dense() has shape {list(r.dense().shape)}")
    # Two slots of the same token and expert would count twice in the load and once here.
    need(r.choice().sum() == r.load().sum(), f"{where}a token has an expert in two slots")


def _slots(r: Routing, where: str) -> None:
    rows, ids = {
        "token": (r.tokens, r.experts),
        "expert": (r.experts, r.tokens),
        "all": (1, r.experts),
    }[r.by]
    need(r.index.dtype == torch.long, f"{where}index is {r.index.dtype}")
    shape = list(r.index.shape)
    need(len(shape) == 2 and shape[0] == rows, f"{where}index has shape {shape}, not [{rows}, …]")
    need(((r.index >= 0) & (r.index < ids)).all(), f"{where}index leaves 0 … {ids - 1}")
    if r.by != "expert":
        ordered = r.index.sort(1).values
        distinct = (ordered[:, 1:] != ordered[:, :-1]).all()
        need(distinct, f"{where}a token has an expert in two slots")
    for name, t in (("active", r.active), ("dropped", r.dropped)):
        fits = t is None or (t.dtype == torch.bool and t.shape == r.index.shape)
        need(fits, f"{where}{name} is not bool in the shape of index")
    if r.active is not None and r.dropped is not None:
        need(not (r.active & r.dropped).any(), f"{where}a slot is active and dropped")


def _tables(r: Routing, dtype: torch.dtype, where: str) -> None:
    table = [(r.tokens, r.experts), (1, r.experts)]
    shapes: dict[str, list[tuple[int, ...]]] = {
        "weight": [tuple(r.index.shape)],
        **{name: [*table] for name in ("scores", "probs", "gate")},
        "threshold": [(r.tokens,)],
        "noise_std": [(), (r.tokens, r.experts)],
        "lost": [()],
    }
    found: dict[str, Tensor | None] = {name: getattr(r, name) for name in shapes}
    found.update(r.penalties)
    for name, t in found.items():
        if t is None:
            continue
        wanted = shapes.get(name, [()])  # a penalty is a scalar
        need(tuple(t.shape) in wanted, f"{where}{name} has shape {list(t.shape)}, not {wanted}")
        need(t.dtype == dtype, f"{where}{name} is {t.dtype}, not {dtype}")
        need(torch.isfinite(t).all(), f"{where}{name} is not finite")
    need(r.probs is None or (r.probs >= 0).all(), f"{where}probs has negative values")
    need(r.lost is None or 0 <= r.lost <= 1, f"{where}lost is {r.lost}, not from 0 to 1")


def weights_sum_as_declared(case: Case) -> None:
    """The weights of a real token sum to one, at most one, or freely, as `weights_sum` says."""
    mask = torch.arange(33) % 4 > 0
    for experts in (5, 8):
        router = case.build_for(experts)
        for training in (False, True):
            for padding in (None, mask):
                if router is not None:
                    r = call(router.train(training), tokens(33), padding)
                    where = f"{experts} experts, {mode(training)}, "
                    where += "no padding: " if padding is None else "padding: "
                    _sums(r, router.weights_sum, padding, where)


def _sums(r: Routing, declared: str, mask: Tensor | None, where: str) -> None:
    total_T = r.dense().sum(1)
    if r.by != "expert":  # what capacity cut was weighed before
        total_T = r.by_token().weight.masked_fill(~r.chosen(), 0.0).sum(1)
    if mask is not None:
        need(not total_T[~mask].any(), f"{where}a padding token has weight {total_T[~mask].max()}")
        total_T = total_T[mask]
    low, high = {"one": (1.0, 1.0), "at most one": (0.0, 1.0)}.get(
        declared, (-torch.inf, torch.inf)
    )
    seen = f"sums from {total_T.min():.6g} to {total_T.max():.6g}, declared {declared!r}"
    need(((total_T >= low - 1e-5) & (total_T <= high + 1e-5)).all(), where + seen)


def static_as_declared(case: Case) -> None:
    """A static router decides the same whatever the tokens are."""
    router = case.build().eval()
    if router.static:
        found = differing(call(router, tokens(9)), call(router, tokens(9, seed=1)))
        need(not found, f"other tokens change {', '.join(found)}")


def dense_as_declared(case: Case) -> None:
    """A router that calls itself dense lets every expert work for every token."""
    for experts in (5, 8):
        router = case.build_for(experts)
        for training in (False, True):
            if router is not None and router.dense:
                idle = ~call(router.train(training), tokens(9)).choice()
                need(not idle.any(), f"{int(idle.sum())} of {idle.numel()} pairs do not work")


def zero_vectors_are_defined(case: Case) -> None:
    """Tokens that are zero vectors get finite weights, with finite gradients."""
    router = case.build().train()
    x_TD = torch.zeros(6, router.dim, requires_grad=True)
    r = call(router, x_TD)
    need(torch.isfinite(r.weight).all(), "weights are not finite")
    if r.weight.requires_grad:
        objective(r).backward()
    learned = [("x", x_TD), *router.named_parameters()]
    wrong = [name for name, p in learned if p.grad is not None and not p.grad.isfinite().all()]
    need(not wrong, f"the gradient of {', '.join(wrong)} is not finite")


def ties_go_to_the_lower_id(case: Case) -> None:
    """Where a zero token gives all experts the same score, those with the lowest ids are chosen."""
    router = case.build().eval()
    r = call(router, torch.zeros(3, router.dim))
    if r.by != "token" or r.scores is None or r.index.shape[1] == r.experts:
        return
    if bool((r.scores == r.scores[:, :1]).all()):
        chosen = r.index.sort(1).values
        lowest = torch.arange(r.index.shape[1]).expand_as(chosen)
        need(torch.equal(chosen, lowest), f"of equal scores it chose {chosen[0].tolist()}")
