"""Who does the work: experts and the ways to run them."""

from .base import Experts, StackedExperts
from .dispatch import by_slot, combine, dispatch
from .feedforward import FeedForward
from .lowrank import LowRank
from .modules import ModuleExperts

__all__ = [
    "Experts",
    "FeedForward",
    "LowRank",
    "ModuleExperts",
    "StackedExperts",
    "by_slot",
    "combine",
    "dispatch",
]
