"""`advise`: try waits, and growing, on what has arrived first; the lab says what it shows.

    makers = {"single": lambda seed: learner("single", model, seed=seed),
              "growing-ensemble": lambda seed: learner("growing-ensemble", model, seed=seed)}
    trials = advise(stream, makers, first=8, seeds=5, out="out/advice", budget=600)
    print(moiety.lab.advice.recommend(trials, margin=0.01))

Each arm (a wait and a learner) goes through mega-batches 1 … m once for each seed. Every arrival is
scored by the model in force, before it is trained on: no other data are looked at, and no test set.
Seeds differ in weights, orders and validation rows; the mega-batches stay as they arrived, so that
a drift in them counts. A wait is at most m/2: from then on every arm has a model.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import io
from ..train.state import read_state, state_bytes
from .base import Learner, Phase
from .data import Batch, Examples, split_rows
from .phases import Memory, fingerprint
from .policies import Replay, read_replay
from .stream import Stream

FEWEST = 4  # mega-batches: with fewer there is no choice of waits
SEEDS = 5  # at least, for an interval

Maker = Callable[[int], Learner]  # a learner from a seed
Arm = tuple[int, str]  # the wait and the name of the learner


@dataclass(frozen=True)
class Trial:
    """One arm with one seed."""

    wait: int
    learner: str
    seed: int
    scores: Tensor  # [all rows of mega-batches 1 … m]: 1 where wrong; of text, the loss
    flops: float  # of training, validation and growth
    seconds: float

    @property
    def arm(self) -> Arm:
        return self.wait, self.learner


@dataclass(frozen=True)
class Trials:
    """What was tried. Only seeds that every arm has finished are in it."""

    arms: list[Arm]
    rows: list[int]  # of mega-batches 1 … m
    metric: str  # "error", or the "loss" of text
    horizon: int | None  # how many mega-batches the stream will have, where that is known
    seeds: int  # that were asked for
    budget: float | None  # seconds
    trials: list[Trial]
    spent: float  # seconds, also of seeds that are not complete
    ended: int = 0  # trials that took so long

    @property
    def done(self) -> list[int]:
        """The seeds that every arm has finished."""
        return sorted({trial.seed for trial in self.trials})

    def of(self, arm: Arm) -> list[Trial]:
        """The trials of an arm, in the order of the seeds."""
        return sorted((t for t in self.trials if t.arm == arm), key=lambda trial: trial.seed)

    def weights(self) -> Tensor:
        """What each row counts for: the mean score over the stream is weights · scores.

        The second half stands for all that comes later, and each time counts alike. How a stream
        starts matters where it has an end: the first half is then as large a part as it really is.
        """
        m, half = len(self.rows), len(self.rows) // 2
        early = 1 / self.horizon if self.horizon else 0.0
        times = [early] * half + [(1 - half * early) / (m - half)] * (m - half)
        rows = torch.tensor(self.rows)
        return (torch.tensor(times, dtype=torch.float64) / rows).repeat_interleave(rows)


def advise(
    stream: Stream,
    makers: Mapping[str, Maker],
    *,
    first: int | None = None,
    seeds: int = SEEDS,
    replay: str | float | Replay = "none",
    out: str | Path | None = None,
    budget: float | None = None,
    on_trial: Callable[[Trial, int, int], None] | None = None,
) -> Trials:
    """Try every arm with every seed on mega-batches 1 … `first`.

    makers    learners by name; the first is the one in use, a second one an alternative to it that
              grows, tried at the waits at which it grows in time to be seen
    out       keeps each trial as it ends, so that the same call goes on where it was stopped
    budget    seconds, over all trials: a trial that would begin later does not
    on_trial  called with a trial, its number and how many there are
    """
    if seeds < SEEDS:
        raise ValueError(f"an interval takes at least {SEEDS} seeds, got {seeds}")
    batches = [stream[number] for number in range(1, _first(stream, first) + 1)]
    arms = _arms(len(batches), list(makers))
    for make in makers.values():
        make(0)  # says now what is wrong with an option
    store = _Store(None if out is None else Path(out), batches)
    ended: list[Trial] = []
    todo = [(seed, arm) for seed in range(seeds) for arm in arms]
    for number, (seed, (wait, name)) in enumerate(todo, start=1):
        run = _Run(batches, stream, makers[name](seed), wait, name, seed, read_replay(replay))
        trial = store.load(run)
        if trial is None:
            if budget is not None and sum(t.seconds for t in ended) >= budget:
                break
            trial = run.run()
            store.save(run, trial)
        ended.append(trial)
        if on_trial:
            on_trial(trial, number, len(todo))
    whole = {s for s in range(seeds) if sum(t.seed == s for t in ended) == len(arms)}
    return Trials(
        arms=arms,
        rows=[batch.rows for batch in batches],
        metric="loss" if batches[0].train.y.dim() > 1 else "error",
        horizon=stream.batches,
        seeds=seeds,
        budget=budget,
        trials=[trial for trial in ended if trial.seed in whole],
        spent=math.fsum(trial.seconds for trial in ended),
        ended=len(ended),
    )


def _first(stream: Stream, first: int | None) -> int:
    known = stream.known()
    m = min(known, 8) if first is None else first
    if not FEWEST <= m <= known:
        asked = "" if first is None else f"; first must lie between, got {first}"
        raise ValueError(
            f"advice takes {FEWEST} mega-batches or more, and {known} have arrived{asked}"
        )
    return m


def waits_up_to(m: int) -> list[int]:
    """1, 2, 4, … and m/2."""
    return sorted({2**i for i in range(m.bit_length()) if 2 ** (i + 1) <= m} | {m // 2})


def _arms(m: int, names: Sequence[str]) -> list[Arm]:
    waits = waits_up_to(m)
    # What grows does so before its second phase, which must come in time to be scored.
    late = [(wait, name) for name in names[1:] for wait in waits if 2 * wait < m]
    return [*((wait, names[0]) for wait in waits), *late]


class _Run:
    """One arm on its way through the mega-batches."""

    def __init__(
        self,
        batches: Sequence[Batch],
        stream: Stream,
        learner: Learner,
        wait: int,
        name: str,
        seed: int,
        replay: Replay,
    ) -> None:
        self.batches, self.learner, self.wait, self.name = batches, learner, wait, name
        self.seed, self.replay, self.classes = seed, replay, stream.classes
        self.validation = stream.validation
        self.words = self._words()  # now: a learner may grow

    def _words(self) -> dict[str, Any]:
        """What decides the result, besides the data."""
        own = {"wait": self.wait, "name": self.name, "trial": self.seed, "replay": str(self.replay)}
        model = {"parameters": self.learner.parameters(), "validation": self.validation}
        return {**self.learner.words(), **model, **own}

    def run(self) -> Trial:
        start, scores, waiting, phase, flops = time.monotonic(), [], [], 0, 0.0
        memory = Memory(self.replay, self.seed)
        for batch, rows in self._split():
            scores.append(self._score(rows, phase))
            waiting.append(batch)
            # What the last mega-batch would teach, none is left to score.
            if len(waiting) < self.wait or batch.number == len(self.batches):
                continue
            phase += 1
            train, held = memory.use(phase, waiting)
            report = self.learner.train(
                Phase(train=train, validation=held, number=phase, seed=self.seed)
            )
            flops += sum(report.flops[word] for word in ("train", "validation", "growth"))
            waiting = []
        seconds = time.monotonic() - start
        return Trial(self.wait, self.name, self.seed, torch.cat(scores), flops, seconds)

    def _split(self) -> Iterator[tuple[Batch, Examples]]:
        """The mega-batches with validation rows of this seed, and all rows in one order."""
        for batch in self.batches:
            rows = Examples.join([batch.train, batch.validation])
            train, held = split_rows(len(rows), self.validation, self.seed, batch.number)
            yield Batch(batch.number, batch.name, rows.take(train), rows.take(held)), rows

    def _score(self, rows: Examples, phase: int) -> Tensor:
        """The score of each row by the model in force; by chance, before there is one."""
        text = rows.y.dim() > 1
        if not phase:
            level = math.log(self.classes) if text else 1 - 1 / self.classes
            return torch.full((len(rows),), level, dtype=torch.float64)
        parts = []
        for x, y in zip(rows.x.split(256), rows.y.split(256)):
            p = self.learner.predict(x)
            if text:
                true = p.gather(-1, y[..., None]).clamp(min=torch.finfo(p.dtype).tiny)
                parts.append(-true.double().log().flatten(1).mean(1))
            else:
                parts.append((p.argmax(-1) != y).double())
        return torch.cat(parts)


class _Store:
    """Trials on disk, named after all that decides them."""

    def __init__(self, out: Path | None, batches: Sequence[Batch]) -> None:
        self.out = out
        parts = [part for batch in batches for part in (batch.train, batch.validation)]
        self.data = fingerprint(*parts) if out else ""

    def path(self, run: _Run) -> Path:
        assert self.out is not None
        words = json.dumps([self.data, run.words], sort_keys=True)
        return self.out / "trials" / f"{hashlib.sha256(words.encode()).hexdigest()[:24]}.trial"

    def load(self, run: _Run) -> Trial | None:
        if self.out is None or not self.path(run).exists():
            return None
        return Trial(run.wait, run.name, run.seed, **read_state(self.path(run)))

    def save(self, run: _Run, trial: Trial) -> None:
        if self.out is not None:
            what = {word: getattr(trial, word) for word in ("scores", "flops", "seconds")}
            io.write_atomic(self.path(run), state_bytes(what))
