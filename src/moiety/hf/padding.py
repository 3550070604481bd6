"""Does what a model does with padding reach its answers? Asked of the dense model, by trying.

Experts do not work for padding, so a mixture answers zero there, where the dense block answered
something. Most models keep that to themselves. Some do not: they mix tokens without a mask.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..tokens import Reader
from .blocks import Block
from .probe import Probe, gap


def leak(model: nn.Module, blocks: list[Block], padded: Probe) -> float:
    """How far the outputs at real places move when these blocks answer zero at padding."""
    before = padded.outputs(model)
    reader = Reader()
    with contextlib.ExitStack() as stack:
        for handle in reader.listen(model, [block.outer for block in blocks]):
            stack.callback(handle.remove)
        for block in blocks:
            hook = partial(_silence, reader, block.outer)
            stack.callback(model.get_submodule(block.outer).register_forward_hook(hook).remove)
        return gap(before, padded.outputs(model))


def _silence(reader: Reader, name: str, module: nn.Module, args: tuple, y: Any) -> Tensor:
    mask = reader.read(args[0], name).mask
    return y if mask is None else y.masked_fill(~mask.bool()[..., None], 0.0)
