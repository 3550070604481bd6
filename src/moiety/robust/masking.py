"""Does a model only look robust? Signs that its gradient is masked, each with its reason.

    evidence = find_evidence(Target(model), x, y, Ball(8 / 255), Noise(0, ids))
    judge(evidence, 8 / 255)     # {"flagged": True, "reasons": ["The gradient is zero on 62 % …"]}

An attack that follows a gradient proves nothing where the gradient is zero or points nowhere
(Athalye et al. 2018; Carlini et al. 2019). Five signs, each counted over the examples that are
right when clean: attacks without the model's gradient (random search; transfer from another model,
or from this one with frozen routes, which has no routing boundaries) fool more than those with it;
the gradient is zero; a step along it raises the loss no more than random steps do; and an attack
that may go anywhere still leaves examples right. A hard router alone is no sign: the gradient
ignores its boundaries, but the random and transferred attacks cross them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .apgd import APGD
from .attribution import freeze
from .ball import Ball
from .base import Attack
from .losses import LOSSES
from .noise import Noise
from .search import RandomSearch, Transfer
from .target import Seen, Target, correct

# Attacks without a gradient may be better by so much, as luck has it: a share, and examples.
SLACK, LUCKY = 0.01, 1
ZERO, BLIND, UNREACHED = 0.05, 0.5, 0.05  # shares of the examples above which a sign is one
DIRECTIONS = 4  # random steps, the best of which a step along the gradient has to beat
PART = 0.25  # of eps: their length, short enough for the gradient to hold


@dataclass
class Evidence:
    """`[n]` bool by example; None: not looked for."""

    right: Tensor  # when clean
    strongest: Tensor  # right after the strongest attack with a gradient
    random: Tensor  # right after random search
    transfer: Tensor | None  # right after an attack that was made on another model
    zero: Tensor  # the gradient is zero
    blind: Tensor  # it is not, but no better than random directions
    unbounded: Tensor  # right after an attack that may go anywhere
    frozen: bool = False  # that other model is this one with its routes frozen

    @classmethod
    def nothing(cls) -> Evidence:
        """Of no example."""
        none = torch.zeros(0, dtype=torch.bool)
        return cls(none, none, none, None, none, none, none)

    def cpu(self) -> Evidence:
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved: dict[str, Any] = {n: t.cpu() for n, t in named.items() if isinstance(t, Tensor)}
        return dataclasses.replace(self, **moved)


def find_evidence(
    target: Target,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    noise: Noise,
    *,
    strongest: Tensor | None = None,
    source: Target | None = None,
    attack: Attack | None = None,
    search: Attack | None = None,
    routes: bool = False,
    group: int = 1,
) -> Evidence:
    """Look for the signs on one batch.

    strongest  [B] bool: right after the attacks made so far, to which `attack` is added
    attack     that with a gradient; None: AutoPGD
    source     another model to transfer from; with `routes` and none given, the target itself with
               its routes frozen
    """
    attack, search = attack or APGD(), search or RandomSearch()

    def right_after(attacker: Attack | Transfer, within: Ball) -> Tensor:
        x_adv = attacker(target, x, y, within, noise, group=group, early_stop=True)
        with torch.no_grad():
            return right & correct(target(within.project(x_adv, x)).logits, y)

    with target.at_rest():
        with torch.no_grad():
            right = correct(target(x).logits, y)
        own = right_after(attack, ball)
        frozen = source is None and routes
        if frozen:
            source = freeze(target, x)
        transfer = None if source is None else right_after(Transfer(source, attack), ball)
        zero, blind = _slopes(target, x, y, ball, noise)
        anywhere = right_after(attack, unbounded(ball, x))
        random = right_after(search, ball)
    strongest = own if strongest is None else own & strongest
    return Evidence(right, strongest, random, transfer, zero, blind, anywhere, frozen)


def unbounded(ball: Ball, x: Tensor) -> Ball:
    """A ball that holds every input within the bounds, or without bounds as wide as the data."""
    low, high = ball.bounds or (float(x.min()), float(x.max()))
    reach = max(high - low, ball.eps)
    if ball.norm == "l2":
        reach *= x[0].numel() ** 0.5
    return Ball(reach, ball.norm, ball.bounds)


def _slopes(
    target: Target, x: Tensor, y: Tensor, ball: Ball, noise: Noise
) -> tuple[Tensor, Tensor]:
    """`[B]` bool each: the gradient is zero (or no number); it is not, but leads nowhere."""
    at = x.detach().requires_grad_()
    # In the precision of the logits, as attacks see it: in a higher one less of it vanishes.
    with torch.enable_grad():
        loss = _loss(target(at), y)
    grad = torch.zeros_like(x)
    if loss.requires_grad:
        found = torch.autograd.grad(loss.sum(), at, allow_unused=True)[0]
        grad = grad if found is None else found
    size = grad.flatten(1).abs().amax(1)
    zero = ~(size.isfinite() & (size > 0))

    def loss_along(direction: Tensor) -> Tensor:
        moved = ball.clip(x + PART * ball.eps * ball.step(direction))
        with torch.no_grad():
            return _loss(Seen(target(moved).logits.double()), y)

    along = loss_along(grad)
    draws = [noise.stream(10_000 + i).normal(x.shape[1:]).to(x) for i in range(DIRECTIONS)]
    best = torch.stack([loss_along(direction) for direction in draws]).amax(0)
    return zero, ~zero & (along <= best)


def _loss(seen: Seen, y: Tensor) -> Tensor:
    return LOSSES["ce" if y.dim() == 1 else "sigmoid"](seen, y)


def judge(evidence: Evidence, eps: float) -> dict[str, Any]:
    """The verdict, its reasons as sentences, the errors compared, and on what: examples, eps."""
    right = evidence.right
    error = {
        word: None if kept is None else 1 - _share(kept)
        for word, kept in (
            ("random", evidence.random),
            ("transfer", evidence.transfer),
            ("strongest", evidence.strongest),
        )
    }
    reasons = []
    source = "this model with its routes frozen" if evidence.frozen else "another model"
    words = {"random": "Random search", "transfer": f"An attack on {source}"}
    slack = max(SLACK, (LUCKY + 0.5) / max(len(right), 1))
    for word, attack in words.items():
        if (error[word] or 0.0) > (error["strongest"] or 0.0) + slack:
            reasons.append(
                f"{attack} reaches an error of {error[word]:.1%}, more than the "
                f"{error['strongest']:.1%} of the strongest attack that follows the gradient."
            )
    for share, limit, text in (
        (_share(evidence.zero[right]), ZERO, "The gradient is zero on {} of the examples."),
        (_share(evidence.blind[right]), BLIND,
         "On {} of the examples a step along the gradient raises the loss no more than a random "
         "step does."),
        (_share(evidence.unbounded), UNREACHED,
         "{} of the examples are still right under an attack that may go anywhere."),
    ):  # fmt: skip
        if share > limit:
            reasons.append(text.format(f"{share:.1%}"))
    verdict = {"flagged": bool(reasons), "reasons": reasons, **error}
    return {**verdict, "examples": len(right), "eps": eps}


def _share(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0
