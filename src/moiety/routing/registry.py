"""Routers by name: one decorator registers, documents and declares the options of a router.

@register("my-router", paper="Someone 2030", equation="(3): g = softmax(W x)")
class MyRouter(Router):
    def __init__(self, dim, experts, *, k: Annotated[int, Opt("experts a token", low=1)] = 2):
        ...
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import Tensor

from .base import Opt, Router

_ROUTERS: dict[str, type[Router]] = {}


@dataclass(frozen=True)
class Option:
    """One option of a router, as `describe` shows it."""

    name: str
    default: object
    rule: Opt

    def __str__(self) -> str:
        rule = self.rule
        if rule.choices is not None:
            bounds = " one of " + ", ".join(map(str, rule.choices))
        elif rule.low is None and rule.high is None:
            bounds = ""
        else:
            bounds = f" {rule.low} … {'' if rule.high is None else rule.high}".rstrip()
        return f"{self.name}={self.default!r}{bounds and ' (' + bounds.strip() + ')'}: {rule.doc}"


@dataclass(frozen=True)
class Description:
    """What is known about a registered router; `print` it."""

    name: str
    paper: str
    equation: str
    summary: str
    options: dict[str, Option]

    def __str__(self) -> str:
        head = f"{self.name}: {self.summary}\n  paper: {self.paper}\n  equation: {self.equation}"
        return "\n".join([head, *(f"  {option}" for option in self.options.values())])


def register(name: str, *, paper: str, equation: str) -> Callable[[type[Router]], type[Router]]:
    """Register a `Router` class under a name. A name that is taken raises."""

    def add(cls: type[Router]) -> type[Router]:
        if name in _ROUTERS:
            raise ValueError(f"a router named {name!r} is registered already ({_ROUTERS[name]})")
        cls.name, cls.paper, cls.equation = name, paper, equation
        options_of(cls)  # an option without an `Opt` raises here, not at its first use
        _ROUTERS[name] = cls
        return cls

    return add


def unregister(name: str) -> None:
    """Take a name out of the registry (for tests of routers that live elsewhere)."""
    _ROUTERS.pop(name)


def options_of(cls: type[Router]) -> dict[str, Option]:
    """Read the options off a router's signature."""
    known: Any = cls  # mypy takes a class of modules for something that cannot be a key
    return _options_of(known)


@functools.cache  # reading annotations takes longer than building a small router
def _options_of(cls: type[Router]) -> dict[str, Option]:
    hints = typing.get_type_hints(cls.__init__, include_extras=True)
    options = {}
    for parameter in inspect.signature(cls.__init__).parameters.values():
        if parameter.name in ("self", "dim", "experts"):
            continue
        notes = getattr(hints.get(parameter.name), "__metadata__", ())
        rule = next((note for note in notes if isinstance(note, Opt)), None)
        if rule is None or parameter.kind is not parameter.KEYWORD_ONLY:
            raise TypeError(
                f"{cls.__name__}: option {parameter.name!r} must be keyword-only and annotated "
                "Annotated[type, Opt(...)]"
            )
        options[parameter.name] = Option(parameter.name, parameter.default, rule)
    return options


def find(name: str) -> type[Router]:
    if name not in _ROUTERS:
        near = get_close_matches(name, _ROUTERS, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise ValueError(f"no router is named {name!r}{hint} Names: {', '.join(list_routers())}")
    return _ROUTERS[name]


def build_router(name: str, *, dim: int, experts: int, **options: Any) -> Router:
    """Build a registered router. An option that it lacks, or a value out of range, raises.

    A number may be given as a tensor: it becomes a buffer, in which copies of the router that
    `train.fit_many` trains together may differ.
    """
    cls = find(name)
    known = options_of(cls)
    tensors = {option: value for option, value in options.items() if isinstance(value, Tensor)}
    options = {n: one_number(f"{name}: {n}", value) for n, value in options.items()}
    for option, value in options.items():
        if option not in known:
            raise ValueError(
                f"router {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}"
            )
        known[option].rule.check(name, option, value, known[option].default)
    router = cls(dim, experts, **options)
    router.options = options
    for option, value in tensors.items():
        _make_buffer(router, option, value)
    return router


def _make_buffer(router: Router, option: str, value: Tensor) -> None:
    """Keep an option in a buffer instead of a plain attribute."""
    if isinstance(getattr(router, option, None), float):
        delattr(router, option)
        router.register_buffer(option, value.detach().clone().reshape(()), persistent=False)
    elif option not in dict(router.named_buffers()):
        raise ValueError(
            f"{router.name}: {option} cannot be a tensor of {value.dtype}: give a plain number"
        )


def one_number(what: str, value: Any) -> Any:
    """A value as it is; of a tensor its number, and more than one raise."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{what} must be one number, got a tensor of shape {list(value.shape)}")
    return value.item() if isinstance(value, Tensor) else value


def list_routers(pattern: str = "*") -> list[str]:
    """The registered names that match a shell pattern, such as `"*cosine*"`."""
    return sorted(fnmatch.filter(_ROUTERS, pattern))


def describe(name: str) -> Description:
    """Options with ranges and meaning, paper and equation of a router."""
    cls = find(name)
    summary = (inspect.getdoc(cls) or "").split("\n", 1)[0]
    return Description(name, cls.paper, cls.equation, summary, options_of(cls))
