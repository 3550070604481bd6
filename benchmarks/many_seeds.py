"""`train.fit_many` beside loops over seeds: time of a step per seed, in one interleaved run.

    python benchmarks/many_seeds.py --device cuda --seeds 100 --out results/many_seeds_gpu.json
    python benchmarks/many_seeds.py --device cpu --seeds 32 --out results/many_seeds_cpu.json

mlp         the MNIST network of ALMA (784 -> 64 -> 64 -> 10; Adadelta, batches of 128)
multi-gate  DSelect-k's synthetic problem: 128 tasks, 32 experts, a gate with k = 4 for each task
            (Adam, batches of 256)
cnn         DSelect-k's Multi-MNIST: 8 convolutional experts, 2 tasks (Adam, batches of 256)

on random numbers, since only time is measured. Beside fit_many with all seeds stand a plain tight
loop (data on the device, foreach optimizer, no logging), fit_many with one seed and, on a GPU, a
loop whose model is compiled and whose whole step, optimizer included, is one CUDA graph. Every
round times each contender once, in turn; a figure is the median over rounds of
(time of the loop / time of fit_many per seed) in the same round: above one is faster.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from moiety.io import write_json
from moiety.routing.selector import digits, selector
from moiety.train import fit_many

EXAMPLES, WARM = 4096, 8  # steps that are not timed: they allocate, compile and capture


class Gates(nn.Module):
    """A static DSelect-k gate for each task: `[tasks, experts]` weights."""

    def __init__(self, tasks: int, experts: int, k: int, width: float = 10.0) -> None:
        super().__init__()
        bits = (experts - 1).bit_length()
        self.width = width
        self.z = nn.Parameter((torch.rand(tasks, k, bits) - 0.5) * width / 50)
        self.alpha = nn.Parameter((torch.rand(tasks, k) - 0.5) / 10)

    def forward(self) -> Tensor:
        chosen_TKE = selector(*digits(self.z, self.width))
        return (self.alpha.softmax(-1)[..., None] * chosen_TKE).sum(1)


class MultiGate(nn.Module):
    """Experts that are sums of four ReLU units, mixed for every task."""

    def __init__(self, tasks: int = 128, experts: int = 32) -> None:
        super().__init__()
        self.units, self.experts = nn.Linear(10, 4 * experts), experts
        self.gates = Gates(tasks, experts, k=4)

    def forward(self, x: Tensor) -> Tensor:
        experts = F.relu(self.units(x)).unflatten(-1, (self.experts, 4)).sum(-1)
        return experts @ self.gates().T


class ConvExperts(nn.Module):
    """Eight small CNNs, mixed for each of two tasks, and a tower for each."""

    def __init__(self, experts: int = 8, tasks: int = 2) -> None:
        super().__init__()
        self.experts = nn.ModuleList(self.cnn() for _ in range(experts))
        self.towers = nn.ModuleList(self.tower() for _ in range(tasks))
        self.gates = Gates(tasks, experts, k=2)

    def cnn(self) -> nn.Module:
        first = nn.Conv2d(1, 10, 5), nn.ReLU(), nn.MaxPool2d(2)
        second = nn.Conv2d(10, 20, 5), nn.ReLU(), nn.MaxPool2d(2)
        return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(720, 50), nn.ReLU())

    def tower(self) -> nn.Module:
        hidden = nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU()
        return nn.Sequential(*hidden, nn.Linear(50, 10))

    def forward(self, x: Tensor) -> Tensor:
        experts_BEF = torch.stack([expert(x) for expert in self.experts], 1)
        mixed_TBF = torch.einsum("te,bef->tbf", self.gates(), experts_BEF)
        return torch.stack([tower(m) for tower, m in zip(self.towers, mixed_TBF)], 1)


def mlp(width: int = 64) -> nn.Module:
    hidden = nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def both_tasks(output: Tensor, target: Tensor) -> Tensor:
    return 2 * F.cross_entropy(output.flatten(0, 1), target.flatten(0, 1))


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    x: tuple[int, ...]
    y: Callable[[], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: int
    optimizer: str
    lr: float


CASES = {
    "mlp": Case(
        mlp, (784,), lambda: torch.randint(10, (EXAMPLES,)), F.cross_entropy, 128, "Adadelta", 1.0
    ),
    "multi-gate": Case(
        MultiGate, (10,), lambda: torch.randn(EXAMPLES, 128), F.mse_loss, 256, "Adam", 1e-3
    ),
    "cnn": Case(
        ConvExperts,
        (1, 36, 36),
        lambda: torch.randint(10, (EXAMPLES, 2)),
        both_tasks,
        256,
        "Adam",
        1e-3,
    ),
}


# -- contenders: seconds of a step for one seed ---------------------------------------------------


def plain(case: Case, data: TensorDataset, steps: int) -> float:
    x, y = data.tensors
    model = case.make().to(x.device)
    optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), case.lr, foreach=True)

    def step(rows: Tensor) -> None:
        loss = case.loss(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return timed(step, case, x.device, steps)


class Compiled:
    """A compiled model whose whole step is one CUDA graph; captured once, timed in every round."""

    def __init__(self, case: Case, data: TensorDataset) -> None:
        x, y = data.tensors
        model = case.make().to(x.device)
        fused = {"foreach": True} if case.optimizer == "Adadelta" else {"fused": True}
        make = getattr(torch.optim, case.optimizer)
        optimizer = make(model.parameters(), case.lr, capturable=True, **fused)
        forward = torch.compile(lambda x, y: case.loss(model(x), y))
        self.rows = torch.randint(EXAMPLES, (case.batch,), device=x.device)

        def step() -> None:
            loss = forward(x[self.rows], y[self.rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph, self.alive = torch.cuda.CUDAGraph(), step  # a graph holds no tensor itself
        with torch.cuda.graph(self.graph):
            step()

    def step(self, rows: Tensor) -> None:
        self.rows.copy_(rows)
        self.graph.replay()


def many(case: Case, data: TensorDataset, steps: int, seeds: int) -> float:
    device, marks = data.tensors[0].device, []

    def mark(step: int) -> None:
        if step in (WARM, WARM + steps):
            synchronize(device)
            marks.append(time.perf_counter())

    fit_many(
        lambda seed: case.make(),
        data,
        seeds=range(seeds),
        steps=WARM + steps,
        batch=case.batch,
        lr=case.lr,
        loss=case.loss,
        optimizer=case.optimizer.lower(),
        device=device,
        on_step=mark,
    )
    times = [end - start for start, end in zip(marks[::2], marks[1::2])]  # of each block
    return sum(times) / steps / seeds


def timed(step: Callable[[Tensor], Any], case: Case, device: torch.device, steps: int) -> float:
    batches = (EXAMPLES + case.batch - 1) // case.batch
    epochs = math.ceil((WARM + steps) / batches)
    order = [
        rows
        for _ in range(epochs)
        for rows in torch.randperm(EXAMPLES).to(device).split(case.batch)
    ]
    for rows in order[:WARM]:
        step(rows)
    synchronize(device)
    start = time.perf_counter()
    for rows in order[WARM : WARM + steps]:
        step(rows)
    synchronize(device)
    return (time.perf_counter() - start) / steps


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- the comparison -------------------------------------------------------------------------------


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    case, device = CASES[name], torch.device(args.device)
    data = TensorDataset(torch.randn(EXAMPLES, *case.x).to(device), case.y().to(device))
    contenders = {
        "plain": lambda: plain(case, data, args.steps),
        "fit_many, 1 seed": lambda: many(case, data, args.steps, 1),
        "fit_many": lambda: many(case, data, args.steps, args.seeds),
    }
    if device.type == "cuda":
        compiled = Compiled(case, data)
        contenders["compiled"] = lambda: timed(compiled.step, case, device, args.steps)
    rounds = [{who: run() for who, run in contenders.items()} for _ in range(args.rounds)]
    micro = {who: statistics.median(r[who] for r in rounds) * 1e6 for who in contenders}
    times = {who: [r[who] / r["fit_many"] for r in rounds] for who in contenders}
    row = {
        "microseconds of a step per seed": micro,
        "times faster than": {
            who: {"median": statistics.median(t), "least": min(t), "most": max(t)}
            for who, t in times.items()
            if who != "fit_many"
        },
    }
    print(f"{name}: {args.seeds} seeds; µs of a step per seed:", end=" ")
    print(", ".join(f"{who} {value:.1f}" for who, value in micro.items()), end="; ")
    print(", ".join(f"{statistics.median(t):.1f}× {w}" for w, t in times.items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", action="append", choices=CASES, help="only this one")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", message="fit_many trains")  # said in the result instead
    result = {name: compare(name, args) for name in args.case or CASES}
    if args.out:
        gpu = torch.device(args.device).type == "cuda"
        machine = torch.cuda.get_device_name() if gpu else f"CPU, {args.threads} threads"
        facts = {
            "machine": machine,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        settings = {key: vars(args)[key] for key in ("seeds", "steps", "rounds")}
        command = "python benchmarks/many_seeds.py " + " ".join(sys.argv[1:])
        write_json(args.out, {"command": command, **facts, **settings, "cases": result})


if __name__ == "__main__":
    main()
