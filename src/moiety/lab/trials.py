"""The trials of a plan, and the blocks in which they run.

Main seeds are 0, 1, …; those of a pilot and of a search lie far from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .plan import Plan
from .store import Trial
from .study import Settings, Study


@dataclass(frozen=True)
class Maker:
    """Makes the trials of a study at one scale on one kind of device, as its plan says."""

    study: Study
    scale: str
    device: str
    plan: Plan

    def settings(self, arm: str) -> dict[str, Any]:
        """Those of an arm, over those of the scale."""
        return {**self.study.scale(self.scale).settings, **self.study.arms[arm]}

    def trial(self, arm: str, seed: int, stage: str, tuned: Settings | None = None) -> Trial:
        """One trial; all that decides its numbers is in its settings."""
        settings = {
            **self.settings(arm),
            **(tuned or {}),
            "stage": stage,
            "scale": self.scale,
            "device": torch.device(self.device).type,
        }
        if budget := self.plan.get("budget"):
            settings["examples"] = budget["arms"][arm]["examples"]
        return Trial(self.study.name, arm, seed, settings)

    def blocks(
        self,
        arms: Sequence[str],
        seeds: int,
        stage: str,
        tuned: dict[str, Any] | None = None,
        first: int = 0,
    ) -> list[list[Trial]]:
        """Blocks of trials, seed by seed, so that a run cut short has as much of every arm.

        A block is always whole, also past the last seed that is asked for: numbers may depend on
        its size, and must not change when seeds are added.
        """
        size = self.study.block if self.study.run_block else 1
        starts = [first + size * number for number in range(math.ceil(seeds / size))]
        return [
            [
                self.trial(arm, seed, stage, (tuned or {}).get(arm))
                for seed in range(start, start + size)
            ]
            for start in starts
            for arm in arms
        ]
