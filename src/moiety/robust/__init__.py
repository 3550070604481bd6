"""What an attacker can do to a model, and through which door.

from moiety.robust import apgd, pgd
x_adv = apgd(model, x, y, eps=8 / 255)
"""

from .apgd import APGD, apgd
from .attack import Attacked, run_attack
from .ball import Ball
from .base import Attack
from .coupling import coupled
from .losses import LOSSES, Loss, build_loss
from .noise import Noise
from .pgd import FGSM, PGD, fgsm, pgd
from .search import RandomSearch, Transfer
from .target import Seen, Target

__all__ = [
    "APGD",
    "FGSM",
    "LOSSES",
    "PGD",
    "Attack",
    "Attacked",
    "Ball",
    "Loss",
    "Noise",
    "RandomSearch",
    "Seen",
    "Target",
    "Transfer",
    "apgd",
    "build_loss",
    "coupled",
    "fgsm",
    "pgd",
    "run_attack",
]
