"""Moiety: mixture-of-experts models over their whole life.

Import loads torch and nothing heavier; what needs `transformers` is loaded at its first use.
"""

from typing import TYPE_CHECKING, Any

from .experts import Experts, FeedForward, LowRank, ModuleExperts
from .grow import Growth, grow
from .moe import MoE, explain
from .routing import Router, Routing, balance, build_router, describe, list_routers, register
from .watch import Routes, param_groups, replay, watch

if TYPE_CHECKING:
    from .hf.callbacks import RoutingHealth
    from .hf.dense import to_dense
    from .hf.export import export
    from .hf.saving import load, save
    from .hf.upcycle import receipt, upcycle

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
    "RoutingHealth",
    "balance",
    "build_router",
    "describe",
    "explain",
    "export",
    "grow",
    "list_routers",
    "load",
    "param_groups",
    "receipt",
    "register",
    "replay",
    "save",
    "to_dense",
    "upcycle",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'moiety' has no attribute {name!r}")
    from . import hf

    return getattr(hf, name)
