"""Checks of experts: every backend against the loop, which is the truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import cost
from ..experts import Experts
from ..routing import Routing
from .contract import DIM, need, same, state, tokens

EXPERTS, TOKENS = 4, 12


@dataclass(frozen=True)
class Built:
    """Experts that can be built again and again."""

    build: Callable[[int, int], Experts]

    def __call__(self) -> Experts:
        """Fresh experts in eval mode (no dropout), whose parameters are all random.

        A correction that starts at zero would otherwise agree with anything.
        """
        torch.manual_seed(0)
        made = self.build(EXPERTS, DIM).eval()
        with torch.no_grad():
            for p in made.parameters():
                p.normal_(std=0.3)
        return made

    def __str__(self) -> str:
        return f"experts {type(self.build(EXPERTS, DIM)).__name__}"


def built(build: Callable[[int, int], Experts]) -> list[Built]:
    return [Built(build)]


def routings() -> dict[str, Routing]:
    """Decisions that experts must cope with, by what is special about them."""
    generator = torch.Generator().manual_seed(1)
    index = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)[:, :2]
    index_EC = torch.rand(EXPERTS, TOKENS, generator=generator).argsort(1)[:, :5]
    some = torch.rand(TOKENS, 2, generator=generator) > 0.4
    nobody = torch.zeros(TOKENS, 2, dtype=torch.bool)
    return {
        "mixed": _decision(index),
        "an empty expert": _decision((index % (EXPERTS - 1))[:, :1]),
        "all in one": _decision(torch.full((TOKENS, 1), 2)),
        "one token": _decision(index[:1]),
        "zero tokens": _decision(index[:0]),
        "inactive slots": _decision(index, active=some),
        "nothing active": _decision(index, active=nobody),
        "by expert": _decision(index_EC, tokens=TOKENS, by="expert"),
        "by expert, inactive slots": _decision(
            index_EC, tokens=TOKENS, by="expert", active=index_EC % 3 > 0
        ),
        "the same for all": _decision(index[:1], tokens=TOKENS, by="all"),
    }


def _decision(index: Tensor, tokens: int | None = None, **fields: Any) -> Routing:
    weight = torch.linspace(0.1, 0.9, max(index.numel(), 1))[: index.numel()].view_as(index)
    count = index.shape[0] if tokens is None else tokens
    return Routing(index=index, weight=weight, experts=EXPERTS, tokens=count, **fields)


def run(made: Experts, r: Routing, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output, and the gradients of tokens, weights and parameters."""
    made.zero_grad(set_to_none=True)
    x_TD = tokens(r.tokens).to(dtype).requires_grad_()
    weight = r.weight.clone().requires_grad_()
    y_TD = made(x_TD, r.replace(weight=weight), backend)
    pattern = torch.linspace(-1, 1, max(y_TD.numel(), 1))[: y_TD.numel()].view_as(y_TD)
    (y_TD.float() * pattern).sum().backward()
    found = {"the output": y_TD.detach(), "the gradient of x": x_TD.grad}
    found["the gradient of the weights"] = weight.grad
    found.update({f"the gradient of {n}": p.grad for n, p in made.named_parameters()})
    return {name: torch.zeros(()) if t is None else t for name, t in found.items()}


def backends_agree(subject: Built) -> None:
    """Every backend gives the loop's output and gradients, in fp32."""
    _agree(subject, torch.float32, 1e-5)


def backends_agree_in_bfloat16(subject: Built) -> None:
    """Every backend gives the loop's output and gradients, in bfloat16 to its precision."""
    _agree(subject, torch.bfloat16, 4e-2)


def _agree(subject: Built, dtype: torch.dtype, tolerance: float) -> None:
    made = subject().to(dtype)
    for kind, r in routings().items():
        truth = run(made, r, "loop", dtype)
        shape = (r.tokens, made.out_dim)
        need(truth["the output"].shape == shape, f"loop, {kind}: the output is not {shape}")
        for backend in (*made.backends, "auto"):
            for name, t in run(made, r, backend, dtype).items():
                expected = truth[name].float()
                scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
                near = torch.allclose(t.float(), expected, rtol=0, atol=tolerance * scale)
                need(near, f"{backend}, {kind}: {name} is not the loop's")


def idle_experts_get_gradients(subject: Built) -> None:
    """Every trained parameter has a gradient, also when its expert or every expert was idle.

    Data-parallel training waits for all of them.
    """
    made = subject()
    decisions = routings()
    for kind in ("an empty expert", "zero tokens", "nothing active"):
        for backend in made.backends:
            run(made, decisions[kind], backend, torch.float32)
            missing = [n for n, p in made.named_parameters() if p.requires_grad and p.grad is None]
            need(not missing, f"{backend}, {kind}: {', '.join(missing)} got no gradient")


def repeats_are_equal(subject: Built) -> None:
    """The same call again gives the same bits, forward and backward."""
    made = subject()
    for kind, r in routings().items():
        for backend in made.backends:
            first = run(made, r, backend, torch.float32)
            again = run(made, r, backend, torch.float32)
            changed = [name for name, t in first.items() if not same(t, again[name])]
            need(not changed, f"{backend}, {kind}: {', '.join(changed)} differ the second time")


def inactive_slots_cost_nothing(subject: Built) -> None:
    """A token without an active slot gets only what every token gets, whatever its weight."""
    made = subject()
    r = routings()["nothing active"]
    for backend in made.backends:
        x_TD = tokens(r.tokens)
        base_TD = made.always(x_TD)
        seen = (made(x_TD, r, backend) - (0.0 if base_TD is None else base_TD)).detach()
        need(
            not seen.any(), f"{backend}: inactive slots answer up to {float(seen.abs().max()):.3g}"
        )
    need(made.flops(r) == 0, f"inactive slots count {made.flops(r)} FLOPs")


def flops_are_counted(subject: Built) -> None:
    """`flops` agrees with the operations that the loop does, to 0.1 %."""
    made = subject()
    per_row = made.flops_per_row()
    need(len(per_row) == EXPERTS, f"flops_per_row has {len(per_row)} values for {EXPERTS} experts")
    need(min(per_row) > 0, f"flops_per_row has {min(per_row)}")
    for kind, r in routings().items():
        x_TD = tokens(r.tokens)
        real = cost.forward_flops(partial(made, x_TD, r, "loop"), made)
        real -= cost.forward_flops(partial(made.always, x_TD), made)
        told = made.flops(r)
        need(abs(told - real) <= 1e-3 * real, f"{kind}: {told:.0f} FLOPs told, {real:.0f} done")


def copies_are_equal(subject: Built) -> None:
    """`copy` appends experts that answer as their parents do, and tells each row's origin."""
    made, parents = subject(), [2, 0]
    before = state(made)
    origin = made.copy(parents)
    after = state(made)
    need(made.experts == EXPERTS + 2, f"{made.experts} experts after two copies of {EXPERTS}")
    for name, source in origin.items():
        old = before[source] if isinstance(source, str) else before[name][source]
        need(same(after[name], old), f"{name} is not what copy tells: {source}")
    untold = [n for n, t in after.items() if n not in origin and not same(t, before.get(n))]
    need(not untold, f"copy changed {', '.join(untold)} and does not tell")
    for child, parent in enumerate(parents, start=EXPERTS):
        answers = [_answer(made, e) for e in (child, parent)]
        need(torch.equal(*answers), f"the copy of expert {parent} answers otherwise")


def _answer(made: Experts, expert: int) -> Tensor:
    """What one expert alone makes of some tokens."""
    r = _decision(torch.full((TOKENS, 1), expert)).replace(experts=made.experts)
    return made(tokens(TOKENS), r, "loop").detach()


def bad_calls_are_refused(subject: Built) -> None:
    """A decision for another number of experts and an unknown backend raise one sentence."""
    made, r = subject(), routings()["mixed"]
    for wrong, backend, word in ((r.replace(experts=9), "loop", "9"), (r, "magic", "magic")):
        try:
            made(tokens(TOKENS), wrong, backend)
        except ValueError as error:
            need(word in str(error), f"the message {str(error)!r} does not name {word}")
        else:
            raise AssertionError(f"no error, where one should name {word}")
