"""Checks of what couples tokens: padding, later tokens, other groups."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..routing import Routing
from .contract import Case, call, losses, mode, need, state, tokens

REAL, PADDING = 24, 8


def padding_never_counts(case: Case) -> None:
    """Padding takes no slot, and nothing about the real tokens depends on it."""
    for training in (False, True):
        if training and case.build().stochastic:
            continue  # noise differs with the number of tokens: `noisy_losses_skip_padding`
        bare = _facts(case, training, tokens(REAL), torch.ones(REAL, dtype=torch.bool))
        for where, mask in _paddings(case).items():
            x_TD = 1e3 * tokens(len(mask), seed=9)  # garbage that would win any contest
            x_TD[mask] = tokens(REAL)
            for name, t in _facts(case, training, x_TD, mask).items():
                need(_close(t, bare[name]), f"{mode(training)}: padding {where} changes {name}")


def _paddings(case: Case) -> dict[str, Tensor]:
    """Where padding stands, and the mask of real tokens."""
    place = torch.arange(REAL + PADDING)
    right = {"on the right": place < REAL}
    if case.build().positional:
        return right  # a token that moves is another token
    between = torch.ones_like(place, dtype=torch.bool)
    between[:: (REAL + PADDING) // PADDING] = False
    return {**right, "on the left": place >= PADDING, "in between": between}


def _facts(case: Case, training: bool, x_TD: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """All that is known of the real tokens, and what the router keeps of them."""
    router = case.build().train(training)
    r = call(router, x_TD, None if mask.all() else mask)
    need(not r.choice()[~mask].any(), "a padding token has an expert")
    need(not r.dense()[~mask].any(), "a padding token has weight")
    found = {"the weights": r.dense()[mask], "the choice": r.choice()[mask]}
    if r.by == "token":
        found.update({"index": r.index[mask], "what was chosen": r.chosen()[mask]})
    found.update(load=r.load(), demand=r.demand(), drop_rate=r.drop_rate())
    if r.lost is not None:
        found["lost"] = r.lost
    found.update({f"the {name} loss": t for name, t in losses(r).items()})
    return {**found, **{f"the router's {name}": t for name, t in state(router).items()}}


def _close(a: Tensor, b: Tensor) -> bool:
    # Products of other sizes may sum in another order; counts and choices must be exact.
    if a.is_floating_point():
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    return torch.equal(a, b)


def noisy_losses_skip_padding(case: Case) -> None:
    """With noise, the losses of a padded batch are those of its real rows alone."""
    router = case.build().train()
    mask = torch.arange(REAL + PADDING) % 4 > 0
    r = call(router, tokens(len(mask)), mask)
    if router.stochastic and r.by == "token":
        padded, alone = losses(r), losses(_real_rows(r, mask))
        for name, t in padded.items():
            need(_close(t, alone[name]), f"padding changes the {name} loss")


def _real_rows(r: Routing, mask: Tensor) -> Routing:
    def cut(v: Any) -> Any:
        rows = isinstance(v, Tensor) and v.dim() > 0 and v.shape[0] == r.tokens
        return v[mask] if rows else v

    kept = {f.name: cut(getattr(r, f.name)) for f in dataclasses.fields(r)}
    return Routing(**{**kept, "mask": None, "tokens": int(mask.sum())})


def only_padding_is_defined(case: Case) -> None:
    """A batch of padding alone, or of no token, gives no load and finite losses."""
    for count in (0, 6):
        router = case.build().train()
        r = call(router, tokens(count), torch.zeros(count, dtype=torch.bool))
        need(not r.load().any(), f"{count} padding tokens give load {r.load().tolist()}")
        wrong = [name for name, t in losses(r).items() if not torch.isfinite(t)]
        need(not wrong, f"{count} padding tokens make {', '.join(wrong)} infinite or NaN")


def causal_as_declared(case: Case) -> None:
    """In a causal router later tokens change nothing for earlier ones."""
    if case.build().causal:
        earlier = torch.arange(REAL) < REAL // 2
        _unchanged(case, earlier, None, "later tokens change")


def groups_are_apart(case: Case) -> None:
    """Tokens of one group change nothing in another."""
    group_T = torch.arange(REAL) // (REAL // 3)
    _unchanged(case, group_T != 1, REAL // 3, "the tokens of one group change, in another,")


def _unchanged(case: Case, kept: Tensor, group: int | None, what: str) -> None:
    """Change the tokens that are not kept; the decisions of the kept ones stay."""
    router = case.build().eval()
    for seed in range(5, 8):
        before = call(router, tokens(REAL), group=group)
        x_TD = torch.where(kept[:, None], tokens(REAL), 3 * tokens(REAL, seed=seed))
        after = call(router, x_TD, group=group)
        need(torch.equal(before.choice()[kept], after.choice()[kept]), f"{what} the choice")
        need(_close(before.dense()[kept], after.dense()[kept]), f"{what} the weights")
