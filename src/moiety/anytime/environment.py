"""The environment of a learner: it gives it each phase, owns the test set and keeps the books.

    environment = Environment(stream, learner, out, wait, replay, test, seed, overlap, tick)
    environment.resume()
    line = environment.arrive(stream[1])         # scored, trained where it is time, and on disk

The order of what goes to disk makes a kill harmless: the record of a phase, checkpoints within it,
the version (which holds the line of the ledger), `current`, the line itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import io
from .apart import check_apart
from .base import Learner, Phase
from .data import Batch, Examples, row_keys
from .ledger import FLOPS, Ledger, Line, chance, score
from .phases import Memory, Records, fingerprint
from .policies import Replay, View, Wait
from .stream import Stream
from .versions import Checkpoint, Versions

ASKED = "learner_options"  # as they were given; what they came to is in the learner's own words
IDLE: dict[str, Any] = {  # what a line says of a time without a phase
    "trained": False,
    "steps": 0,
    "examples": 0,
    "validation": None,
    "growth": None,
    "flops": dict.fromkeys(FLOPS, 0.0),
}


class Environment:
    """A run in flight: everything in it follows from the stream, the words and what is on disk."""

    def __init__(
        self,
        stream: Stream,
        learner: Learner,
        out: Path,
        wait: Wait,
        replay: Replay,
        test: Examples | None,
        seed: int,
        overlap: float,
        tick: Callable[[int, float], None] | None,
        words: Mapping[str, Any] | None = None,
    ) -> None:
        self.stream, self.learner, self.out = stream, learner, out
        self.wait, self.test, self.seed, self.overlap, self.tick = wait, test, seed, overlap, tick
        if test is not None:
            self.check_test(test)
        self.tested = row_keys(test) if test is not None else set()
        self.memory = Memory(replay, seed)
        self.checkpoint = Checkpoint(out / "phase.safetensors")
        self.versions, self.ledger = Versions(out), Ledger(out / "ledger.jsonl")
        self.records = Records(out / "phases.jsonl")
        self.waiting: list[Batch] = []
        self.words = {
            **(words or {}),
            **learner.words(),
            "learner_seed": learner.seed,
            "parameters": learner.parameters(),
            "wait": str(wait),
            "replay": str(replay),
            "seed": seed,
            "stream_seed": stream.seed,
            "validation": stream.validation,
            "test": fingerprint(test) if test is not None else None,
        }

    @property
    def t(self) -> int:
        """The last time whose line is written."""
        return len(self.ledger.lines)

    @property
    def phase(self) -> int:
        """How many phases are done."""
        return self.ledger.lines[-1]["phase"] if self.ledger.lines else 0

    # -- going on --------------------------------------------------------------------------------

    def resume(self) -> None:
        """Take over what is on disk; finish what a kill left between a version and its line."""
        _same_words(self.out / "run.json", self.words)
        self.versions.repair()
        numbers = self.versions.numbers()
        if numbers:
            state, card = self.versions.load(numbers[-1])
            self.learner.load(state)
            if card["t"] == self.t + 1:
                self.ledger.append(card["line"])
        newest = numbers[-1] if numbers else 0
        if (
            newest != self.phase
            or self.t > self.stream.known()
            or len(self.records.lines) < self.phase
        ):
            raise ValueError(
                f"{self.out} does not fit together (phase {self.phase} of the ledger, version "
                f"{newest}, {self.stream.known()} mega-batches); restore it, or use another folder"
            )
        if len(self.records.lines) == self.phase:  # no phase was under way
            self.checkpoint.remove()
        done = self.records.lines[: self.phase]
        for record in done if str(self.words["replay"]) != "none" else []:
            self.memory.use(record["phase"], [self.stream[n] for n in record["numbers"]])
        used = done[-1]["numbers"][-1] if done else 0
        self.waiting = [self.stream[n] for n in range(used + 1, self.t + 1)]

    # -- one time --------------------------------------------------------------------------------

    def arrive(self, batch: Batch) -> Line:
        """Score, decide, train where it is time, and write the line of a mega-batch's time."""
        self.check(batch)
        start = time.monotonic()
        metric = "perplexity" if batch.train.y.dim() > 1 else "error"
        found = None if self.test is not None else self.prequential(batch, metric)
        scored = time.monotonic() - start
        self.waiting.append(batch)
        line: Line = {"t": batch.number, "name": batch.name, "rows": batch.rows}
        if not self.ready():
            now = self.in_force(metric) if found is None else found
            line |= {"phase": self.phase, metric: now, **IDLE, **self.standing(batch)}
            line["seconds"] = {"train": 0.0, "score": scored}
            self.ledger.append(line)
            return line
        phase = self.phase + 1
        line |= {"phase": phase, **self.train(phase)}
        trained = time.monotonic() - start - scored
        if self.test is not None:
            found = score(self.learner.measure(self.test), metric)
        line |= {metric: found, **self.cost(batch)}
        line["seconds"] = {"train": trained, "score": time.monotonic() - start - trained}
        self.versions.add(phase, self.learner.state(), self.card(line), self.stream.form())
        self.ledger.append(line)
        self.checkpoint.remove()
        self.waiting = []
        return line

    def check(self, batch: Batch) -> None:
        """Refuse what cannot be learned from, before anything uses it."""
        what = f"mega-batch {batch.number} ({batch.name})"
        if not len(batch.train):
            raise ValueError(f"{what} has no examples; leave it out of the stream")
        highest = max(int(part.y.max()) for part in (batch.train, batch.validation) if len(part))
        if highest >= self.stream.classes:
            raise ValueError(
                f"{what} holds class {highest}, but the stream has {self.stream.classes} classes "
                "from 0 on; a model cannot answer with others"
            )
        then = "take them out of one of the two and start in another folder"
        check_apart(_all(batch), self.tested, self.overlap, what, then)

    def check_test(self, test: Examples) -> None:
        """Refuse classes that the stream does not have; chance would be that of the others."""
        if test.y.dim() > 1 or not len(test):  # tokens are no classes
            return
        highest, classes = int(test.y.max()), self.stream.classes
        if highest >= classes:
            raise ValueError(
                f"the test set holds class {highest}, but the stream has {classes} classes from 0 "
                "on; leave such rows out of it, or give the stream examples of all classes"
            )

    def ready(self) -> bool:
        """Whether a phase begins now: as was journalled, else as the policy says."""
        t = self.waiting[-1].number
        if len(self.records.lines) > self.phase:
            return self.records.lines[self.phase]["numbers"][-1] == t
        past = [line for line in self.ledger.lines if line["trained"]]
        view = View(
            t=t,
            waiting=tuple(batch.rows for batch in self.waiting),
            flops=tuple(_spent(line) for line in past),
            validation=tuple(line["validation"] for line in past if line["validation"] is not None),
        )
        return t == self.stream.batches or self.wait.ready(view)

    def train(self, number: int) -> dict[str, Any]:
        """Journal what a phase uses, train it, and say what was done."""
        replayed = self.memory.counts()
        train, validation = self.memory.use(number, self.waiting)
        self.records.begin(
            {
                "phase": number,
                "numbers": [batch.number for batch in self.waiting],
                "replayed": replayed,
                "rows": [len(train), len(validation)],
                "seed": self.seed,
                "sha256": fingerprint(train, validation),
            }
        )
        tick = self.tick
        report = self.learner.train(
            Phase(
                train=train,
                validation=validation,
                number=number,
                seed=self.seed,
                tick=(lambda share: tick(number, share)) if tick else None,
                checkpoint=self.checkpoint,
            )
        )
        return {"trained": True, **asdict(report)}

    # -- what a line says ------------------------------------------------------------------------

    def in_force(self, metric: str) -> float:
        """The score that stands while nothing is trained."""
        if self.phase:
            return self.ledger.lines[-1][metric]
        return chance(self.stream.classes, metric)

    def prequential(self, batch: Batch, metric: str) -> float:
        """The score of the model in force on what it has not been trained on."""
        if not self.phase:
            return chance(self.stream.classes, metric)
        return score(self.learner.measure(_all(batch)), metric)

    def standing(self, batch: Batch) -> dict[str, Any]:
        """The cost of a model that stays as it is."""
        last = self.ledger.lines[-1] if self.ledger.lines else self.cost(batch)
        return {word: last[word] for word in ("parameters", "inference_flops", "bytes")}

    def cost(self, batch: Batch) -> dict[str, Any]:
        """The cost of the model in force."""
        return {
            "parameters": self.learner.parameters(),
            "inference_flops": self.learner.inference_flops(batch.train.x[:1]),
            "bytes": {**self.learner.bytes(), "replay": self.memory.bytes()},
        }

    def card(self, line: Line) -> dict[str, Any]:
        """What a version is: its time, the data it has used, validation and the cost so far."""
        used = [number for record in self.records.lines for number in record["numbers"]]
        lines = [*self.ledger.lines, line]
        return {
            "t": line["t"],
            "phase": line["phase"],
            "mega_batches": len(used),
            "rows": sum(self.stream.rows(number) for number in used),
            "data": self.records.lines[-1],
            "validation": line["validation"],
            "flops": {word: sum(one["flops"][word] for one in lines) for word in FLOPS},
            "run": self.words,
            "line": line,
        }


def _all(batch: Batch) -> Examples:
    return Examples.join([batch.train, batch.validation])


def _spent(line: Line) -> float:
    return sum(line["flops"][word] for word in ("train", "validation", "growth"))


def _same_words(path: Path, words: dict[str, Any]) -> None:
    """Store the words of a run, or refuse to go on with others."""
    if not path.exists():
        io.write_json(path, words)
        return
    for word, old in io.read_json(path).items():
        if word != ASKED and words.get(word) != old:
            what = f"with {word} = {old}, not {words.get(word)}"
            if word == "test":  # a digest, which says nothing to a reader
                what = "that is scored on another test set" if old else "without a test set"
            raise ValueError(f"{path.parent} holds a run {what}; give the same, or another folder")
