"""`run_stream`: a learner on a stream, with a usable model and a line of the ledger at every time.

    result = run_stream(
        cut(problem, 100, seed=432), learner("ensemble", lambda seed: MLP(64), members=3),
        wait="5", replay="0.2", test=problem_examples(problem, problem.test), out="out",
    )
    result.summary.cer

| in `out` | what it is |
|---|---|
| `ledger.jsonl` | a line for each time t, see `ledger` |
| `phases.jsonl` | what each phase uses, written before it trains |
| `versions/0007`, `current` | the learner after phase 7, its card, the form of its rows; newest |
| `run.json` | the words of the run: learner, options, policies, seed; other words are refused |

It may be killed at any moment and started again with the same words: the weights and the ledger
become those of a run that was left alone, wall time excepted.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import io
from .base import Learner
from .data import Batch, Examples
from .environment import Environment
from .ledger import Line, Summary, summary
from .policies import Replay, Wait, read_replay, read_wait
from .stream import Seen, Stream


@dataclass(frozen=True)
class Result:
    """What a run has reached so far; the learner is the one of the last phase."""

    lines: list[Line]
    learner: Learner
    waiting: list[int]  # numbers of the mega-batches that no phase has used yet
    seen: list[Seen]  # at the last look: files that are not taken, and why

    @property
    def summary(self) -> Summary:
        return summary(self.lines)


def run_stream(
    stream: Stream,
    learner: Learner | Callable[[Batch], Learner],
    *,
    out: str | Path,
    wait: str | int | Wait = 1,
    replay: str | float | Replay = "none",
    test: Examples | Callable[[Batch], Examples] | None = None,
    seed: int = 0,
    overlap: float = 0.01,
    follow: bool = False,
    pause: float = 1.0,
    on_line: Callable[[Line], None] | None = None,
    on_seen: Callable[[list[Seen]], None] | None = None,
    tick: Callable[[int, float], None] | None = None,
    words: Mapping[str, Any] | None = None,
) -> Result:
    """Let a learner go through what has arrived, or go on where it was stopped.

    learner   as it was made, or what makes it once the first mega-batch shows shape and classes
    test      belongs to the environment: it is scored after each phase and decides nothing;
              without it each arrival is scored before it is trained on (prequential). It may be
              read from the first mega-batch on, too
    overlap   the share of a mega-batch's rows that may also be in `test`
    follow    keep looking for arrivals every `pause` seconds, until interrupted or the stream ends
    on_line, on_seen, tick   called with a new line of the ledger; with what each look at the stream
              met; and with the phase and the share of it that is done
    words     what else must stay the same when a run goes on, such as the width of a model: plain
              values, kept in run.json beside those of learner and policies

    What still waits when a stream of known length ends is trained on then; a stream without an end
    lets it wait, so that what happens depends on the journal alone.
    """
    out = Path(out)
    policies = read_wait(wait), read_replay(replay)
    with _room(out), io.lease(out):
        stream.reload()  # another process may have run until now
        known = stream.known()
        seen = [] if known else _look(stream, on_seen)
        while not stream.known():
            if not follow:
                raise ValueError(_nothing(seen, told=on_seen is not None))
            time.sleep(pause)
            seen = _look(stream, on_seen)
        made = learner(stream[1]) if callable(learner) else learner
        tests = test(stream[1]) if callable(test) else test
        run = Environment(stream, made, out, *policies, tests, seed, overlap, tick, words)
        run.resume()
        if known:  # only now: a command with other words must not add to the journal
            seen = _look(stream, on_seen)
        while True:
            while run.t < stream.known():
                line = run.arrive(stream[run.t + 1])
                if on_line:
                    on_line(line)
            if not follow or run.t == stream.batches:
                break
            time.sleep(pause)
            seen = _look(stream, on_seen)
        left = [one for one in seen if one.number is None]
        return Result(run.ledger.lines, made, [batch.number for batch in run.waiting], left)


@contextlib.contextmanager
def _room(out: Path) -> Iterator[None]:
    """Say in a sentence that a disk is full, and that this loses nothing."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        full = OSError(
            f"{error.strerror}: what {out} holds is whole, and nothing is lost; make room, and "
            "start again with the same words"
        )
        full.errno = error.errno
        raise full from error


def _nothing(seen: list[Seen], told: bool) -> str:
    nothing = "nothing has arrived yet that can be learned from"
    if not seen:
        return nothing
    if told:  # the reasons, each at its file
        return f"{nothing}; {'1 file is' if len(seen) == 1 else f'{len(seen)} files are'} not taken"
    more = f" (and {len(seen) - 1} more)" if len(seen) > 1 else ""
    return f"{nothing}: {seen[0]}{more}"


def _look(stream: Stream, on_seen: Callable[[list[Seen]], None] | None) -> list[Seen]:
    seen = stream.poll()
    if on_seen:
        on_seen(seen)
    return seen
