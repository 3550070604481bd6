"""States as files: nested dicts, lists and tuples of tensors and plain values, without pickle.

    io.write_atomic(path, state_bytes({"model": model.state_dict(), "step": 7}))
    state = read_state(path)                     # tensors on the CPU

`model.state_dict()`, `optimizer.state_dict()` and the states of generators go in as they are. The
tensors and, in the header, the JSON of the rest make one safetensors file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save


def state_bytes(state: Mapping[str, Any]) -> bytes:
    """What a file of the state holds."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(pack(state, tensors), allow_nan=False)
    return save(tensors, metadata={"state": text})


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The state in a file."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return unpack(json.loads(file.metadata()["state"]), tensors)
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error}); restore it, or start again") from error


def pack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Turn a state into JSON that says its types, and gather its tensors by number."""
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        # A copy, because safetensors refuses tensors that share memory.
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        # Pairs, because an optimizer numbers its parameters and JSON has no numbers as keys.
        return {"dict": [[pack(item, tensors) for item in pair] for pair in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [pack(item, tensors) for item in value]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"A checkpoint cannot hold {value!r:.80}; give tensors, text, numbers, lists or dicts."
    )


def unpack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Undo `pack`."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {unpack(key, tensors): unpack(item, tensors) for key, item in content}
    items = [unpack(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
