"""An audit in several processes: each takes some of the examples, all get the whole result.

    torchrun --nproc-per-node 2 audit.py        # init_process_group("gloo"), then audit(…) as ever

Random starts belong to an example's number and not to its batch, so that the processes find what
one alone finds. Groups of examples that are attacked together stay together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def here() -> tuple[int, int]:
    """My number and how many we are; alone without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def my_rows(examples: int, group: int = 1) -> range:
    """The examples of this process: a run of whole groups."""
    rank, world = here()
    groups = -(-examples // group)
    if not examples:
        raise ValueError("there is no example to audit: the data are empty")
    check_group(group, examples)
    if groups < world:
        what = "examples" if group == 1 else f"groups of {group} examples"
        raise ValueError(f"{world} processes cannot share {groups} {what}: start fewer processes")
    first, last = (groups * number // world * group for number in (rank, rank + 1))
    return range(first, min(last, examples))


def check_group(group: int, examples: int) -> None:
    """Refuse groups that no example has: fewer together are another threat, with other errors."""
    if group > examples:
        raise ValueError(
            f"groups of {group} need as many examples, and there are {examples}: give more "
            "examples, or a smaller group"
        )


def together(work: Callable[[], T]) -> list[T]:
    """What `work` gave in every process, in order; an error in one is raised in all."""
    if here()[1] == 1:
        return [work()]
    found, error = None, None
    try:
        found = work()
    except Exception as failure:  # the others wait for an answer, whatever happened
        error = failure
    said = [None if error is None else f"{type(error).__name__}: {error}", found]
    parts: list[Any] = [None] * here()[1]
    dist.all_gather_object(parts, said)
    if error is not None:
        raise error
    for rank, (failed, _) in enumerate(parts):
        if failed is not None:
            raise RuntimeError(f"process {rank} failed, so that the audit ends: {failed}")
    return [part for _, part in parts]


def join(parts: Sequence[Any]) -> Any:
    """One value of the parts of all processes: tensors one after the other, values by `joined`.

    Dicts, lists and dataclasses are joined part by part; of numbers the largest stays, and of
    anything else the first. What a process has not (None) is left out.
    """
    parts = [part for part in parts if part is not None]
    first: Any = parts[0] if parts else None
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if hasattr(first, "joined"):
        return first.joined(parts[1:])
    if isinstance(first, dict):
        return {key: join([part[key] for part in parts]) for key in first}
    if isinstance(first, list):
        return [join(column) for column in zip(*parts, strict=True)]
    if dataclasses.is_dataclass(first):
        names, make = [f.name for f in dataclasses.fields(first)], first.__class__
        return make(**{name: join([getattr(part, name) for part in parts]) for name in names})
    return max(parts) if isinstance(first, (int, float)) else first
