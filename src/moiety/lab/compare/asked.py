"""What is asked of a comparison, as a value and as a TOML file that can be run again.

data = "people.csv"
targets = ["income"]
seeds = 5
budget = 300

[arms.dense]
router = "dense"

[arms.top-4]
router = "top-k"
k = 4
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ... import io
from ...models.mixture import DENSE
from ...routing import describe

ROUTERS = ("top-k", "switch", "sigmoid-balanced", "dselect-k", "perturbed-cosine")
EQUAL = ("flops", "examples", "time")
INITS = ("copy", "noise", "reinit", "split", "low-rank")
COUNTS = ("max_examples", "image_size", "experts", "k", "batch", "seeds")
AMOUNTS = ("lr", "budget", "margin")
LAYER = ("capacity_factor", "overflow", "group", "balance")  # what an arm may set besides


def default_arms(routers: Sequence[str] = ROUTERS) -> dict[str, dict[str, Any]]:
    """Dense and these routers, each under its own name."""
    return {name: {"router": name} for name in dict.fromkeys((DENSE, *routers))}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A comparison of routers; None: worked out from the data."""

    data: str  # a path, or a built-in name
    targets: list[str] | None = None
    text: str | None = None  # the column of text
    data_dir: str | None = None  # where built-in data lie
    max_examples: int | None = None
    split_seed: int = 0
    image_size: int | None = None  # side of the images, in pixels
    keep_leaks: bool = False  # keep columns that give a target away
    model: str | None = None  # a preset, a folder or a hub id
    experts: int = 8
    k: int = 2
    init: str = "copy"  # how experts start from a pretrained model
    lr: float | None = None
    batch: int | None = None
    tune: int = 0  # learning rates tried for every arm
    seeds: int = 5
    budget: float = 300.0  # seconds
    equal: str = "flops"
    margin: float = 0.01
    arms: Mapping[str, Mapping[str, Any]] = field(default_factory=default_arms)

    def __post_init__(self) -> None:
        _check_types(self)
        _check_values(self)
        if not self.arms:
            raise ValueError("arms must name at least one router")
        for name, settings in self.arms.items():
            _check_arm(name, settings)


# By the annotation of a field: what it is called, and who passes.
TYPES = {
    "str": ("text", lambda v: isinstance(v, str)),
    "int": ("a whole number", lambda v: type(v) is int),
    "bool": ("true or false", lambda v: type(v) is bool),
    "float": ("a number", lambda v: type(v) in (int, float)),
    "list[str]": ("a list of text", lambda v: type(v) is list and all(type(s) is str for s in v)),
}


def _check_types(asked: Asked) -> None:
    """Raise for a value of the wrong type: a TOML file may hold anything."""
    for each in dataclasses.fields(asked):
        value, (kind, _, optional) = getattr(asked, each.name), str(each.type).partition(" | ")
        if kind not in TYPES or (optional and value is None):
            continue
        name, fits = TYPES[kind]
        if not fits(value):
            raise ValueError(f"{each.name} must be {name}, got {value!r}")


def _check_values(asked: Asked) -> None:
    """Raise for a value out of its range."""
    for name in (*COUNTS, *AMOUNTS):
        value = getattr(asked, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive, got {value}")
    for word, known in (("equal", EQUAL), ("init", INITS)):
        value = getattr(asked, word)
        if value not in known:
            raise ValueError(f"{word} must be one of {', '.join(known)}, got {value!r}")
    if asked.k > asked.experts:
        raise ValueError(f"k is {asked.k}, but there are only {asked.experts} experts")
    if asked.seeds < 2:
        raise ValueError("seeds must be at least 2: one seed says nothing of a difference")
    if asked.tune < 0:
        raise ValueError(f"tune must be 0 (off) or a number of trials, got {asked.tune}")


def _check_arm(name: str, settings: Any) -> None:
    """Raise for an arm without a router, a router that is not there, an option it lacks."""
    if not isinstance(settings, Mapping) or not isinstance(settings.get("router"), str):
        raise ValueError(f'the arm {name!r} must name its router: router = "top-k"')
    router = settings["router"]
    options = [word for word in settings if word != "router"]
    known = [] if router == DENSE else [*describe(router).options, *LAYER]
    for word in options:
        if word not in known:
            raise ValueError(
                f"the arm {name!r}: {router} has no option {word!r}{near(word, known)}"
            )


def near(word: str, known: Sequence[str]) -> str:
    """A hint at the name that was probably meant."""
    found = get_close_matches(word, known, n=1)
    return f"; did you mean {found[0]}?" if found else f"; there are {', '.join(known) or 'none'}"


# -- the file --------------------------------------------------------------------------------------


def read_asked(path: Path) -> Asked:
    """Read a comparison; a key that there is not, or a wrong value, raises with the file's name."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML file: {error}") from None
    known = [each.name for each in dataclasses.fields(Asked)]
    for key in given:
        if key not in known:
            raise ValueError(f"{path}: there is no key {key!r}{near(key, known)}")
    if "data" not in given:
        raise ValueError(f'{path} names no data: data = "digits", or a path')
    try:
        return Asked(**given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def write_asked(path: Path, asked: Asked, heading: Sequence[str] = ()) -> None:
    """Write a comparison, unless the file says the same already."""
    if path.exists() and read_asked(path) == asked:
        return
    io.write_atomic(path, "".join(f"{line}\n" for line in _lines(asked, heading)))


def _lines(asked: Asked, heading: Sequence[str]) -> list[str]:
    values = dataclasses.asdict(asked)
    arms = values.pop("arms")
    lines = [f"# {line}" if line else "" for line in heading]
    lines += [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
    for name, settings in arms.items():
        lines += ["", f"[arms.{_key(name)}]"]
        lines += [f"{_key(key)} = {_toml(value)}" for key, value in settings.items()]
    return lines


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    """A value as TOML, which for these is JSON, but for tables and the delete character."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
