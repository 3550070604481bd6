"""`walk`: a learner over the mega-batches of a study, inside one trial, with its ledger.

lines = walk(learner, corpus.batches, corpus.test, seed=0, metric="perplexity", checkpoint=…)
summary(lines).average                           # of `anytime.ledger`

Every mega-batch is a phase (waiting time 1). The lines are those of `anytime.run_stream`, but
nothing except a checkpoint goes to disk: a trial that is killed goes on to the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...anytime.base import Learner, Phase
from ...anytime.data import Batch, Examples
from ...anytime.ledger import Line, score
from ...train.loop import Checkpoint

Tick = Callable[[float], None]


class Under:
    """The checkpoint of one part of a trial, saved together with what the parts before it gave."""

    def __init__(self, checkpoint: Checkpoint, before: Any) -> None:
        self.checkpoint, self.before = checkpoint, before

    def save(self, state: Mapping[str, Any]) -> None:
        self.checkpoint.save({"before": self.before, "now": state})

    def load(self) -> dict[str, Any] | None:
        """The state of this part; None where another one was under way."""
        saved = self.checkpoint.load()
        return saved["now"] if saved and saved["before"] == self.before else None


def walk(
    learner: Learner,
    batches: Sequence[Batch],
    test: Examples,
    *,
    seed: int,
    metric: str,
    checkpoint: Checkpoint | None = None,
    tick: Tick | None = None,
    on_line: Callable[[Line], None] | None = None,
) -> list[Line]:
    """Train a learner on mega-batch after mega-batch; returns the ledger.

    metric    "error" or "perplexity", on the test
    on_line   called with every line, also with those from before a kill
    """
    saved = checkpoint.load() if checkpoint else None
    lines: list[Line] = []
    if saved:
        lines = list(saved["before"])
        if saved["now"] is None:  # between two phases; within one, the learner takes over its own
            learner.load(saved["learner"])
    if on_line:
        for line in lines:
            on_line(line)
    last = time.monotonic()
    for batch in batches[len(lines) :]:
        phase = Phase(
            train=batch.train,
            validation=batch.validation,
            number=batch.number,
            seed=seed,
            tick=part_of(tick, len(lines), len(batches)),
            checkpoint=Under(checkpoint, list(lines)) if checkpoint else None,
        )
        lines.append(_line(learner, phase, test, metric))
        if on_line:
            on_line(lines[-1])
        if checkpoint and time.monotonic() - last >= learner.training.save_every:
            checkpoint.save({"before": lines, "now": None, "learner": learner.state()})
            last = time.monotonic()
    return lines


def part_of(tick: Tick | None, done: int, count: int) -> Tick | None:
    """What tells the share of one part as a share of so many."""
    return (lambda share: tick((done + share) / count)) if tick else None


def _line(learner: Learner, phase: Phase, test: Examples, metric: str) -> Line:
    start = time.monotonic()
    report = learner.train(phase)
    trained = time.monotonic()
    measured = learner.measure(test)
    return {
        "t": phase.number,
        "rows": len(phase.train) + len(phase.validation),
        "phase": phase.number,
        "trained": True,
        **asdict(report),
        metric: score(measured, metric),
        "loss": measured["loss"],
        "parameters": learner.parameters(),
        "inference_flops": learner.inference_flops(test.x[:1]),
        "bytes": {**learner.bytes(), "replay": 0},
        "seconds": {"train": trained - start, "score": time.monotonic() - trained},
    }


def largest_gap(lines: Sequence[Line]) -> float | None:
    """The largest change of a probability by a growth; None where nothing grew."""
    return max((line["growth"]["gap"] for line in lines if line["growth"]), default=None)
