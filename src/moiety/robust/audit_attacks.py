"""The attacks of an audit by name.

    named_attacks(["pgd", "apgd", "apgd-dlr", "apgd + router-margin"], steps=20)

    fgsm, pgd, apgd, random-search    on the cross-entropy
    apgd-dlr, apgd-dlr-targeted       on another loss of the task: a dash
    apgd + router-margin + overload   on the cross-entropy and losses of the router: plus

An attack that sees the router is only ever an addition, so that AutoPGD is made as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..watch import Routes
from .apgd import APGD
from .attack import Attacks
from .ball import Ball
from .base import Attack, Keep
from .losses import LOSSES, LossLike, build_loss
from .noise import Noise
from .pgd import FGSM, PGD
from .router_losses import Anchored
from .search import RandomSearch, Transfer
from .target import Seen, Target

BASES: dict[str, type[Attack]] = {
    "fgsm": FGSM, "pgd": PGD, "apgd": APGD, "random-search": RandomSearch,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class AnchoredTarget(Target):
    """A target, maybe one with frozen routes, beside whose choices those when clean are shown."""

    of: Target | None = None
    anchors: Routes | None = None

    def __call__(self, x: Tensor) -> Seen:
        assert self.of is not None
        seen = self.of.watching(self.watch)(x)
        return Anchored(seen.logits, seen.routes, self.anchors)


@dataclass(frozen=True)
class FromClean:
    """An attack whose loss pushes tokens out of the experts that they choose when clean.

    Without this, the router's margin is that of the live choice, which ends at the boundary.
    """

    attack: Attack

    @property
    def name(self) -> str:
        return self.attack.name

    def settings(self) -> dict[str, Any]:
        return self.attack.settings()

    def __call__(
        self,
        target: Target,
        x: Tensor,
        y: Tensor,
        ball: Ball,
        noise: Noise,
        *,
        keep: Keep = "fooled",
        early_stop: bool = False,
        group: int = 1,
    ) -> Tensor:
        """As the attack; nobody leaves early, since the clean choices belong to these rows."""
        with torch.no_grad():
            anchors = target.watching("choice")(x).routes
        known = {f.name: getattr(target, f.name) for f in dataclasses.fields(Target)}
        anchored = AnchoredTarget(**known, of=target, anchors=anchors)
        return self.attack(anchored, x, y, ball, noise, keep=keep, group=group)


def named_attacks(
    given: Sequence[str | Attacks] | Mapping[str, str | Attacks] | str | Attacks,
    steps: int | None = None,
) -> dict[str, Attacks]:
    """Attacks by name, from names, objects, or objects by name; `steps` for those from names."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        given = [given]
    pairs = given.items() if isinstance(given, Mapping) else [(None, each) for each in given]
    found: dict[str, Attacks] = {}
    for called, each in pairs:
        own, attack = _build(each, steps) if isinstance(each, str) else (_name(each), each)
        name = called or own
        if name in found:
            raise ValueError(f"two attacks are named {name!r}: give a dict with a name for each")
        found[name] = attack
    if not found:
        raise ValueError(f"attacks is empty: name some, of {', '.join(BASES)}")
    if "apgd" not in found and any(sees_router(attack) for attack in found.values()):
        found = {"apgd": _build("apgd", steps)[1], **found}
    return found


def sees_router(attack: Attacks) -> bool:
    """Whether an attack's loss looks at the routes."""
    return build_loss(_loss(attack)).needs_routes


def check_router_attacks(attacks: Mapping[str, Attacks], target: Target, x: Tensor) -> None:
    """Refuse, before any work, attacks on a router that the model does not have.

    x is an example. A transferred attack looks at the router of its source, and so is left out.
    """
    seeing = {n: a for n, a in attacks.items() if sees_router(a) and not isinstance(a, Transfer)}
    if not seeing:
        return
    with target.at_rest(), torch.no_grad():
        y = target(x).logits.argmax(-1)
        for name, attack in seeing.items():
            try:
                build_loss(_loss(attack))(target.watching("all")(x), y)
            except ValueError as why:
                raise ValueError(f"leave out the attack {name!r}: {why}") from None


def _loss(attack: Attacks) -> LossLike:
    loss: LossLike = getattr(getattr(attack, "attack", attack), "loss", "ce")
    return loss


def _name(attack: Attacks) -> str:
    if isinstance(attack, type) or not callable(attack) or not hasattr(attack, "name"):
        raise ValueError(f"an attack is a name or an object such as APGD(), got {attack!r:.60}")
    loss = _loss(attack)
    if isinstance(loss, Mapping):
        return " + ".join([attack.name, *(n for n in loss if n != "ce")])
    return attack.name if loss == "ce" else f"{attack.name}-{build_loss(loss).name}"


def _build(text: str, steps: int | None) -> tuple[str, Attacks]:
    """`apgd-dlr + overload` as its proper name and an attack."""
    first, *extra = (word.strip() for word in text.split("+"))
    base = next((b for b in sorted(BASES, key=len, reverse=True) if _is(first, b)), None)
    task = "ce" if base is None else first[len(base) + 1 :] or "ce"
    wrong = next((loss for loss in (task, *extra) if loss not in LOSSES), None)
    if base is None or wrong is not None:
        raise ValueError(
            f"no attack is named {text!r}; there are {', '.join(BASES)}, of other losses such as "
            f"apgd-dlr, and with losses of the router: apgd + router-margin"
        )
    kind, words = BASES[base], {}
    if steps is not None and kind is not FGSM:
        words["steps"] = steps
    loss: Any = {task: 1.0, **dict.fromkeys(extra, 1.0)} if extra else task
    attack = kind(loss=loss, **words)
    name = " + ".join([first, *extra])
    return name, FromClean(attack) if "router-margin" in (task, *extra) else attack


def _is(text: str, base: str) -> bool:
    return text == base or text.startswith(f"{base}-")
