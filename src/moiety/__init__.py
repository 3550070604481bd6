"""Moiety: mixture-of-experts models over their whole life.

Import loads torch and nothing heavier.
"""

from .experts import Experts, FeedForward, LowRank, ModuleExperts
from .grow import Growth, grow
from .moe import MoE, explain
from .routing import Router, Routing, balance, build_router, describe, list_routers, register
from .watch import Routes, param_groups, replay, watch

__version__ = "0.1.0"

__all__ = [
    "Experts",
    "FeedForward",
    "Growth",
    "LowRank",
    "MoE",
    "ModuleExperts",
    "Router",
    "Routes",
    "Routing",
    "balance",
    "build_router",
    "describe",
    "explain",
    "grow",
    "list_routers",
    "param_groups",
    "register",
    "replay",
    "watch",
]
