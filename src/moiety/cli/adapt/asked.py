"""What `moiety adapt` was asked for: sizes, and options that would do nothing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# How the library calls what a reader of the command line knows as an option.
WORDS = {
    "say fit=True": "give --fit",
    "say column=NAME": "give --text NAME",
    "say text=NAME": "give --labelled-text NAME",
    "a cache_limit": "a --cache-limit",
    "say which column to predict": "say with --target which column to predict",
    "say which column holds the text": "say with --text which column holds the text",
}
OF_COMPARE = ("seeds", "labels", "metric", "margin")
OF_LABELS = ("tune", "epochs", "tune_batch", "tune_lr", "target", "labelled_text")
OF_ROUNDS = (
    *("rounds", "match", "mae_weight", "distill_weight", "distill_every", "match_routing"),
    "cache_limit",
)
OF_PRETRAINING = (
    *("source", "steps", "batch", "lr", "checks", "stop", "patience", "warm_steps", "lora"),
    *OF_ROUNDS,
)
OF_TEACHER = ("match", "distill_every", "match_routing", "cache_limit")


def read_bytes(text: str) -> int:
    """`10GB` in bytes."""
    found = re.fullmatch(r"([\d.]+)\s*([kmgt]?b)?", text.strip(), re.IGNORECASE)
    try:
        number = float(found[1]) if found else -1.0
    except ValueError:
        number = -1.0
    unit = (found[2] or "").upper() if found else ""
    if number < 0 or (number and not unit):
        raise ValueError(f"--cache-limit must be 0 or a size such as 500MB or 10GB, not {text!r}")
    return int(number * UNITS[unit]) if unit else 0


def refuse_idle(given: Mapping[str, Any]) -> None:
    """Raise for an option that would be ignored."""
    method = given["method"]
    idle = {
        "goes with --method compare": OF_COMPARE if method != "compare" else (),
        "goes with pre-training, and --method fine-tune has none": OF_PRETRAINING
        if method == "fine-tune"
        else (),
        "goes with --labelled": OF_LABELS if "labelled" not in given else (),
        "goes with self-distillation, not with --method further": OF_ROUNDS
        if method == "further"
        else (),
        "goes with a --distill-weight above 0": OF_TEACHER
        if given.get("distill_weight") == 0
        else (),
        "goes with --stop probe": ("patience",) if "stop" not in given else (),
    }
    for why, names in idle.items():
        for name in names:
            if name in given:
                raise ValueError(f"--{name.replace('_', '-')} {why}")


def command_line(given: Mapping[str, Any]) -> str:
    """The command that repeats this."""
    words = ["moiety", "adapt"]
    for name, value in given.items():
        if value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join(words)


@contextmanager
def in_options() -> Iterator[None]:
    """Say what the library refuses in the words of the command line."""
    try:
        yield
    except ValueError as error:
        said = str(error)
        for ours, theirs in WORDS.items():
            said = said.replace(ours, theirs)
        if said == str(error):
            raise
        raise ValueError(said) from None
