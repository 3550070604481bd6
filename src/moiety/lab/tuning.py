"""Search for settings: the same number of trials for every arm, chosen on validation only.

    search = Search(
        space={"lr": LogUniform(1e-4, 1e-1), "epochs": Choice([25, 50])},
        spaces={"dselect-k": {"entropy": Choice([0.01, 0.1, 1.0])}},   # of that arm alone
        trials={"smoke": 2, "small": 12, "full": 50},
        metric="validation accuracy",
        rule=lambda record: None if record["extra"]["binary"] else "selectors are not binary",
    )

`Study(search=search, …)`: the lab runs the search first, then each arm with what was chosen for it.
Draw number i of a setting is the same for every arm that has it, so that arms are compared on the
same rates. A setting that is drawn again (a grid has few) runs with new seeds, and its trials count
together. There is no state but the records of the trials: a killed search goes on from them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from .sampling import SAMPLERS, Choice, Integers, LogUniform, Range, Uniform
from .store import Store, Trial
from .study import Settings, Study

__all__ = ["Choice", "Integers", "LogUniform", "Search", "Tuner", "Uniform"]

FIRST_SEED = 2_000_000  # far from those of the main trials, on which nothing is chosen

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched, how long, and by which number the best is chosen."""

    space: Mapping[str, Range]
    trials: int | Mapping[str, int]  # settings per arm; a mapping gives one for each scale
    metric: str  # one of the study's metrics, of split "validation"
    spaces: Mapping[str, Mapping[str, Range]] = field(default_factory=dict)  # of single arms
    rule: Callable[[Record], str | None] | None = None  # record -> why it is discarded, or None
    sampler: Literal["random", "optuna"] = "random"
    seeds: int = 1  # per setting; their mean counts
    seed: int = 0  # of the draws

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise ValueError(f"the sampler is one of {', '.join(SAMPLERS)}, not {self.sampler!r}")
        if self.seeds < 1:
            raise ValueError(f"a setting needs at least one seed, not {self.seeds}")
        for space in (self.space, *self.spaces.values()):
            for name, values in space.items():
                if not hasattr(values, "at"):
                    raise ValueError(
                        f"the search over {name!r} is {values!r}: "
                        "give a Choice, Uniform, LogUniform or Integers"
                    )

    def of(self, arm: str) -> dict[str, Range]:
        """What is searched for an arm."""
        return {**self.space, **self.spaces.get(arm, {})}

    def count(self, scale: str) -> int:
        """How many settings each arm gets at a scale."""
        count = self.trials if isinstance(self.trials, int) else self.trials.get(scale, 0)
        if count < 1:
            raise ValueError(f"the search has no trials at scale {scale!r}: give at least one")
        return count


@dataclass(frozen=True)
class Draw:
    """One setting that is tried for an arm, by one trial a seed."""

    settings: dict[str, Any]
    trials: list[Trial]


@dataclass
class Outcome:
    """What all draws of one setting came to."""

    settings: dict[str, Any]
    draws: int = 0
    values: list[float] = field(default_factory=list)
    reason: str | None = None  # the first of the trials' reasons to discard it


class Tuner:
    """The search of one study, as far as the records in its store go.

    tuner = Tuner(study, scale="small", make=lambda arm, seed, tuned: Trial(…))
    while blocks := tuner.next(store):    # a block is what one worker runs at once
        …                                 # run each, and record those of its trials that are new
    tuner.chosen(store)                   # {"dense": {"lr": 0.01}, …}; None where all are discarded
    tuner.account(store)                  # for the page
    """

    def __init__(
        self,
        study: Study,
        *,
        scale: str,
        make: Callable[[str, int, Settings], Trial],
        arms: Sequence[str] | None = None,
    ) -> None:
        self.study, self.make = study, make
        self.search: Search = study.search
        self.arms = list(study.arms if arms is None else arms)
        self.count = self.search.count(scale)
        _check_metric(study, self.search.metric)
        _check_arms(study, self.search)
        self.sign = 1.0 if study.metrics[self.search.metric].better == "higher" else -1.0

    def next(self, store: Store) -> list[list[Trial]]:
        """The blocks of trials to run now; none when the search has ended.

        Blocks are fixed, so that a block may hold trials that have ended: it runs whole all the
        same, because numbers may depend on the size of a block. A trial that raised has ended.
        """
        records, blocks = _ended(store), []
        size = self.study.block if self.study.run_block else 1
        for arm in self.arms:
            for batch in self._batches(arm, records):
                trials = [trial for draw in batch for trial in draw.trials]
                blocks += [trials[i : i + size] for i in range(0, len(trials), size)]
        return [block for block in blocks if any(trial.key not in records for trial in block)]

    def chosen(self, store: Store) -> dict[str, dict[str, Any] | None]:
        """The best settings of each arm; None for an arm all of whose settings were discarded."""
        if self.next(store):
            raise ValueError("the search has not ended: run what `next` gives first")
        records = _ended(store)
        best = {arm: self._best(self._draws(arm, records), records) for arm in self.arms}
        return {arm: found.settings if found else None for arm, found in best.items()}

    def account(self, store: Store) -> dict[str, Any]:
        """What was tried, discarded and chosen, and the best value after 1, 2, … settings."""
        records, search = _ended(store), self.search
        alike: dict[tuple[str, str], list[str]] = {}
        for arm in self.arms:
            for setting in _texts(search.spaces.get(arm, {})).items():
                alike.setdefault(setting, []).append(arm)
        own = {f"{name} ({_some(arms)})": text for (name, text), arms in alike.items()}
        return {
            "trials": self.count,
            "seeds": search.seeds,
            "metric": search.metric,
            "sampler": search.sampler,
            "space": _texts(search.space) | own,
            "arms": {arm: self._account(arm, records) for arm in self.arms},
        }

    def _account(self, arm: str, records: Mapping[str, Record]) -> dict[str, Any]:
        draws = self._draws(arm, records)
        discarded: Counter[str] = Counter()
        for outcome in self._outcomes(draws, records):
            if outcome.reason:
                discarded[outcome.reason] += outcome.draws
        running = [self._best(draws[: n + 1], records) for n in range(len(draws))]
        last = running[-1] if running else None
        account = {
            "tried": len(draws),
            "discarded": dict(discarded),
            "space": _texts(self.search.of(arm)),
            "chosen": last.settings if last else None,
            "best": [fmean(found.values) if found else None for found in running],
        }
        if last is None:
            reasons = ", ".join(f"{n} × {reason}" for reason, n in discarded.items())
            account["failure"] = (
                f"no setting of {arm} is left of {len(draws)} ({reasons or 'none was run'}): "
                "search a wider space, or more trials."
            )
        return account

    # -- what is tried ---------------------------------------------------------------------------

    def _draws(self, arm: str, records: Mapping[str, Record]) -> list[Draw]:
        """The settings of an arm that have been tried."""
        draws = [draw for batch in self._batches(arm, records) for draw in batch]
        return [draw for draw in draws if all(trial.key in records for trial in draw.trials)]

    def _batches(self, arm: str, records: Mapping[str, Record]) -> list[list[Draw]]:
        """The settings of an arm so far: the sampler hears of the records again from the start."""
        search, batches = self.search, []
        drawn: Counter[str] = Counter()
        sampler = SAMPLERS[search.sampler](search.of(arm), search.seed, self.count)
        proposals = next(sampler)
        while True:
            batches.append([self._draw(arm, settings, drawn) for settings in proposals])
            if any(trial.key not in records for draw in batches[-1] for trial in draw.trials):
                return batches
            try:
                proposals = sampler.send([self._answer(draw, records) for draw in batches[-1]])
            except StopIteration:
                return batches

    def _draw(self, arm: str, settings: dict[str, Any], drawn: Counter[str]) -> Draw:
        first = FIRST_SEED + drawn[_name(settings)] * self.search.seeds
        drawn[_name(settings)] += 1
        seeds = range(first, first + self.search.seeds)
        return Draw(settings, [self.make(arm, seed, settings) for seed in seeds])

    def _answer(self, draw: Draw, records: Mapping[str, Record]) -> float | None:
        """What the sampler is told of a draw."""
        (outcome,) = self._outcomes([draw], records)
        return None if outcome.reason else self.sign * fmean(outcome.values)

    # -- what came of it -------------------------------------------------------------------------

    def _best(self, draws: Sequence[Draw], records: Mapping[str, Record]) -> Outcome | None:
        """The best setting of these draws that no rule discards; the first of equal ones."""
        left = [outcome for outcome in self._outcomes(draws, records) if not outcome.reason]
        return max(left, key=lambda outcome: self.sign * fmean(outcome.values), default=None)

    def _outcomes(self, draws: Sequence[Draw], records: Mapping[str, Record]) -> list[Outcome]:
        """The outcome of each setting, in the order in which they were first drawn."""
        found: dict[str, Outcome] = {}
        for draw in draws:
            outcome = found.setdefault(_name(draw.settings), Outcome(draw.settings))
            outcome.draws += 1
            for record in (records[trial.key] for trial in draw.trials):
                reason = self._reason(record)
                outcome.reason = outcome.reason or reason
                if reason is None:
                    outcome.values.append(record["metrics"][self.search.metric])
        return list(found.values())

    def _reason(self, record: Record) -> str | None:
        """Why a trial is discarded, or None."""
        if record["status"] == "failed":
            lines = record["extra"].get("traceback", "").strip().splitlines() or ["an error"]
            return f"raised {lines[-1].split(':')[0]}"
        if record["metrics"].get(self.search.metric) is None:
            return f"has no {self.search.metric}"
        return self.search.rule(record) if self.search.rule else None


def without_settings(account: Mapping[str, Any] | None) -> dict[str, str]:
    """Why they are not measured, for the arms all of whose settings a search discarded."""
    arms = account["arms"] if account else {}
    return {arm: found["failure"] for arm, found in arms.items() if "failure" in found}


def _some(arms: Sequence[str], most: int = 3) -> str:
    """Arms by name, or the first of many."""
    if len(arms) <= most:
        return ", ".join(arms)
    return f"{arms[0]} and {len(arms) - 1} others"


def _texts(space: Mapping[str, Range]) -> dict[str, str]:
    return {name: str(values) for name, values in space.items()}


def _name(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def _ended(store: Store) -> dict[str, Record]:
    return {**store.finished(), **store.failed()}


# -- what the caller gave ------------------------------------------------------------------------


def _check_metric(study: Study, name: str) -> None:
    metric = study.metrics.get(name)
    if metric is None:
        raise ValueError(
            f"study {study.name!r}: the search names the metric {name!r}; there are "
            f"{', '.join(study.metrics)}"
        )
    if metric.split != "validation" or not metric.better:
        raise ValueError(
            f"study {study.name!r}: settings are chosen on validation data only; {name!r} is of "
            f'split {metric.split!r}, better {metric.better!r}: give a metric of split "validation"'
        )


def _check_arms(study: Study, search: Search) -> None:
    for arm in search.spaces:
        if arm not in study.arms:
            raise ValueError(
                f"study {study.name!r}: the search has a space for the arm {arm!r}; there are "
                f"{', '.join(study.arms)}"
            )
    for arm, settings in study.arms.items():
        for name in settings.keys() & search.of(arm).keys():
            raise ValueError(
                f"study {study.name!r}: arm {arm!r} fixes {name!r}, which is searched: take it out "
                "of the arm; a Choice of one value in the arm's own space keeps it fixed"
            )
