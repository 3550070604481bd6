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

With `compare = "gates"` an arm names the gate of its tasks: gate = "dselect-k-static".
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
from typing import Any, ClassVar

from ... import io
from ...models.mixture import DENSE
from ...routing import describe, list_routers

ROUTERS = ("top-k", "switch", "sigmoid-balanced", "dselect-k", "perturbed-cosine")
EQUAL = ("flops", "examples", "time")
INITS = ("copy", "noise", "reinit", "split", "low-rank")
COUNTS = ("max_examples", "image_size", "experts", "k", "batch", "seeds")
AMOUNTS = ("lr", "budget", "margin")
LAYER = ("capacity_factor", "overflow", "group", "balance")  # what an arm may set besides
SHARED = "shared-bottom"  # what gates are compared with
GATES = ("softmax", "top-k-static", "dselect-k-static", "dselect-k", "ple", "single-task")
# The models without a router for each task, and the options of each.
UNGATED = {SHARED: (), "single-task": (), "ple": ("shared", "own", "levels")}


def default_arms(routers: Sequence[str] = ROUTERS) -> dict[str, dict[str, Any]]:
    """Dense and these routers, each under its own name."""
    return {name: {"router": name} for name in dict.fromkeys((DENSE, *routers))}


def gate_arms(gates: Sequence[str] = GATES) -> dict[str, dict[str, Any]]:
    """A shared bottom and these gates, each under its own name."""
    return {name: {"gate": name} for name in dict.fromkeys((SHARED, *gates))}


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What every comparison is asked; None: worked out from the data."""

    compare: ClassVar[str]  # what is compared: the word behind `moiety compare`
    kind: ClassVar[str]  # what an arm names: its router, or its gate
    reference: ClassVar[str]  # the arm that the others are compared with
    option: ClassVar[str]  # of the command, that names these others

    data: str  # a path, or a built-in name
    targets: list[str] | None = None
    data_dir: str | None = None  # where built-in data lie
    max_examples: int | None = None
    split_seed: int = 0
    keep_leaks: bool = False  # keep columns that give a target away
    experts: int = 8
    k: int = 2
    lr: float | None = None
    batch: int | None = None
    tune: int = 0  # learning rates tried for every arm
    seeds: int = 5
    budget: float = 300.0  # seconds
    equal: str = "flops"
    margin: float = 0.01
    arms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_types(self)
        _check_values(self)
        if not self.arms:
            raise ValueError(f"arms must name at least one {self.kind}")
        for name, settings in self.arms.items():
            self.check_arm(name, settings)

    def check_arm(self, name: str, settings: Any) -> None:
        """Raise for an arm that names no router or gate, or an option that it lacks."""
        if not isinstance(settings, Mapping) or not isinstance(settings.get(self.kind), str):
            raise ValueError(f'the arm {name!r} must name its {self.kind}: {self.kind} = "top-k"')
        chosen = settings[self.kind]
        known = self.options_of(chosen)
        for word in settings:
            if word != self.kind and word not in known:
                raise ValueError(
                    f"the arm {name!r}: {chosen} has no option {word!r}{near(word, known)}"
                )

    def options_of(self, chosen: str) -> list[str]:
        """What an arm with this router or gate may set; one that is not there raises."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Asked(Asking):
    """A comparison of routers in one model."""

    compare: ClassVar[str] = "routers"
    kind: ClassVar[str] = "router"
    reference: ClassVar[str] = DENSE
    option: ClassVar[str] = "router"

    text: str | None = None  # the column of text
    image_size: int | None = None  # side of the images, in pixels
    model: str | None = None  # a preset, a folder or a hub id
    init: str = "copy"  # how experts start from a pretrained model
    arms: Mapping[str, Mapping[str, Any]] = field(default_factory=default_arms)

    def options_of(self, chosen: str) -> list[str]:
        return [] if chosen == DENSE else [*describe(chosen).options, *LAYER]


@dataclass(frozen=True, kw_only=True)
class AskedGates(Asking):
    """A comparison of the gates of several tasks, on a table."""

    compare: ClassVar[str] = "gates"
    kind: ClassVar[str] = "gate"
    reference: ClassVar[str] = SHARED
    option: ClassVar[str] = "arms"

    arms: Mapping[str, Mapping[str, Any]] = field(default_factory=gate_arms)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.targets is not None and len(set(self.targets)) < 2:
            raise ValueError(
                "gates of tasks need at least two targets, such as --targets income,age; for one, "
                "use moiety compare routers"
            )

    def options_of(self, chosen: str) -> list[str]:
        if chosen in UNGATED:
            return list(UNGATED[chosen])
        if chosen not in list_routers():
            known = [*UNGATED, *list_routers()]
            raise ValueError(f"there is no gate {chosen!r}{near(chosen, known)}")
        return [*describe(chosen).options, "balance"]


# By the annotation of a field: what it is called, and who passes.
TYPES = {
    "str": ("text", lambda v: isinstance(v, str)),
    "int": ("a whole number", lambda v: type(v) is int),
    "bool": ("true or false", lambda v: type(v) is bool),
    "float": ("a number", lambda v: type(v) in (int, float)),
    "list[str]": ("a list of text", lambda v: type(v) is list and all(type(s) is str for s in v)),
}


def _check_types(asked: Asking) -> None:
    """Raise for a value of the wrong type: a TOML file may hold anything."""
    for each in dataclasses.fields(asked):
        value, (kind, _, optional) = getattr(asked, each.name), str(each.type).partition(" | ")
        if kind not in TYPES or (optional and value is None):
            continue
        name, fits = TYPES[kind]
        if not fits(value):
            raise ValueError(f"{each.name} must be {name}, got {value!r}")


def _check_values(asked: Asking) -> None:
    """Raise for a value out of its range."""
    for name in (*COUNTS, *AMOUNTS):
        value = getattr(asked, name, None)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive, got {value}")
    for word, known in (("equal", EQUAL), ("init", INITS)):
        value = getattr(asked, word, known[0])
        if value not in known:
            raise ValueError(f"{word} must be one of {', '.join(known)}, got {value!r}")
    if asked.k > asked.experts:
        raise ValueError(f"k is {asked.k}, but there are only {asked.experts} experts")
    if asked.seeds < 2:
        raise ValueError("seeds must be at least 2: one seed says nothing of a difference")
    if asked.tune < 0:
        raise ValueError(f"tune must be 0 (off) or a number of trials, got {asked.tune}")


def near(word: str, known: Sequence[str]) -> str:
    """A hint at the name that was probably meant."""
    found = get_close_matches(word, known, n=1)
    return f"; did you mean {found[0]}?" if found else f"; there are {', '.join(known) or 'none'}"


# -- the file --------------------------------------------------------------------------------------


KINDS: dict[str, type[Asking]] = {kind.compare: kind for kind in (Asked, AskedGates)}


def read_asked(path: Path) -> Asking:
    """Read a comparison; a key that there is not, or a wrong value, raises with the file's name."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML file: {error}") from None
    compare = given.pop("compare", Asked.compare)
    if compare not in KINDS:
        raise ValueError(f"{path}: compare must be one of {', '.join(KINDS)}, got {compare!r}")
    known = [each.name for each in dataclasses.fields(KINDS[compare])]
    for key in given:
        if key not in known:
            raise ValueError(f"{path}: there is no key {key!r}{near(key, known)}")
    if "data" not in given:
        raise ValueError(f'{path} names no data: data = "digits", or a path')
    try:
        return KINDS[compare](**given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def write_asked(path: Path, asked: Asking, heading: Sequence[str] = ()) -> None:
    """Write a comparison, unless the file says the same already."""
    if path.exists() and read_asked(path) == asked:
        return
    io.write_atomic(path, "".join(f"{line}\n" for line in _lines(asked, heading)))


def _lines(asked: Asking, heading: Sequence[str]) -> list[str]:
    values = dataclasses.asdict(asked)
    arms = values.pop("arms")
    lines = [f"# {line}" if line else "" for line in heading]
    lines += [f"compare = {_toml(asked.compare)}"] * (asked.compare != Asked.compare)
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
