"""Versions of a learner on disk: whole or absent, the last few kept, `current` the newest.

    versions = Versions("out")
    versions.add(7, learner.state(), card)           # out/versions/0007, and out/current -> it
    state, card = load_current("out")                # also from another process, at any moment

A version is written beside its place and renamed, and so is the symbolic link `current`: a reader
meets the old one or the new one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import io
from ..train.state import read_state, state_bytes

KEPT = 3
STATE, CARD = "state.safetensors", "card.json"


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

    def add(self, number: int, state: Mapping[str, Any], card: Mapping[str, Any]) -> None:
        """Write a version, make it current, and remove those that are too old."""
        beside = self.folder / f".{number:04d}.tmp"
        shutil.rmtree(beside, ignore_errors=True)
        io.write_atomic(beside / STATE, state_bytes(state))
        io.write_json(beside / CARD, dict(card))
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
        return _load(self.path(number))


def load_current(out: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state and the card of the version that is current, while another process trains."""
    link = Path(out) / "current"
    while True:
        try:
            name = os.readlink(link)
        except OSError:
            raise ValueError(f"{out} holds no version yet; wait for the first phase") from None
        try:
            return _load(Path(out) / name)
        except FileNotFoundError:
            if os.readlink(link) == name:  # else it was removed as too old while it was being read
                raise


def _load(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return read_state(path / STATE), io.read_json(path / CARD)


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
