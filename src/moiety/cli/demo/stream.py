"""The stream of the demo: the images in ten mega-batches, and what waiting costs.

Each learner meets them one after the other, has a model at every time, and writes a ledger.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

from ...anytime import Examples, Training, cut, learner, run_stream
from ...io import write_atomic
from ...report import Column, StreamPart

BATCHES, LR = 10, 3e-3
LEARNERS = {"at once": 1, "wait for 5": 5}  # mega-batches that each waits for; the first lives on
RESULT = [
    Column("arm", "Learner"),
    Column("average", "Error, mean", ".1%"),
    Column("final", "Error, end", ".1%"),
    Column("parameters", "Parameters", ",d"),
    Column("mflops", "Training MFLOPs", ",.0f"),
]
TITLE = "The same model learns from a stream"
SUMMARY = (
    f"The labelled images arrive in {BATCHES} mega-batches; the model with experts trains on each "
    "at once, or waits for five. Before its first training it answers by chance, and that counts: "
    "the mean is over all times. No image is seen again later."
)
NOTES = {
    "Error, mean": "over the times 1 to 10, on the test images: CER / B of Caccia et al. 2022",
    "Parameters": "of the model at the end; a classifier has no decoder, which fills patches in",
    "Training MFLOPs": "forward and backward, counted, over the whole stream",
}


@dataclass
class Found:
    """What came out: a row for each learner, and its ledger."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[str, list[float]] = field(default_factory=dict)
    ledgers: dict[str, bytes] = field(default_factory=dict)
    model: nn.Module | None = None  # that of the first learner, at the end

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
    start: Callable[[int], nn.Module],
    data: TensorDataset,
    test: TensorDataset,
    epochs: int,
    seed: int,
    device: torch.device,
    console: Console | None = None,
) -> Found:
    """Let each learner go through the stream, from the same model."""
    found, console = Found(), console or Console()
    stream = cut(_examples(data), BATCHES, seed=seed)
    training = Training(method="adam", lr=LR, batch=32, epochs=epochs)
    for arm, wait in LEARNERS.items():
        made = learner("single", start, seed=seed, device=device, training=training)
        with console.status(f"{arm}, on a stream"), tempfile.TemporaryDirectory() as out:
            done = run_stream(stream, made, wait=wait, test=_examples(test), seed=seed, out=out)
            found.ledgers[arm] = (Path(out) / "ledger.jsonl").read_bytes()
        found.model = found.model or made.models[0]
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
