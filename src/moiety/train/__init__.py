"""How it learns: a plain training loop, and many seeds in one program, once or phase by phase."""

from .block import ManyFitted
from .draws import step_seed
from .fit import evaluate, find_device, fit, seeded
from .many import fit_many
from .phased import Phased, Rules

__all__ = [
    "ManyFitted",
    "Phased",
    "Rules",
    "evaluate",
    "find_device",
    "fit",
    "fit_many",
    "seeded",
    "step_seed",
]
