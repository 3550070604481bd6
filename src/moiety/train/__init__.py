"""How it learns: a plain training loop and its measure, and many seeds in one program."""

from .block import ManyFitted
from .draws import step_seed
from .fit import evaluate, find_device, fit, seeded
from .many import fit_many

__all__ = ["ManyFitted", "evaluate", "find_device", "fit", "fit_many", "seeded", "step_seed"]
