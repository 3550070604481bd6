"""What one process measures of an audit, as tensors with a row for each of its examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..watch import Routes, watch
from .apgd import APGD
from .attack import Attacked, Attacks, batches, run_attack
from .attribution import Parts, attribute, freeze
from .ball import Ball, Norm
from .coupling import coupled
from .lipschitz import measure_lipschitz
from .masking import Evidence, find_evidence
from .noise import Noise
from .parallel import here, join
from .routes import Use, change_per_example, use
from .search import RandomSearch, Transfer
from .target import Bounds, Target, correct

Tick = Callable[[str], None]  # one part of the work begins


@dataclass
class Answers:
    """Of one set of inputs: by example, and what the experts did."""

    wrong: Tensor
    loss: Tensor
    top: Tensor
    change: dict[str, Tensor] = field(default_factory=dict)  # routing change by layer
    use: dict[str, Use] = field(default_factory=dict)


@dataclass
class Doors:
    """The attribution at one eps: parts by example, and who is wrong with frozen routes."""

    choices: Parts
    weights: Parts
    wrong_choices: Tensor
    wrong_weights: Tensor


@dataclass
class Work:
    """All that a process measured."""

    clean: Answers
    again: list[Answers]  # clean once more, to see how much a run differs from the next
    attacked: dict[str, list[Answers]]  # by attack and eps
    seconds: dict[str, float]
    doors: list[Doors]
    evidence: Evidence
    lipschitz: dict[str, Any] | None
    classes: int


@dataclass(frozen=True)
class Plan:
    """What is to be measured; see `audit`."""

    target: Target
    x: Tensor
    y: Tensor
    ids: Tensor  # the numbers of these examples among all
    eps: list[float]
    attacks: Mapping[str, Attacks]
    norm: Norm
    bounds: Bounds
    batch: int
    group: int
    seed: int
    steps: int  # of the attacks that look for masked gradients
    source: Target | None
    main: str | None  # the attack whose doors are looked at
    masking: int
    lipschitz: int
    first: Tensor  # the first examples of all, the same in every process
    repeats: int
    layers: list[str]
    why: str | None  # the examples of a batch influence each other

    def parts(self) -> int:
        """How often `do` ticks."""
        doors = len(self.eps) if self.main and self.layers else 0
        return 1 + len(self.attacks) * len(self.eps) + doors + 2

    # -- batches ---------------------------------------------------------------------------------

    def rows(self, among: Tensor | None = None) -> Iterator[Tensor]:
        """Batches of whole groups, or one group a batch where examples influence each other."""
        among = torch.arange(len(self.x)) if among is None else among
        for rows in batches(len(among), self.batch, self.group, alone=self.why is not None):
            yield among[rows]

    def there(self, t: Tensor) -> Tensor:
        return t.to(self.target.device or t.device)

    def at(self, rows: Tensor, x: Tensor | None = None) -> tuple[Tensor, Tensor, Noise]:
        x = self.x if x is None else x
        noise = Noise(self.seed, self.there(self.ids[rows]))
        return self.there(x[rows]), self.there(self.y[rows]), noise

    def run(self, attack: Attacks, eps: float, seed: int | None = None) -> Attacked:
        return run_attack(
            attack,
            self.target,
            self.x,
            self.y,
            eps,
            norm=self.norm,
            bounds=self.bounds,
            batch=self.batch,
            group=self.group,
            seed=self.seed if seed is None else seed,
            ids=self.ids,
        )


def couples(target: Target, x: Tensor) -> str | None:
    """Why the examples of a batch influence each other, if they do."""
    return coupled(target, x[:1].to(target.device or x.device))


def layers_of(target: Target) -> list[str]:
    """The names of the MoE layers; none for a dense model."""
    try:
        with watch(target.model) as routes:
            return routes.layers
    except ValueError:
        return []


def do(plan: Plan, tick: Tick = lambda what: None) -> Work:
    """Measure everything; the model is left as it was found."""
    with plan.target.at_rest():
        torch.manual_seed(plan.seed)  # for a random router; what was before comes back
        tick("clean")
        base = plan.run(_Clean(), 0.0)
        known: list[Routes] = []
        clean = _answers(plan, base, known)
        others = range(plan.seed + 1, plan.seed + plan.repeats)  # seeds: a random router shows
        again = [_answers(plan, plan.run(_Clean(), 0.0, seed), known) for seed in others]
        attacked, seconds, doors = _attack(plan, known, tick)
        tick("masked gradients")
        evidence = _evidence(plan, attacked)
        tick("Lipschitz constants")
        lipschitz = _lipschitz(plan)
        with torch.no_grad():
            classes = plan.target(plan.there(plan.first[:1])).logits.shape[-1]
    return Work(clean, again, attacked, seconds, doors, evidence, lipschitz, classes)


class _Clean:
    """The attack that does nothing."""

    name = "clean"

    def __call__(self, target: Target, x: Tensor, *given: Any, **words: Any) -> Tensor:
        return x


def _answers(plan: Plan, found: Attacked, known: list[Routes]) -> Answers:
    """What a run came to, with the routes against those of the clean input.

    The first call of all is the clean one, and fills `known`.
    """
    answers = Answers(found.fooled.cpu(), found.loss.double().cpu(), found.prediction.cpu())
    if not plan.layers:
        return answers
    parts = []
    for number, rows in enumerate(plan.rows()):
        with torch.no_grad():
            routes = plan.target.watching("choice")(plan.at(rows, found.x)[0]).routes
        assert routes is not None
        if number == len(known):
            known.append(routes)
        change = change_per_example(known[number], routes, len(rows))
        parts.append(({name: c.cpu() for name, c in change.items()}, use(routes)))
    answers.change, answers.use = (join(list(column)) for column in zip(*parts))
    return answers


def _attack(
    plan: Plan, known: list[Routes], tick: Tick
) -> tuple[dict[str, list[Answers]], dict[str, float], list[Doors]]:
    attacked: dict[str, list[Answers]] = {}
    seconds: dict[str, float] = {}
    doors = []
    for name, attack in plan.attacks.items():
        attacked[name], seconds[name] = [], 0.0
        for eps in plan.eps:
            tick(f"{name}, eps {eps:.3g}")
            found = plan.run(attack, eps)
            attacked[name].append(_answers(plan, found, known))
            seconds[name] += found.seconds
            if name == plan.main and plan.layers:
                tick(f"the doors of {name}, eps {eps:.3g}")
                doors.append(_doors(plan, attack, found))
    return attacked, seconds, doors


def _doors(plan: Plan, attack: Attacks, found: Attacked) -> Doors:
    parts = []
    for rows in plan.rows():
        x, y, noise = plan.at(rows)
        x_adv = plan.at(rows, found.x)[0]
        choices, weights = (attribute(plan.target, x, x_adv, y, weights=w) for w in (False, True))
        wrong = [_frozen(plan, attack, x, y, noise, found.eps, w) for w in (False, True)]
        parts.append(Doors(choices.cpu(), weights.cpu(), *wrong))
    return join(parts)


def _frozen(
    plan: Plan, attack: Attacks, x: Tensor, y: Tensor, noise: Noise, eps: float, weights: bool
) -> Tensor:
    """`[B]`: wrong after an attack that was made against the model with its clean routes."""
    frozen, ball = freeze(plan.target, x, weights=weights), Ball(eps, plan.norm, plan.bounds)
    with torch.no_grad():
        wrong = ~correct(frozen(x).logits, y)
        if eps == 0:
            return wrong.cpu()
        # The routes belong to these rows, so that none may leave early.
        x_adv = attack(frozen, x, y, ball, noise, group=min(plan.group, len(x)))
        after = ~correct(frozen(ball.project(x_adv, x)).logits, y)
    # With groups an example may be given up for others; alone it is never worse than clean.
    return (after if plan.group > 1 else wrong | after).cpu()


def _evidence(plan: Plan, attacked: dict[str, list[Answers]]) -> Evidence:
    """Signs of masked gradients on the first examples, at the largest eps."""
    place = plan.eps.index(max(plan.eps))
    free = [n for n, a in plan.attacks.items() if isinstance(a, (RandomSearch, Transfer))]
    by_gradient = [found[place].wrong for n, found in attacked.items() if n not in free]
    kept = ~torch.stack(by_gradient).any(0) if by_gradient else None
    ball = Ball(plan.eps[place], plan.norm, plan.bounds)
    attack, search = APGD(steps=plan.steps), RandomSearch(steps=2 * plan.steps)  # as much work
    parts = []
    for rows in plan.rows((plan.ids < plan.masking).nonzero()[:, 0]):
        x, y, noise = plan.at(rows)
        one = find_evidence(
            plan.target,
            x,
            y,
            ball,
            noise,
            strongest=None if kept is None else plan.there(kept[rows]),
            source=plan.source,
            attack=attack,
            search=search,
            routes=bool(plan.layers),
            group=min(plan.group, len(x)),
        )
        parts.append(one.cpu())
    return join(parts) if parts else Evidence.nothing()


def _lipschitz(plan: Plan) -> dict[str, Any] | None:
    """Of the first examples, in the first process alone."""
    if not plan.lipschitz or here()[0]:
        return None
    count = min(plan.lipschitz, plan.group) if plan.why else plan.lipschitz
    return measure_lipschitz(plan.target, plan.there(plan.first[:count]))
