"""Versions of a learner on disk: whole or absent, the last few kept, `current` the newest.

    versions = Versions("out")
    versions.add(7, learner.state(), card, form)     # out/versions/0007, and out/current -> it
    version = read_current("out")                    # also from another process, at any moment

A version is complete by itself: weights, a card with the words of the run, and the form of its rows
(`serving.load_current` makes a model of the three, also of a copy of its folder). It is written
beside its place and renamed, and so is the symbolic link `current`: a reader meets the old one or
the new one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .. import io
from ..train.state import read_state, state_bytes

KEPT = 3
STATE, CARD, FORM = "state.safetensors", "card.json", "form.json"


class Version(NamedTuple):
    """What a version holds."""

    state: dict[str, Any]  # of the learner
    card: dict[str, Any]  # when, on what, at which cost; `run` has the words of run.json
    form: dict[str, Any] | None  # what turns rows into inputs, see `readers.read_form`


class Versions:
    """The numbered versions of a folder, one writer at a time."""

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.folder, self.current = Path(out) / "versions", Path(out) / "current"

    def numbers(self) -> list[int]:
        """The versions that are there, in order."""
        names = [path.name for path in self.folder.glob("[0-9]*")] if self.folder.is_dir() else []
        return sorted(int(name) for name in names)

    def path(self, number: int) -> Path:
        return self.folder / f"{number:04d}"

    def add(
        self,
        number: int,
        state: Mapping[str, Any],
        card: Mapping[str, Any],
        form: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a version, make it current, and remove those that are too old."""
        beside = self.folder / f".{number:04d}.tmp"
        shutil.rmtree(beside, ignore_errors=True)
        io.write_atomic(beside / STATE, state_bytes(state))
        io.write_json(beside / CARD, dict(card))
        io.write_json(beside / FORM, None if form is None else dict(form))
        os.rename(beside, self.path(number))
        io.sync_folder(self.folder)
        self.repair()

    def repair(self) -> None:
        """Make the newest version current and clear up, whatever a kill left undone."""
        for leftover in self.current.parent.glob(".*.tmp"):
            leftover.unlink()
        for leftover in self.folder.glob(".*.tmp"):
            shutil.rmtree(leftover)
        if not (numbers := self.numbers()):
            return
        target = f"versions/{numbers[-1]:04d}"
        if not self.current.is_symlink() or os.readlink(self.current) != target:
            beside = self.current.with_name(".current.tmp")
            os.symlink(target, beside)
            os.replace(beside, self.current)
            io.sync_folder(self.current.parent)
        for old in numbers[:-KEPT]:
            shutil.rmtree(self.path(old))

    def load(self, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state and the card of a version."""
        return read_state(self.path(number) / STATE), io.read_json(self.path(number) / CARD)


def read_current(out: str | os.PathLike[str]) -> Version:
    """All of the version that is current, while another process trains; or of a copy of one."""
    out = Path(out)
    if not out.is_dir():
        raise ValueError(f"there is no folder {out}; give that of a run, or of a version")
    alone = any((out / name).exists() for name in (STATE, CARD, FORM))
    link = out if alone else out / "current"
    if not os.path.lexists(link):
        raise ValueError(f"{out} holds no version yet; wait for the first phase")
    while True:
        path = link.resolve()  # once, so that all that is read is of one version
        try:
            return Version(
                read_state(path / STATE), io.read_json(path / CARD), io.read_json(path / FORM)
            )
        except FileNotFoundError as error:
            if link.resolve() == path:  # else it was removed as too old while it was being read
                raise ValueError(
                    f"{path} is not whole ({error}); restore it, or let the run train another phase"
                ) from None


class Checkpoint:
    """The state of a phase in flight, in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, state: Mapping[str, Any]) -> None:
        io.write_atomic(self.path, state_bytes(state))

    def load(self) -> dict[str, Any] | None:
        return read_state(self.path) if self.path.exists() else None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
