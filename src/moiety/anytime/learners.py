"""Learners of fixed size by name: one model, an ensemble, a uniform mixture.

learner("single", lambda seed: MLP(64))                       # SM
learner("ensemble", lambda seed: MLP(64), members=3)          # Ens: losses of their own
learner("mixture", lambda seed: MLP(64), members=3)           # UMix: one loss on mean logits

With members = 1 the three are equal to the bit. The ones that grow are in `growing` and `trees`.
(ALMA, Caccia et al. 2022; digest 4, section 3.2. Its code sums the logits of UMix and averages
those of its growing ensemble; here, as in its text, logits are averaged and so are probabilities.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..data.targets import near
from .base import Learner, Phase
from .together import check_together, fit_together


class Single(Learner):
    """One model.

    start   "warm": each phase goes on from the weights of the last; "scratch": from new ones
    """

    name = "single"
    options: ClassVar[tuple[str, ...]] = ("start",)

    def __init__(
        self,
        model: Callable[[int], nn.Module],
        *,
        start: Literal["warm", "scratch"] = "warm",
        **common: Any,
    ) -> None:
        if start not in ("warm", "scratch"):
            raise ValueError(f'start must be "warm" or "scratch", got {start!r}')
        if start == "scratch" and common.get("optimizer") == "carry":
            raise ValueError('optimizer="carry" goes with start="warm": new weights have no past')
        self.start = start
        super().__init__(model, **common)

    def begin(self, phase: Phase) -> None:
        if self.start == "scratch":
            self.models = [self.build(i, self.phases) for i in range(len(self.models))]


class Ensemble(Single):
    """Models with losses, orders and best weights of their own; their probabilities are averaged.

    members    how many
    together   train them in one program, by `train.fit_many`: the same to round-off, and faster on
               a GPU; a phase that is killed then begins again
    """

    name = "ensemble"
    options: ClassVar[tuple[str, ...]] = ("start", "members", "together")

    def __init__(
        self,
        model: Callable[[int], nn.Module],
        *,
        members: int = 3,
        together: bool = False,
        **common: Any,
    ) -> None:
        if not isinstance(members, int) or members < 1:
            raise ValueError(f"members must be a whole number, at least 1, got {members!r}")
        self.members, self.together = members, together
        super().__init__(model, **common)
        if together:
            check_together(self.training)
            if self.optimizer == "carry":
                raise ValueError('optimizer="carry" goes with together=False')

    def count(self) -> int:
        return self.members

    def _train(self, phase: Phase, saved: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        if not self.together:
            return super()._train(phase, saved)
        fits = [self._fit(i, phase, None) for i in self.trained()]
        fit_together(fits, phase.tick)
        return [self._done(fit) for fit in fits]


class Mixture(Ensemble):
    """Models trained by one loss on the mean of their logits.

    So the gradient of a member depends on the answers of the others.

    members    how many
    """

    name = "mixture"
    options: ClassVar[tuple[str, ...]] = ("start", "members")

    def __init__(
        self, model: Callable[[int], nn.Module], *, members: int = 3, **common: Any
    ) -> None:
        if "together" in common:
            raise ValueError("a mixture has one loss, so its members always train together")
        super().__init__(model, members=members, **common)

    def count(self) -> int:
        return 1  # the mean of all members is one model

    def build(self, i: int, phase: int = 0) -> nn.Module:
        return Mean([super(Mixture, self).build(member, phase) for member in range(self.members)])


class Mean(nn.Module):
    """The mean of the logits of some models."""

    def __init__(self, members: list[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members]).mean(0)


def learners() -> dict[str, type[Learner]]:
    """All learners by name: every subclass of `Learner` with a name of its own is one."""
    from . import growing, trees  # noqa: F401  # those that grow are built on these

    found: dict[str, type[Learner]] = {}
    todo = [Learner]
    while todo:
        for kind in todo.pop().__subclasses__():
            todo.append(kind)
            if "name" in vars(kind):
                found[kind.name] = kind
    return found


def learner(name: str, model: Callable[[int], nn.Module], **options: Any) -> Learner:
    """Make a learner by name; `model` makes a model from a seed.

    Options of all: seed, device, training (a `Training`), optimizer ("fresh" or "carry"), meter.
    The others are those of its class: `print(learners()[name].__doc__)`.
    """
    known = learners()
    check_name(name, known)
    try:
        return known[name](model, **options)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None:
            raise
        word, has = unknown[1], options_of(known[name])
        raise ValueError(
            f"learner {name!r} has no option {word!r}; it has {', '.join(has)}{near(word, has)}"
        ) from None


def check_name(name: str, known: Iterable[str]) -> None:
    """Raise for a name that is none of the known ones."""
    names = sorted(known)
    if name not in names:
        close = get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise ValueError(f"no learner is named {name!r}{hint} Names: {', '.join(names)}")


def options_of(kind: type[Learner]) -> list[str]:
    """The options of a learner, its own first; without what each of them is given anyway."""
    without = ["seed", "device", "training", "meter"]
    if issubclass(kind, Mixture):
        without.append("together")  # which it refuses
    found: dict[str, None] = {}  # a set with an order
    for each in kind.__mro__:
        if "__init__" in vars(each) and issubclass(each, Learner):
            words = signature(each.__init__).parameters.values()
            found |= {word.name: None for word in words if word.kind is Parameter.KEYWORD_ONLY}
    return [word for word in found if word not in without]
