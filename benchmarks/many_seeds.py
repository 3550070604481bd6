"""`train.fit_many` beside a plain tight loop: time of a step per seed, in one interleaved run.

    python benchmarks/many_seeds.py --seeds 32 --threads 2

The model is the MNIST network of ALMA (784 -> c -> c -> 10, batches of 128, Adadelta), on random
numbers, since only time is measured. The plain loop has its data on the device, a foreach
optimizer and no logging. Every round times each contender once, in turn; the figure is the median
over rounds of plain time / our time per seed in the same round: above one is faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from moiety.train import fit_many

BATCH, WARM = 128, 5  # steps that are not timed: the first ones allocate


def mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def plain(width: int, data: TensorDataset, steps: int) -> float:
    """Seconds of a step of one model."""
    x, y = data.tensors
    model = mlp(width)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0, foreach=True)
    for step, rows in zip(range(WARM + steps), endless_batches(len(y))):
        if step == WARM:
            start = time.perf_counter()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (time.perf_counter() - start) / steps


def endless_batches(examples: int) -> Iterator[torch.Tensor]:
    while True:
        yield from torch.randperm(examples).split(BATCH)


def many(width: int, data: TensorDataset, steps: int, seeds: int) -> float:
    """Seconds of a step, divided by the number of seeds."""
    ends: list[float] = []
    fit_many(
        lambda seed: mlp(width),
        data,
        seeds=range(seeds),
        steps=WARM + steps,
        batch=BATCH,
        lr=1.0,
        optimizer="adadelta",
        on_step=lambda step: ends.append(time.perf_counter()),
    )
    return (ends[-1] - ends[WARM - 1]) / steps / seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = TensorDataset(torch.randn(4096, 784), torch.randint(10, (4096,)))
    for width in (4, 32, 64):
        times = [
            (
                plain(width, data, args.steps),
                many(width, data, args.steps, 1),
                many(width, data, args.steps, args.seeds),
            )
            for _ in range(args.rounds)
        ]
        micro = [statistics.median(column) * 1e6 for column in zip(*times)]
        one, all_ = (statistics.median(row[0] / row[i] for row in times) for i in (1, 2))
        print(
            f"width {width:3}: plain {micro[0]:6.0f} µs a step; fit_many with 1 seed "
            f"{micro[1]:6.0f} ({one:.2f}×), with {args.seeds} seeds "
            f"{micro[2]:6.0f} a seed ({all_:.2f}×)"
        )


if __name__ == "__main__":
    main()
