"""The folder of `moiety adapt`: whose it is, what may still change, and how often it was looked at.

plan.json    what was asked for
looks.json   of a comparison: the looks at the examples that it scores
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from .. import io
from ..data.named import NAMED
from .asked import ARMS, JUDGING, TUNING, Asked
from .course import settle
from .reading import training_part

LOOKS = "looks.json"
MODELS = ("adapted", "classifier")  # that are written, of a comparison by arm


def check_out(asked: Asked, out: Path) -> None:
    """Raise for a folder that is another command's, or that is read from."""
    here = out.expanduser().resolve()
    written = [(here / arm / name).resolve() for arm in ("", *ARMS) for name in MODELS]
    for given in (asked.model, asked.unlabelled, asked.labelled, asked.source):
        path = Path(given or "").expanduser()
        if given is None or given in NAMED or not path.exists():
            continue
        data = given != asked.model
        there = (training_part(path) if data else path).resolve()
        taken = here in (there, path.resolve()) or (data and there in here.parents)
        if taken or (not data and there in written):
            raise ValueError(f"--out {out} is where {given} is read from: choose another folder")
    known = known_plan(out)
    if (out / "result.json").exists() and not known:
        raise ValueError(f"{out / 'result.json'} is not of `moiety adapt`: choose another --out")
    # The test was read, or may have been.
    ends = ("result.json", LOOKS, "fine-tuning/result.json")
    ended = any((out / name).exists() for name in ends)
    begun = (out / "pretraining" / "plan.json").exists() or (out / "fine-tuning").exists()
    if not (ended or begun):  # a command that was refused can be put right
        return
    free = JUDGING if ended else (*JUDGING, *TUNING)
    plan = dataclasses.asdict(asked)
    try:
        settle(out, {**plan, **{name: known[name] for name in free if name in known}})
    except ValueError as error:
        other = any(known.get(n) != plan[n] for n in plan if n not in (*free, *TUNING))
        if not ended or other or asked.method == "fine-tune":
            raise
        model = out / "ARM" / "adapted" if asked.method == "compare" else out / "adapted"
        raise ValueError(
            f"{error}; to fine-tune its model in another way, --method fine-tune --model {model}"
        ) from None


def known_plan(out: Path) -> dict[str, Any]:
    """What a folder was begun with; another program's file of that name raises."""
    path = out / "plan.json"
    known = io.read_json(path) if path.exists() else {}
    if not isinstance(known, dict) or (known and "unlabelled" not in known):
        raise ValueError(f"{path} is not of `moiety adapt`: choose another --out")
    return known


def count_look(out: Path, asked: Asked) -> int:
    """Write a look at the scored examples down before it is taken, and say how many there were.

    The same seeds, metric and margin again are the same look.
    """
    path, this = out / LOOKS, {word: getattr(asked, word) for word in JUDGING}
    looks = io.read_json(path) if path.exists() else []
    if this not in looks:
        looks.append(this)
        io.write_json(path, looks)
    return len(looks)
