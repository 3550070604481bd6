"""What a check is, what it is run on, and how two decisions are compared."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..routing import Router, Routing, balance, build_router, describe

DIM = 16


def need(condition: object, seen: str) -> None:
    """Fail a check, saying what was seen."""
    if not bool(condition):
        raise AssertionError(seen)


@dataclass(frozen=True)
class Check:
    """One named demand. Called with what `subjects` takes, it is made on each subject."""

    run: Callable[[Any], None]
    subjects: Callable[..., Iterable[object]]

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def doc(self) -> str:
        return (inspect.getdoc(self.run) or "").split("\n", 1)[0]

    def __str__(self) -> str:
        return self.name

    def __call__(self, *what: object, **options: object) -> None:
        # Seeds are set at will below; the caller's random numbers go on as if nothing happened.
        with torch.random.fork_rng(devices=[]):
            for subject in self.subjects(*what, **options):
                self._try(subject)

    def _try(self, subject: object) -> None:
        try:
            self.run(subject)
        except AssertionError as seen:
            raise AssertionError(f"{subject} fails {self.name}: {seen}") from None
        except Exception as error:
            raised = f"raised {type(error).__name__}: {error}"
            raise AssertionError(f"{subject} fails {self.name}: {raised}") from error


@dataclass(frozen=True)
class Case:
    """A registered router with some of its options."""

    name: str
    options: dict[str, object]

    def __str__(self) -> str:
        options = ", ".join(f"{o}={v!r}" for o, v in self.options.items())
        return f"router {self.name!r}" + (f" with {options}" if options else "")

    def build(self, experts: int = 8, seed: int = 0) -> Router:
        torch.manual_seed(seed)
        return build_router(self.name, dim=DIM, experts=experts, **self.options)

    def build_for(self, experts: int) -> Router | None:
        """The router for a few experts, its whole numbers lowered to them if it must be so; None
        where it refuses still."""
        known = {o: option.default for o, option in describe(self.name).options.items()}
        whole = {o: v for o, v in {**known, **self.options}.items() if type(v) is int}
        fewer = {o: experts for o, v in whole.items() if v > experts}
        for options in (self.options, {**self.options, **fewer}):
            try:
                return Case(self.name, options).build(experts)
            except ValueError:
                continue
        return None

    def with_alternatives(self) -> list[tuple[str, Case, Case]]:
        """For each option that is not held fixed: its name, the case without and with its `alt`."""
        found = []
        for name, option in describe(self.name).options.items():
            if name not in self.options:
                plain = Case(self.name, {**self.options, **option.rule.given})
                found.append(
                    (name, plain, Case(self.name, {**plain.options, name: option.rule.alt}))
                )
        return [pair for pair in found if not self.options or pair[2].can_build()]

    def can_build(self) -> bool:
        """Whether these options go together: those held fixed may rule out an alternative."""
        try:
            self.build()
        except ValueError:
            return False
        return True


def once(name: str, **options: object) -> list[Case]:
    """The router with the given options."""
    return [Case(name, options)]


def variants(name: str, **options: object) -> list[Case]:
    """The router with the given options, and with each other option's `alt` besides."""
    case = Case(name, options)
    return [case, *(changed for _, _, changed in case.with_alternatives())]


def tokens(count: int, seed: int = 0) -> Tensor:
    """`[count, DIM]` normal numbers, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, DIM, generator=generator)


def call(
    router: Router, x_TD: Tensor, mask: Tensor | None = None, group: int | None = None
) -> Routing:
    """The router's decision; where it needs token ids, ids that follow from the tokens."""
    ids = None
    if router.needs_ids:
        ids = (x_TD[:, 0].nan_to_num().clamp(-1e6, 1e6) * 1000).long().abs()
    return router(x_TD, mask, ids, group)


def mode(training: bool) -> str:
    return "train" if training else "eval"


def state(module: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers, those that are not saved included."""
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: t.detach().clone() for name, t in found.items()}


def losses(r: Routing) -> dict[str, Tensor]:
    """Every balance loss that this decision has, and the router's own penalties."""
    found = dict(r.penalties)
    for name, loss in balance.LOSSES.items():
        try:
            found[name] = loss(r)
        except ValueError:  # this router lacks what the loss is made of
            continue
    return found


def objective(r: Routing) -> Tensor:
    """A scalar that all weights, losses and penalties of a decision take part in."""
    pattern = torch.linspace(-1, 1, r.weight.numel(), dtype=r.weight.dtype)
    return (r.weight * pattern.view_as(r.weight)).sum() + sum(losses(r).values())


def descend(router: Router, loss: Tensor, rate: float = 0.05) -> None:
    """One step of gradient descent on the router."""
    learned = [p for p in router.parameters() if p.requires_grad]
    if not loss.requires_grad:
        return
    gradients = torch.autograd.grad(loss, learned, allow_unused=True)
    with torch.no_grad():
        for p, g in zip(learned, gradients, strict=True):
            if g is not None:
                p.sub_(rate * g)


def same(a: object, b: object) -> bool:
    """Equal to the bit, in type and shape too."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def differing(a: Routing, b: Routing) -> list[str]:
    """The fields in which two decisions are not equal to the bit."""
    names = [f.name for f in dataclasses.fields(Routing)]
    return [name for name in names if not same(getattr(a, name), getattr(b, name))]
