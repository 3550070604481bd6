"""Hugging Face: upcycling, saving and loading, routing health, and the ways out.

Importing it teaches `from_pretrained` to load what `upcycle` made.
"""

import importlib
from typing import TYPE_CHECKING, Any

# What is named like its file is imported at once: else the name would mean the file.
from .export import export
from .saving import load, save
from .transformers_hook import register as _register
from .upcycle import Receipt, receipt, upcycle

if TYPE_CHECKING:
    from .callbacks import RoutingHealth
    from .dense import to_dense

__all__ = [
    "Receipt",
    "RoutingHealth",
    "export",
    "load",
    "receipt",
    "save",
    "to_dense",
    "upcycle",
]
_LATER = {"RoutingHealth": "callbacks", "to_dense": "dense"}  # loaded at their first use

_register()


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'moiety.hf' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
