"""What it learns from: data sets by name or path, as tensors that are ready to train on."""

from .digits import digits, to_patches
from .load import load_problem
from .problem import Leak, Problem, Split, Target

__all__ = ["Leak", "Problem", "Split", "Target", "digits", "load_problem", "to_patches"]
