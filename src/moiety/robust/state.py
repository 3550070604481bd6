"""`State`: the examples that an attack has in play, as tensors with a row for each."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor


@dataclass(kw_only=True)
class State:
    """The examples in play, one row each; an attack may add tensors of its own."""

    row: Tensor  # the place of each in the batch
    clean: Tensor
    y: Tensor
    x: Tensor  # where the attack stands
    kept: Tensor  # the best point so far, and how good it is
    kept_loss: Tensor
    kept_fooled: Tensor  # examples of the group that it fools
    aim: Tensor | None = None  # the class to aim at

    def tensors(self) -> dict[str, Tensor]:
        """What there is, by name."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: t for name, t in named.items() if t is not None}

    def take(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        for name, t in self.tensors().items():
            setattr(self, name, t[rows])
