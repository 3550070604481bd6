"""A training in flight: the order of its examples, its clock, its states and its words.

Every lot is drawn from seed and step, so that it may be killed at any moment and goes on to the
same bits.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..train.draws import step_seed
from ..train.saving import Saving
from .recipe import checked
from .trained import keeping

TOLD = 0.2  # seconds between two words of how far it is


class Flight(ABC):
    """What `Stage` and `Tuning` have in common."""

    order_lot: int  # what a seed is used for, of the order
    folder: Path | None = None
    save_every = 30.0  # seconds

    def __init__(self, recipe: Any, examples: int, seed: int) -> None:
        self.recipe, self.examples, self.seed = recipe, examples, seed
        self.batch = min(recipe.batch, examples)
        self.epoch, self.order = -1, torch.empty(0, dtype=torch.long)
        self.step, self.seconds = 0, 0.0
        self.history: list[dict[str, Any]] = []

    @property
    def over(self) -> bool:
        return self.step >= self.recipe.steps

    @property
    def half(self) -> bool:
        return self.recipe.precision == "bfloat16"

    def fly(self, tick: Callable[[float], None] | None) -> None:
        """Take all steps that are left, and look and save between them."""
        started = told = time.monotonic()
        saving, before = Saving(self.save_every), self.seconds
        self.trained_model.train()  # whoever looks leaves it so
        while not self.over:
            self.advance()
            if looked := checked(self.step, self.recipe.steps, self.recipe.checks):
                self.look()
            now = time.monotonic()
            self.seconds = before + now - started
            if tick and (looked or now - told >= TOLD):
                with keeping(self._save if self.folder else None):
                    tick(self.step / self.recipe.steps)
                told = now
            if self.folder and saving.due and not self.over:
                saving(self._save)

    def lot(self, use: int, number: int) -> int:
        return step_seed(step_seed(self.seed, use), number)

    def rows_of(self, step: int) -> torch.Tensor:
        """The examples of a step; what is left over at the end of an epoch waits for the next."""
        epoch, place = divmod(step, self.examples // self.batch)
        if epoch != self.epoch:
            lots = torch.Generator().manual_seed(self.lot(self.order_lot, epoch))
            self.epoch, self.order = epoch, torch.randperm(self.examples, generator=lots)
        return self.order[place * self.batch : (place + 1) * self.batch]

    @property
    @abstractmethod
    def trained_model(self) -> nn.Module: ...

    @abstractmethod
    def advance(self) -> None:
        """Take the next step."""

    @abstractmethod
    def look(self) -> None:
        """Measure the model."""

    @abstractmethod
    def _save(self) -> None: ...
