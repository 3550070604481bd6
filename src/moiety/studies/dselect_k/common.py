"""What the studies of DSelect-k share: gates from settings, runs by the block, facts of the gates.

    done = train_block(runs, make, data, loss=packed_loss(TASKS), score=mean_error, batch=256)
    for run, one in zip(runs, done):
        draw_curve(run, one)
        run.extra |= gate_facts(run.settings, one.model, x, page=on_page(run))

The settings of a run name its gate (see `gate`) and its length, "epochs" or "steps"; a run of the
search trains a quarter of it. Copies in one call of `fit_many` differ in seed and in the settings
of `BATCHED`; runs that differ in others, such as k, go to calls of their own. At scales with fewer
seeds than a block holds, "copies" is their number: the others, which nobody asked for, are not
trained and have no metrics.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ...lab.study import Running, Settings
from ...modes import at_rest
from ...multitask import Outputs
from ...train import fit_many
from .facts import (
    AT_MOST_K,
    POINTS,
    RULES,
    allowed,
    experts_used,
    gate_facts,
    look,
    not_binary,
    on_page,
    share_exact,
)

__all__ = [
    "AT_MOST_K",
    "FRESH",
    "PAPER",
    "Done",
    "allowed",
    "draw_curve",
    "experts_used",
    "gate",
    "gate_facts",
    "look",
    "measure",
    "not_binary",
    "on_page",
    "share_exact",
    "steps_of",
    "train_block",
]

FRESH = 10_000  # the first problem of drawn ones: others were looked at while studies were written
PAPER = "Hazimeh et al. 2021, DSelect-k"  # whose claims are corrected together
BATCHED = {"lr", "width", "entropy", "sparsity", "temperature", "stage"}
OPTIONS = ("k", "codes", "mode")  # of routers, under the same names in the settings
WITHOUT_K = {"softmax", "softmax-static", "gumbel-static"}  # their k only says how many to count
BROKEN = (
    1e12  # added to the score of a batch that breaks the rule: any checkpoint without is better
)

Make = Callable[[Running, int], nn.Module]  # a run and its number of steps -> model
Data = Callable[[Running], tuple[TensorDataset, TensorDataset]]  # train and validation
Score = Callable[[Any, Tensor], Tensor]


def gate(settings: Settings, *, steps: int = 1, seed: int = 0) -> dict[str, Any]:
    """What `MultiGate` is to be told: the router by the name in "gate", its options, its losses.

    Numbers are tensors, so that copies may differ in them. The losses are "entropy" or "sparsity"
    with the weight in the settings; nothing else is added, also no balance to a top-k gate.
    steps, seed: those of the run, for a temperature that falls as long as it lasts, a warm-up over
    the share "warm" of it, and for codes that are drawn.
    """
    words: dict[str, Any] = {name: settings[name] for name in OPTIONS if name in settings}
    if settings["gate"] in WITHOUT_K:
        words.pop("k", None)
    for name in ("width", "temperature"):
        if name in settings:
            words[name] = torch.tensor(float(settings[name]))
    if words.get("mode") == "anneal":
        words["anneal_steps"] = steps
    if "warm" in settings:
        words["warm_steps"] = max(round(settings["warm"] * steps), 1)
    if words.get("codes") == "random":
        words["seed"] = seed
    losses = [name for name in ("entropy", "sparsity") if name in settings]
    balance = {name: torch.tensor(float(settings[name])) for name in losses}
    return {"router": settings["gate"], "balance": balance, **words}


# -- training ------------------------------------------------------------------------------------


@dataclass
class Done:
    """One trained copy."""

    model: Any  # with the weights of `step`
    loss: list[float]  # of every step
    validation: dict[int, float]  # by step, lower is better; where the rule was kept, and of `step`
    step: int  # of the weights that were kept
    steps: int  # of the whole run
    lost: bool  # nothing finite was learned: its metrics are None

    @classmethod
    def nothing(cls) -> Done:
        """Of a run that was not trained."""
        return cls(None, [], {}, 0, 0, True)

    @property
    def score(self) -> float | None:
        """On validation, with the weights that were kept."""
        return None if self.lost else self.validation[self.step]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the runs of a block are trained.

    make      (run, steps) -> model, inside the run's seed
    data      run -> train and validation; give the same objects where runs share them
    score     (outputs, targets) -> mean over examples, lower is better
    keep      "best": the weights of the best of `checks` validations, where those that keep the
              paper's rule (`allowed`) come first, as if each were a run of that length; "last":
              those of the end, with the log of the gates up to there
    at_once   copies in one program; None: all
    """

    make: Make
    data: Data
    loss: Score
    score: Score
    batch: int
    optimizer: str = "adam"
    keep: Literal["best", "last"] = "best"
    checks: int = 4
    at_once: int | None = None


def train_block(runs: Sequence[Running], make: Make, data: Data, **words: Any) -> list[Done]:
    """Train all runs as `Recipe(make, data, **words)` says, one call of `fit_many` for each shape.

    What comes back is in the order of `runs`.
    """
    recipe, groups = Recipe(make=make, data=data, **words), dict[str, list[int]]()
    wanted = runs[: runs[0].settings.get("copies")] if on_page(runs[0]) else runs
    for i, run in enumerate(wanted):
        groups.setdefault(_shape_of(run.settings), []).append(i)
    found: dict[int, Done] = {}
    for ids in groups.values():
        told = functools.partial(_tell, runs, len(found) / len(wanted), len(ids) / len(wanted))
        found |= zip(ids, _train([runs[i] for i in ids], recipe, told), strict=True)
    return [found.get(i) or Done.nothing() for i in range(len(runs))]


def steps_of(settings: Settings, examples: int, batch: int) -> int:
    """How long a run trains; in a search a quarter of it."""
    whole = settings.get("steps") or settings["epochs"] * math.ceil(examples / batch)
    return max(whole // 4, 2) if settings.get("stage") == "tune" else whole


class Copy(int):
    """A seed that knows its run: in a search the same seed comes with many settings."""

    run: Running


def _copy(run: Running) -> Copy:
    copy = Copy(run.seed)
    copy.run = run
    return copy


def _shape_of(settings: Settings) -> str:
    return json.dumps({n: v for n, v in settings.items() if n not in BATCHED}, sort_keys=True)


def _tell(runs: Sequence[Running], start: float, share: float, calls: int) -> Callable[[int], None]:
    """A function that, called so many times, tells the runs fifty times how far the block is."""
    count = itertools.count(1)

    def tick(_: int) -> None:
        done = next(count)
        if done % math.ceil(calls / 50) == 0:
            for run in runs:
                run.tick(start + share * done / calls)

    return tick


def _train(
    runs: Sequence[Running], recipe: Recipe, told: Callable[[int], Callable[[int], None]]
) -> list[Done]:
    """Train runs of one shape."""
    settings, pairs = runs[0].settings, [recipe.data(run) for run in runs]
    train, validation = (_shared([pair[i] for pair in pairs]) for i in (0, 1))
    steps = steps_of(settings, len(pairs[0][0]), recipe.batch)
    checked: dict[str, Any] = {
        "validation": validation,
        "score": _by_rule(settings, recipe.score),
        "every": math.ceil(steps / recipe.checks),
    }
    block = recipe.at_once or len(runs)
    fitted = fit_many(
        lambda seed: recipe.make(seed.run, steps),  # type: ignore[attr-defined]
        train,
        seeds=[_copy(run) for run in runs],
        steps=steps,
        batch=recipe.batch,
        lr=[run.settings["lr"] for run in runs],
        loss=recipe.loss,
        optimizer=recipe.optimizer,
        block=block,
        device=runs[0].device,
        on_step=told(steps * math.ceil(len(runs) / block)),
        **(checked if recipe.keep == "best" else {}),
    )
    whole_S = torch.stack(
        [t.reshape(len(runs), -1).isfinite().all(1) for t in fitted.state.values()]
    ).all(0)
    done = []
    for i, (history, model) in enumerate(zip(fitted.history, fitted.models(), strict=True)):
        lost = not bool(whole_S[i]) or fitted.best_step[i] == 0
        step, seen = fitted.best_step[i], _legal(history.validation)
        if not lost and step not in seen:
            seen[step] = measure(model, pairs[i][1], recipe.score)
        done.append(Done(model, history.loss, seen, step, steps, lost))
    return done


def _shared(sets: list[TensorDataset]) -> TensorDataset | list[TensorDataset]:
    """One set where all copies have the same."""
    return sets[0] if all(one is sets[0] for one in sets) else sets


def _by_rule(settings: Settings, score: Score) -> Score:
    """A score by which any checkpoint that keeps the rule beats all that do not."""

    def ruled(outputs: Outputs, targets: Tensor) -> Tensor:
        value = score(outputs, targets).double()  # so that BROKEN does not swallow it
        return torch.where(allowed(settings, outputs.routings), value, value + BROKEN)

    return ruled if settings.get("gate") in RULES else score


def _legal(validation: dict[int, float]) -> dict[int, float]:
    """The checks in which no batch broke the rule; what the others came to is hidden by BROKEN."""
    return {step: value for step, value in validation.items() if value < BROKEN / 1e6}


@torch.no_grad()
def measure(model: nn.Module, data: TensorDataset, score: Score, batch: int = 4096) -> float:
    """The mean score over a set, in eval mode."""
    device = next(model.parameters()).device
    total = 0.0
    with at_rest(model):
        for x, y in zip(*(t.split(batch) for t in data.tensors)):
            total += float(score(model(x.to(device)), y.to(device))) * len(y)
    return total / len(data)


def draw_curve(run: Running, done: Done, shown: Callable[[float], float] = float) -> None:
    """Write the mean loss since the last point, and what validation said where it was asked.

    shown: what a page shows of a score, where that is not the score itself.
    """
    run.curve.rewind(-1)
    every = math.ceil(done.steps / POINTS) or 1
    points = {*range(every, done.steps + 1, every), *done.validation}
    before = 0
    for step in sorted(points):
        mean = fmean(done.loss[before:step])
        value = shown(done.validation.get(step, math.nan))
        values = {"loss": mean, "validation": value}
        run.curve.append(step, **{n: v if math.isfinite(v) else None for n, v in values.items()})
        before = step
