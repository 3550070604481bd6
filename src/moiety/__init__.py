"""Moiety: mixture-of-experts models over their whole life.

Import loads torch and nothing heavier.
"""

from .routing import Router, Routing, balance, build_router, describe, list_routers, register

__version__ = "0.1.0"

__all__ = [
    "Router",
    "Routing",
    "balance",
    "build_router",
    "describe",
    "list_routers",
    "register",
]
