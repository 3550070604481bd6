"""The stream of the demo: the same images in ten mega-batches, and what waiting and growing cost.

Each learner meets them one after the other, has a model at every time, and writes a ledger.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils.data import TensorDataset

from ...anytime import MLP, Examples, Training, cut, learner, run_stream
from ...io import write_atomic
from ...report import Column, StreamPart

BATCHES, WIDTH = 10, 32
LONGER = 2  # passes over a phase, at most, for one of the routers' demo
LEARNERS: list[tuple[str, str, int, dict[str, Any]]] = [  # name, learner, wait, options
    ("at once", "single", 1, {}),
    ("wait for 5", "single", 5, {}),
    ("ensemble of 3", "ensemble", 1, {"members": 3}),
    ("growing ensemble", "growing-ensemble", 1, {"every": 2}),
]
RESULT = [
    Column("arm", "Learner"),
    Column("average", "Error, mean", ".1%"),
    Column("final", "Error, end", ".1%"),
    Column("parameters", "Parameters", ",d"),
    Column("mflops", "Training MFLOPs", ",.0f"),
]
TITLE = "The same images as a stream"
SUMMARY = (
    f"The training images arrive in {BATCHES} mega-batches; a learner trains on each at once, or "
    "waits. Before its first model it answers by chance, and that counts: the mean is over all "
    "times. No learner sees old images again."
)
NOTES = {
    "Error, mean": "over the times 1 to 10, on the test images: CER / B of Caccia et al. 2022",
    "Parameters": "of the model at the end",
    "Training MFLOPs": "forward and backward, counted, over the whole stream",
}


@dataclass
class Found:
    """What came out: a row for each learner, and its ledger."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[str, list[float]] = field(default_factory=dict)
    ledgers: dict[str, bytes] = field(default_factory=dict)

    def part(self) -> StreamPart | None:
        """Its part of the page."""
        if not self.rows:
            return None
        return StreamPart(TITLE, SUMMARY, self.rows, RESULT, self.errors, NOTES)

    def write(self, folder: Path) -> None:
        """Write the ledgers, a file for each learner."""
        for arm, ledger in self.ledgers.items():
            write_atomic(folder / f"{arm.replace(' ', '-')}.jsonl", ledger)


def run(
    learners: Sequence[tuple[str, str, int, dict[str, Any]]],
    data: TensorDataset,
    test: TensorDataset,
    epochs: int,
    seed: int,
    device: torch.device,
    console: Console | None = None,
) -> Found:
    """Let each learner go through the stream."""
    found, console = Found(), console or Console()
    stream = cut(_examples(data), BATCHES, seed=seed)
    training = Training(method="adam", lr=3e-3, batch=32, epochs=LONGER * epochs)
    for arm, name, wait, options in learners:
        words = {"seed": seed, "device": device, "training": training, **options}
        made = learner(name, lambda _: MLP(WIDTH, inputs=64), **words)
        with console.status(f"{arm}, on a stream"), tempfile.TemporaryDirectory() as out:
            done = run_stream(stream, made, wait=wait, test=_examples(test), seed=seed, out=out)
            found.ledgers[arm] = (Path(out) / "ledger.jsonl").read_bytes()
        sums = done.summary
        found.errors[arm] = [line["error"] for line in done.lines]
        found.rows.append(
            {
                "arm": arm,
                "average": sums.average,
                "final": sums.final,
                "parameters": done.lines[-1]["parameters"],
                "mflops": sums.comp / 1e6,
            }
        )
    return found


def _examples(data: TensorDataset) -> Examples:
    """Images as rows of pixels."""
    x, y = data.tensors
    return Examples(x.flatten(1), y)
