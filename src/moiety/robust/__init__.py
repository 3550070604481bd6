"""What an attacker can do to a model, and through which door.

from moiety.robust import apgd, pgd
x_adv = apgd(model, x, y, eps=8 / 255)
"""

from .apgd import APGD, apgd
from .attack import Attacked, run_attack
from .attribution import Frozen, Parts, attribute, freeze
from .audit import Audit, audit
from .audit_attacks import FromClean, named_attacks
from .audit_check import check_audit
from .ball import Ball
from .base import Attack
from .coupling import coupled
from .losses import LOSSES, Loss, build_loss
from .noise import Noise
from .pgd import FGSM, PGD, fgsm, pgd
from .routes import routing_change
from .search import RandomSearch, Transfer
from .target import Seen, Target

__all__ = [
    "APGD",
    "FGSM",
    "LOSSES",
    "PGD",
    "Attack",
    "Attacked",
    "Audit",
    "Ball",
    "FromClean",
    "Frozen",
    "Loss",
    "Noise",
    "Parts",
    "RandomSearch",
    "Seen",
    "Target",
    "Transfer",
    "apgd",
    "attribute",
    "audit",
    "build_loss",
    "check_audit",
    "coupled",
    "fgsm",
    "freeze",
    "named_attacks",
    "pgd",
    "routing_change",
    "run_attack",
]
