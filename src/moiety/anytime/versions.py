"""Versions of a learner on disk: whole or absent, the last few kept, `current` the newest.

    versions = Versions("out")
    versions.add(7, learner.state(), card)           # out/versions/0007, and out/current -> it
    state, card = load_current("out")                # also from another process, at any moment

A version is written beside its place and renamed, and so is the symbolic link `current`: a reader
meets the old one or the new one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from .. import io

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
        write_state(beside / STATE, state)
        io.write_json(beside / CARD, dict(card))
        os.rename(beside, self.path(number))
        _sync(self.folder)
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
            _sync(self.current.parent)
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


def _sync(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- states as files -------------------------------------------------------------------------------


class Checkpoint:
    """The state of a phase in flight, in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, state: Mapping[str, Any]) -> None:
        write_state(self.path, state)

    def load(self) -> dict[str, Any] | None:
        return read_state(self.path) if self.path.exists() else None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def write_state(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write nested dicts, lists and tuples of tensors and plain values in one step.

    The tensors and, in the header, the JSON of the rest make one safetensors file: no pickle.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_pack(dict(state), tensors), allow_nan=False)
    io.write_atomic(path, save(tensors, metadata={"state": text}))


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what `write_state` wrote, with tensors on the CPU."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return _unpack(json.loads(file.metadata()["state"]), tensors)
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error}); restore it, or start again") from error


def _pack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Turn a state into JSON that says its types, and gather its tensors by number."""
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        # A copy, because safetensors refuses tensors that share memory.
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        # Pairs, because an optimizer numbers its parameters and JSON has no numbers as keys.
        return {"dict": [[_pack(item, tensors) for item in pair] for pair in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_pack(item, tensors) for item in value]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"a state cannot hold {value!r:.80}; give tensors, text, numbers or lists")


def _unpack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Undo `_pack`."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {_unpack(key, tensors): _unpack(item, tensors) for key, item in content}
    items = [_unpack(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
