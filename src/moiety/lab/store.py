"""The trial store: what a study has found so far, in a folder that survives `kill -9`.

    store = Store("runs/routers")
    for trial in store.pending(trials):            # what is not done yet
        checkpoint, curve = store.checkpoint(trial), store.curve(trial)
        state = checkpoint.load()                  # None, or where the killed run had come to
        curve.rewind(state["step"] if state else -1)
        ...                                        # curve.append(step, loss=...), checkpoint.save
        store.finish(trial, {"accuracy": 0.97}, duration=12.5, versions={"torch": "2.13"})

    trials/<key>.json        one whole file for each trial that ended, with its settings and metrics
    curves/<key>.jsonl       one line a step
    checkpoints/<key>/       the last two states of a trial in flight; gone when it is done

Only the driver process, which holds `moiety.io.lease` on the folder, writes records; the curve and
the checkpoint of a trial are written by the one process that runs it. Readers need no lease.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import io
from .checkpoint import Checkpoint


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of one arm of a study with one seed; `settings` holds plain JSON values."""

    study: str
    arm: str
    seed: int
    settings: Mapping[str, Any] = dataclasses.field(hash=False)

    def __post_init__(self) -> None:
        if not (isinstance(self.study, str) and isinstance(self.arm, str)):
            raise ValueError(f"Study and arm must be text, not {self.study!r} and {self.arm!r}.")
        if type(self.seed) is not int or not 0 <= self.seed < 2**64:
            raise ValueError(f"The seed must be an integer from 0 to 2**64 - 1, not {self.seed!r}.")
        if not isinstance(self.settings, Mapping):
            raise ValueError(f"The settings must be a dict of JSON values, not {self.settings!r}.")
        settings = _plain(dict(self.settings), "settings")
        # A copy: whoever changes the dict afterwards does not change the trial.
        object.__setattr__(self, "settings", settings)
        self.key  # noqa: B018  what cannot be hashed and written is found now, not after hours

    @property
    def key(self) -> str:
        """A name that is safe for files: arm and seed to read, a hash of everything to be sure."""
        try:
            text = json.dumps(
                dataclasses.asdict(self), sort_keys=True, ensure_ascii=False, allow_nan=False
            )
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        except (TypeError, ValueError) as error:
            raise ValueError(f"Trial of arm {self.arm!r} is not plain JSON: {error}.") from error
        arm = re.sub(r"[^a-z0-9]+", "-", self.arm.lower())[:40].strip("-") or "arm"
        return f"{arm}-s{self.seed}-{digest}"


class Store:
    """The trials of a study in `folder`, one atomic file each."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def finished(self) -> dict[str, dict[str, Any]]:
        """Read the records of the trials that are done, by key."""
        return self._records("done")

    def failed(self) -> dict[str, dict[str, Any]]:
        """Read the records of the trials that raised, by key, with their traceback."""
        return self._records("failed")

    def pending(self, trials: Iterable[Trial], *, retry: bool = True) -> list[Trial]:
        """List, in order, the trials that are not done; `retry=False` leaves out failed ones too.

        For the driver: it also removes the checkpoints of done trials that a kill left behind.
        """
        done = self.finished()
        for folder in (self.folder / "checkpoints").glob("*"):
            if folder.name in done:
                shutil.rmtree(folder)
        ended = done if retry else {**done, **self.failed()}
        return [trial for trial in trials if trial.key not in ended]

    def finish(
        self,
        trial: Trial,
        metrics: Mapping[str, float | None],
        *,
        duration: float,
        versions: Mapping[str, str],
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Record that a trial is done; a metric is a finite number, or None where there is none."""
        for name, value in metrics.items():
            if value is not None and not _is_finite(value):
                raise ValueError(
                    f"Metric {name!r} of {trial.key} is {value!r}; "
                    "give a finite int or float, or None where the trial has no value."
                )
        path = self._write(trial, "done", metrics, duration, versions, extra)
        self.checkpoint(trial).remove()
        return path

    def fail(
        self,
        trial: Trial,
        traceback: str,
        *,
        duration: float,
        versions: Mapping[str, str],
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Record that a trial raised; its checkpoint stays, for the run that tries it again."""
        extra = {**(extra or {}), "traceback": traceback}
        return self._write(trial, "failed", {}, duration, versions, extra)

    def curve(self, trial: Trial) -> "Curve":
        """Give the curve of a trial, to append to and to read."""
        return Curve(self.folder / "curves" / f"{trial.key}.jsonl")

    def checkpoint(self, trial: Trial) -> Checkpoint:
        """Give the checkpoint of a trial, to save and to load."""
        return Checkpoint(self.folder / "checkpoints" / trial.key)

    def _write(
        self,
        trial: Trial,
        status: str,
        metrics: Mapping[str, float | None],
        duration: float,
        versions: Mapping[str, str],
        extra: Mapping[str, Any] | None,
    ) -> Path:
        """Write a record, after sweeping up what a kill left of earlier writes for this trial."""
        for leftover in self.folder.glob(f"*/.{trial.key}.json*.tmp"):
            leftover.unlink()
        record = {
            "status": status,
            **dataclasses.asdict(trial),
            "metrics": dict(metrics),
            "duration": duration,
            "versions": dict(versions),
            "extra": dict(extra or {}),
        }
        return io.write_json(self.folder / "trials" / f"{trial.key}.json", record)

    def _records(self, status: str) -> dict[str, dict[str, Any]]:
        """Read and check all records, and keep those of one status, in the order of their keys."""
        paths = sorted((self.folder / "trials").glob("[!.]*.json"))
        records = {path.stem: _read_record(path) for path in paths}
        return {key: record for key, record in records.items() if record["status"] == status}


class Curve:
    """Values by step, in a file that only grows: one line of JSON a step, synced at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: int | None = None  # not read yet

    def append(self, step: int, **values: float | None) -> None:
        """Add the values of a step, which comes after all steps that are there."""
        if self._last is None:
            self._last = max((row["step"] for row in self.rows()), default=-1)
        if type(step) is not int or step <= self._last:
            raise ValueError(
                f"{self.path.name}: step {step!r} does not come after step {self._last}; "
                "give integers that grow, and rewind the curve of a trial that starts again."
            )
        for name, value in values.items():
            if value is not None and not _is_finite(value):
                raise ValueError(
                    f"{self.path.name}: {name!r} is {value!r} at step {step}; "
                    "give a finite int or float, or None."
                )
        io.append_line(self.path, json.dumps({"step": step, **values}))
        self._last = step

    def rows(self) -> list[dict[str, Any]]:
        """Read all steps; a last line that a kill tore is left out."""
        return [row for _, row in self._lines()]

    def rewind(self, step: int) -> None:
        """Drop what comes after `step`, in one write; -1 drops all."""
        lines = self._lines()
        kept = [line for line, row in lines if row["step"] <= step]
        if len(kept) < len(lines):
            io.write_atomic(self.path, "".join(f"{line}\n" for line in kept))
        self._last = None

    def _lines(self) -> list[tuple[str, dict[str, Any]]]:
        """Read each whole line beside its value."""
        lines = io.read_lines(self.path)
        try:
            rows = [json.loads(line) for line in lines]
            if not all(type(row["step"]) is int for row in rows):
                raise ValueError("a step is not an integer")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{self.path} is damaged ({error}); restore it, or delete it to start again."
            ) from error
        return list(zip(lines, rows))


def _read_record(path: Path) -> dict[str, Any]:
    """Read one record; writes are atomic, so what is not whole was damaged later, and raises."""
    record = io.read_json(path)
    try:
        trial = Trial(*(record[name] for name in ("study", "arm", "seed", "settings")))
        whole = trial.key == path.stem and isinstance(record["metrics"], dict)
        whole = whole and record["status"] in ("done", "failed")
    except (ValueError, TypeError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise ValueError(f"{path} is not the record of its trial; restore it, or delete it.")
    return record


def _is_finite(value: Any) -> bool:
    """Tell a finite number from NaN, an infinity, a truth value and all else."""
    return type(value) is not bool and isinstance(value, int | float) and abs(value) < math.inf


def _plain(value: Any, where: str) -> Any:
    """Copy a JSON value, with lists for tuples; a key that JSON would turn to text is refused."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where}: the key {key!r} must be text; JSON has no other keys.")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if value is None or isinstance(value, bool | int | str) or _is_finite(value):
        return value
    raise ValueError(
        f"{where}: {value!r} is not a plain JSON value; give text, finite numbers, lists or dicts."
    )
