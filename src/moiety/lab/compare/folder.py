"""The folder of a comparison: the file that was asked for, and the command that repeats it."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path

from .asked import Asking, read_asked, write_asked

# What may change from one run in a folder to the next; all else makes another comparison.
FREE = ("seeds", "arms", "budget", "equal")
OPTIONS = {"targets": "target", "split_seed": "seed"}  # where they are not named like the field


def write_study(folder: Path, asked: Asking, workers: int, check: Callable[[Path], None]) -> Path:
    """Write study.toml; a folder of another comparison, or one that `check` refuses, raises."""
    file = folder / "study.toml"
    if file.exists():
        refuse_other(file, asked)
    check(folder)
    words = ["--scale", "small", "--equal", asked.equal, "--workers", str(workers)]
    again = shlex.join(["moiety", "study", "run", str(file), *words, "--out", str(folder)])
    heading = f"Which {asked.kind} on these data? Written by `moiety compare {asked.compare}`."
    write_asked(file, asked, [heading, f"Again: {again}", ""])
    return file


def refuse_other(file: Path, asked: Asking) -> None:
    """Raise if a file asks for something that differs in more than seeds and arms."""
    there = read_asked(file)
    if there.compare != asked.compare:
        raise ValueError(
            f"{file.parent} holds a comparison of {there.compare}, not of {asked.compare}: choose "
            "another folder with --out"
        )
    for name in (each.name for each in dataclasses.fields(asked) if each.name not in FREE):
        old, new = getattr(there, name), getattr(asked, name)
        if old != new:
            raise ValueError(
                f"{file.parent} holds a comparison with {name.replace('_', ' ')} {old}, not "
                f"{new}: choose another folder with --out"
            )


def command_line(asked: Asking, folder: Path, device: str, workers: int) -> str:
    """The command that repeats a comparison, with what is not as by default."""
    usual = type(asked)(data=asked.data)
    words = ["moiety", "compare", asked.compare, "--data", asked.data]
    for each in dataclasses.fields(asked):
        value = getattr(asked, each.name)
        if each.name in ("data", "arms") or value == getattr(usual, each.name):
            continue
        shown = ",".join(value) if isinstance(value, list) else value
        shown = f"{value:g}s" if each.name == "budget" else shown
        option = OPTIONS.get(each.name, each.name).replace("_", "-")
        words += [f"--{option}"] + [str(shown)] * (shown is not True)
    if list(asked.arms) != list(usual.arms):
        others = [arm for arm in asked.arms if arm != asked.reference]
        words += [f"--{asked.option}", ",".join(others)]
    words += ["--device", device] * (device != "cpu")
    return shlex.join([*words, "--workers", str(workers), "--out", str(folder)])
