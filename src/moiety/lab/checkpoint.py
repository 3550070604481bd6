"""The state of a trial in flight, saved so that a kill at any moment leaves a whole one."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import io
from ..train.state import read_state, state_bytes


class Checkpoint:
    """The state of a trial in flight (see `train.state`), and the one before it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.latest = folder / "latest.safetensors"
        self.previous = folder / "previous.safetensors"

    def save(self, state: Mapping[str, Any]) -> None:
        """Save a state; the one before it is kept, and a kill at any moment leaves a whole one."""
        data = state_bytes(state)
        for leftover in self.folder.glob(".*.tmp"):
            leftover.unlink()
        if self.latest.exists():
            os.replace(self.latest, self.previous)
        io.write_atomic(self.latest, data)

    def exists(self) -> bool:
        """Tell whether anything was saved."""
        return self.latest.exists() or self.previous.exists()

    def load(self) -> dict[str, Any] | None:
        """Load the newest whole state, with tensors on the CPU; None where none was saved."""
        damage: Exception | None = None
        for path in (self.latest, self.previous):
            try:
                state = read_state(path)
            except FileNotFoundError:
                continue
            except ValueError as error:
                damage = error
                continue
            if damage:  # the next save must not push out the whole one for the damaged one
                os.replace(self.previous, self.latest)
            return state
        if damage:
            raise ValueError(
                f"{self.folder} holds no whole checkpoint ({damage}); delete it to start again."
            ) from damage
        return None

    def remove(self) -> None:
        """Remove all that was saved."""
        shutil.rmtree(self.folder, ignore_errors=True)
