"""What a stage of adaptation leaves behind, in memory and on the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import io
from ..train.state import read_state, state_bytes

State = dict[str, Tensor]


@dataclass(frozen=True)
class Trained:
    """What a stage left: the weights it kept, on the CPU, and what was seen on the way."""

    name: str
    state: State
    kept: int  # the step of these weights
    steps: int  # that were taken
    history: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    online: str | None = None  # why the teacher ran at every step; None: cached, or no teacher


def write_trained(folder: Path, trained: Trained) -> None:
    """Write what a stage left; its seconds go beside it, since no two runs take the same."""
    whole = {**vars(trained), "seconds": 0.0}
    io.write_json(folder / "seconds.json", trained.seconds)
    io.write_atomic(folder / "final.safetensors", state_bytes(whole))
    (folder / "latest.safetensors").unlink(missing_ok=True)


def read_trained(folder: Path | None) -> Trained | None:
    """What a stage left in a folder, or None if it has not come to its end."""
    if folder is None or not (folder / "final.safetensors").exists():
        return None
    (folder / "latest.safetensors").unlink(missing_ok=True)  # of a process killed in between
    whole = read_state(folder / "final.safetensors")
    return Trained(**{**whole, "seconds": io.read_json(folder / "seconds.json")})


@contextmanager
def keeping(save: Callable[[], None] | None) -> Iterator[None]:
    """Save, where there is a way to, before an interrupt goes on."""
    try:
        yield
    except KeyboardInterrupt:
        if save is not None:
            save()
        raise


def whole_state(model: nn.Module) -> State:
    """All that a model has learnt and counted, with the buffers that `state_dict` leaves out."""
    return {**dict(model.named_buffers()), **model.state_dict()}


@torch.no_grad()
def load_whole(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Take such a state back."""
    kept = model.state_dict()
    model.load_state_dict({name: value for name, value in state.items() if name in kept})
    for name, buffer in model.named_buffers():
        if name not in kept:
            buffer.copy_(state[name])


def to_cpu(state: Mapping[str, Any]) -> State:
    """A copy of the tensors of a state."""
    return {n: t.detach().to("cpu", copy=True) for n, t in state.items() if isinstance(t, Tensor)}
