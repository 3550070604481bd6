"""Warm a new head or decoder up, once, before anything else is trained.

    encoder = Encoder.load("encoder-saved-alone/")
    encoder.made                                    # names of what was missing and is random
    warm_up(encoder, rows, steps=500, folder=out / "warm-up")

The result is the initial state: the same for every arm and round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import io
from .encoders import Encoder
from .recipe import WARM_STEPS
from .stage import Recipe, Stage, Trained
from .trained import to_cpu, whole_state

LR = 1e-3


def warm_up(
    encoder: Encoder,
    rows: Any,
    *,
    steps: int = WARM_STEPS,
    batch: int = 64,
    lr: float = LR,
    weight_decay: float = 0.01,
    seed: int = 0,
    folder: str | Path | None = None,
    save_every: float = 30.0,
    tick: Callable[[str, float], None] | None = None,
) -> Trained | None:
    """Train by the masked loss what was made, and nothing else; nothing was made: None.

    With a folder it may be killed at any moment, and goes on to the same bits. What is warm is not
    warmed again: `made` is empty afterwards.
    """
    if not encoder.made:
        return None
    recipe = Recipe(steps=steps, batch=batch, lr=lr, weight_decay=weight_decay, checks=1)
    at = None if folder is None else Path(folder)
    if at is not None:
        _claim(at, {**vars(recipe), "seed": seed, "encoder": encoder.weights_key()})
    with only_made(encoder):
        stage = Stage(
            "warm-up",
            encoder,
            rows,
            recipe,
            seed=seed,
            initial=to_cpu(whole_state(encoder.model)),
            folder=at,
            save_every=save_every,
            tick=tick,
        )
        trained = stage.run()  # or what it left, if it came to its end before
    encoder.made = []
    return trained


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Write what the folder is for, or raise if it is for something else."""
    path = folder / "warm-up.json"
    if not path.exists():
        io.write_json(path, settings)
    elif io.read_json(path) != settings:
        raise ValueError(
            f"{folder} holds the warm-up of another encoder, or with other settings; "
            "choose another folder, or remove it"
        )


@contextmanager
def only_made(encoder: Encoder) -> Iterator[None]:
    """Freeze all but the parameters that were made, and leave each as it was.

    What routers of the trunk count meanwhile is forgotten.
    """
    before = {name: p.requires_grad for name, p in encoder.model.named_parameters()}
    counted = {buffer: buffer.clone() for buffer in encoder.trunk.buffers()}
    made = set(encoder.made)
    for name, parameter in encoder.model.named_parameters():
        parameter.requires_grad_(before[name] and name in made)
    try:
        yield
    finally:
        for name, parameter in encoder.model.named_parameters():
            parameter.requires_grad_(before[name])
        for buffer, value in counted.items():
            buffer.copy_(value)
