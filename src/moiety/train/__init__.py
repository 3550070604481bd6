"""How it learns: a plain training loop and its measure."""

from .fit import evaluate, find_device, fit, seeded

__all__ = ["evaluate", "find_device", "fit", "seeded"]
