"""Checks of what a router keeps: noise, seeds, buffers, copies and saved state."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..routing import Router, Routing
from .contract import Case, call, descend, differing, need, objective, same, state, tokens


def eval_is_deterministic(case: Case) -> None:
    """In eval a decision is the same to the bit whatever the seed, and changes nothing."""
    router = _trained(case).eval()
    before = state(router)
    torch.manual_seed(1)
    first, random = call(router, tokens(32)), torch.get_rng_state()
    torch.manual_seed(1)
    need(torch.equal(random, torch.get_rng_state()), "a call in eval draws random numbers")
    for seed in (1, 2):
        torch.manual_seed(seed)
        found = differing(first, call(router, tokens(32)))
        need(not found, f"a second call in eval differs in {', '.join(found)}")
    changed = [name for name, t in state(router).items() if not same(t, before[name])]
    need(not changed, f"a call in eval changes {', '.join(changed)}")


def noise_as_declared(case: Case) -> None:
    """In training the seed decides if and only if the router says that it is stochastic."""
    router = case.build()
    first = _with_seed(router, 1)
    found: set[str] = set()
    for seed in range(2, 8):
        found.update(differing(first, _with_seed(router, seed)))
    if router.stochastic:
        need(found, "stochastic is True, but six other seeds change nothing")
    need(router.stochastic or not found, f"stochastic is False, but {sorted(found)} differ")


def _with_seed(router: Router, seed: int) -> Routing:
    """A decision in training from the same state: training calls may change it."""
    router = copy.deepcopy(router).train()
    torch.manual_seed(seed)
    return call(router, tokens(32))


def state_dict_round_trip(case: Case) -> None:
    """A fresh router that loads the state of a trained one decides as it does."""
    router, fresh = _trained(case).eval(), case.build(seed=7).eval()
    fresh.load_state_dict(router.state_dict())
    found = differing(call(router, tokens(32)), call(fresh, tokens(32)))
    need(not found, f"after load_state_dict {', '.join(found)} differ")


def deepcopy_is_equal(case: Case) -> None:
    """A deep copy decides the same and shares no parameter or buffer with the original."""
    router = _trained(case).eval()
    twin = copy.deepcopy(router)
    found = differing(call(router, tokens(32)), call(twin, tokens(32)))
    need(not found, f"a copy differs in {', '.join(found)}")
    own = {t.data_ptr() for t in _tensors(router)}
    need(not own & {t.data_ptr() for t in _tensors(twin)}, "a copy shares memory with the original")


def recomputation_changes_nothing(case: Case) -> None:
    """Gradient checkpointing, which runs a forward twice, leaves the same state and gradients."""
    plain, twice = case.build().train(), case.build().train()
    torch.manual_seed(1)
    x_TD = tokens(16).requires_grad_()
    loss = objective(call(plain, x_TD))
    if loss.requires_grad:
        loss.backward()
        torch.manual_seed(1)
        loss = checkpoint(lambda x: objective(call(twice, x)), x_TD, use_reentrant=False)
        loss.backward()
        after = state(twice)
        changed = [name for name, t in state(plain).items() if not same(t, after[name])]
        need(not changed, f"a repeated forward changes {', '.join(changed)} twice")
        pairs = zip(plain.named_parameters(), twice.parameters())
        wrong = [name for (name, p), q in pairs if not same(p.grad, q.grad)]
        need(not wrong, f"the gradient of {', '.join(wrong)} differs")


def _trained(case: Case) -> Router:
    """The router after three steps of training."""
    router = case.build().train()
    for step in range(3):
        descend(router, objective(call(router, tokens(32, seed=step))))
    return router


def _tensors(router: Router) -> list[Tensor]:
    return [t for t in (*router.parameters(), *router.buffers()) if t.numel()]
