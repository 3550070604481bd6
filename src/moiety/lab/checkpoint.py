"""The state of a trial in flight, saved so that a kill at any moment leaves a whole one."""

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


class Checkpoint:
    """The state of a trial in flight: nested dicts, lists and tuples of tensors and plain values.

    `model.state_dict()`, `optimizer.state_dict()` and the states of generators go in as they are.
    The tensors and, in the header, the JSON of the rest make one safetensors file: no pickle.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.latest = folder / "latest.safetensors"
        self.previous = folder / "previous.safetensors"

    def save(self, state: Mapping[str, Any]) -> None:
        """Save a state; the one before it is kept, and a kill at any moment leaves a whole one."""
        tensors: dict[str, torch.Tensor] = {}
        text = json.dumps(_pack(dict(state), tensors), allow_nan=False)
        data = save(tensors, metadata={"state": text})
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
                with safe_open(path, framework="pt") as file:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                    state = _unpack(json.loads(file.metadata()["state"]), tensors)
            except FileNotFoundError:
                continue
            except (SafetensorError, ValueError, TypeError, KeyError) as error:
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


def _pack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Turn a state into JSON that says its types, and gather its tensors by number."""
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        # A copy, because safetensors refuses tensors that share memory.
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        # Pairs, because an optimizer numbers its parameters and JSON has no numbers as keys.
        return {"dict": [[_pack(item, tensors) for item in pair] for pair in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_pack(item, tensors) for item in value]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"A checkpoint cannot hold {value!r:.80}; give tensors, text, numbers, lists or dicts."
    )


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
