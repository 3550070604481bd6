"""`GrowingEnsemble`: a new member now and then, while the old ones stay as they are.

learner("growing-ensemble", lambda seed: MLP(64), every=2)    # gEns

(ALMA, Caccia et al. 2022; digest 4, section 3.2. The new member starts as a copy of the last one,
as in its code, or fresh.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from torch import nn

from .base import Learner, Phase


class GrowingEnsemble(Learner):
    """Starts with one model; only the newest are trained; probabilities are averaged.

    every   phases between growths
    add     how many members each growth adds
    new     "copy": they start as the last member is; "fresh": as new models
    """

    name = "growing-ensemble"
    options: ClassVar[tuple[str, ...]] = ("every", "add", "new")

    def __init__(
        self,
        model: Callable[[int], nn.Module],
        *,
        every: int = 1,
        add: int = 1,
        new: Literal["copy", "fresh"] = "copy",
        **common: Any,
    ) -> None:
        for word, count in (("every", every), ("add", add)):
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{word} must be a whole number, at least 1, got {count!r}")
        if new not in ("copy", "fresh"):
            raise ValueError(f'new must be "copy" or "fresh", got {new!r}')
        self.every, self.add, self.new = every, add, new
        super().__init__(model, **common)

    @property
    def exact(self) -> bool:
        return False  # a further vote changes the mean, except where a lone member is copied

    def trained(self) -> range:
        newest = self.add if len(self.models) > 1 else 1
        return range(len(self.models) - newest, len(self.models))

    def _grow(self, phase: Phase) -> dict[str, Any]:
        last = len(self.models) - 1
        for i in range(last + 1, last + 1 + self.add):
            copied = self.new == "copy"
            self.models.append(copy.deepcopy(self.models[last]) if copied else self.build(i))
            self.carried.append(copy.deepcopy(self.carried[last]) if copied else None)
        return {"members": len(self.models)}
