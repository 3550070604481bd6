"""When a training that may be killed at any moment writes its state.

saving = Saving(30.0)                # seconds between two states, or more where writing is slow
while training:
    ...
    if saving.due:
        saving(write)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

SHARE = 20  # a large model trains at least so many times as long as it is being saved


class Saving:
    """A clock between states; one that took long among quick ones, on a busy disk, does not count.

    every    seconds; 0: always due
    """

    def __init__(self, every: float) -> None:
        self.every = self.pause = every
        self.took = math.inf  # the last state
        self.last = time.monotonic()

    @property
    def due(self) -> bool:
        return time.monotonic() - self.last >= self.pause

    def __call__(self, write: Callable[[], None]) -> None:
        began = time.monotonic()
        write()
        self.last = time.monotonic()
        took, before = self.last - began, self.took
        self.took = took
        self.pause = self.every and max(self.every, SHARE * min(took, before))
