"""Who gets the token: routers, their decision, and the losses on it.

Every module of this folder is imported, so that a new router is one new file and no edit elsewhere.
"""

import importlib
import pkgutil

from . import balance as balance
from .base import LinearRouter, Opt, Router
from .registry import build_router, describe, list_routers, register
from .value import Plan, Routing

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "LinearRouter",
    "Opt",
    "Plan",
    "Router",
    "Routing",
    "balance",
    "build_router",
    "describe",
    "list_routers",
    "register",
]
