"""A binary static DSelect-k gate beside running just its experts, and beside running all of them.

    python benchmarks/conditional.py --out results/conditional_cpu.json
    python benchmarks/conditional.py --device cuda --out results/conditional_gpu.json

64 feed-forward experts, k = 2; on a CPU 1024 examples of width 256 (hidden 512), on a GPU 8192 of
width 512 (hidden 2048); one task, and two tasks that share no expert. The contenders:

gate         a `MultiGate` whose selectors are binary
selected     by hand: those experts alone, a weighted sum for each task, its tower
all          by hand: every expert, a weighted sum for each task, its tower
softmax      a `MultiGate` with a static softmax gate, which needs every expert

Every round times each contender once, in turn. "of selected" is the median over rounds of
(gate / selected) in the same round, asked at most 1.2; "all are" that of (the faster of all and
softmax / gate), asked at least 8. FLOPs are counted, for inference and for a step of training.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moiety import FeedForward, cost
from moiety.io import write_json
from moiety.multitask import MultiGate, Task, describe_gates

EXPERTS, K = 64, 2
SELECTED = [(5, 42), (17, 60)]  # by task


@dataclass(frozen=True)
class Shape:
    examples: int
    dim: int
    hidden: int


SHAPES = {"cpu": Shape(1024, 256, 512), "cuda": Shape(8192, 512, 2048)}
Model = Callable[[Tensor], Any]


def gated(tasks: int, shape: Shape, router: str, like: MultiGate | None = None) -> MultiGate:
    """A MultiGate; with the experts and towers of another, so that only the gate differs."""
    options = {"k": K} if router.startswith("dselect") else {}
    experts = FeedForward(EXPERTS, shape.dim, shape.hidden, activation=F.relu)
    names = [Task(f"task {i}", "number") for i in range(tasks)]
    model = MultiGate(names, experts if like is None else like.experts, router=router, **options)
    if like is not None:
        model.towers = like.towers
    return model


@torch.no_grad()
def make_binary(model: MultiGate) -> None:
    """Put every digit on a plateau: selector i of a task picks the i-th of its experts, evenly."""
    for router, chosen in zip(model.routers, SELECTED, strict=False):
        torch.nn.init.zeros_(router.alpha)
        for z_M, expert in zip(router.z, chosen, strict=True):
            bits = [1.0 if expert >> j & 1 else -1.0 for j in range(router.digits)]
            z_M.copy_(torch.tensor(bits))
    for gate, chosen in zip(describe_gates(model), SELECTED, strict=False):
        assert gate.is_binary and gate.selected == sorted(chosen)


def by_hand(model: MultiGate, chosen: Sequence[Sequence[int]]) -> Model:
    """Just these experts, each once; for each task an even sum of its own, and its tower."""
    experts, towers = model.experts, list(model.towers)
    needed = sorted({e for own in chosen for e in own})

    def run(x: Tensor) -> list[Tensor]:
        answers = {}
        for e in needed:
            h = F.relu(F.linear(x, experts.w_in[e], experts.b_in[e]))
            answers[e] = F.linear(h, experts.w_out[e], experts.b_out[e])
        mixed = [sum(answers[e] * (1 / len(own)) for e in own) for own in chosen]
        return [tower(y) for tower, y in zip(towers, mixed, strict=True)]

    return run


def training_flops(model: MultiGate, x: Tensor) -> float:
    """FLOPs of forward and backward of a step."""
    targets = {task.name: x[:, 0] for task in model.tasks}
    return cost.flops(lambda: model.train().loss(model(x), targets).backward())


# -- the comparison -------------------------------------------------------------------------------


def seconds(run: Model, x: Tensor, calls: int) -> float:
    """Of one call; many in a row, as in serving: a GPU need not wait for one before the next."""
    synchronize(x.device)
    start = time.perf_counter()
    for _ in range(calls):
        run(x)
    synchronize(x.device)
    return (time.perf_counter() - start) / calls


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(tasks: int, shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    gate = gated(tasks, shape, "dselect-k-static").to(device, dtype)
    x = torch.randn(shape.examples, shape.dim, device=device, dtype=dtype)
    flops = {"training, gate not yet binary": training_flops(gate, x)}
    make_binary(gate)
    flops["training, gate binary"] = training_flops(gate, x)
    runs: dict[str, Model] = {
        "gate": gate.eval(),
        "selected": by_hand(gate, SELECTED[:tasks]),
        "all": by_hand(gate, [range(EXPERTS)] * tasks),
        "softmax": gated(tasks, shape, "softmax-static", like=gate).to(device, dtype).eval(),
    }
    with torch.no_grad():
        near = 1e-4 if dtype == torch.float32 else 0.05
        for y, want in zip(runs["gate"](x).values(), runs["selected"](x), strict=True):
            torch.testing.assert_close(y, want, rtol=near, atol=near)
        flops |= {who: cost.flops(lambda run=run: run(x)) for who, run in runs.items()}
        calls = {who: args.calls if who in ("gate", "selected") else 1 for who in runs}
        rounds = [
            {who: seconds(run, x, calls[who]) for who, run in runs.items()}
            for _ in range(1 + args.rounds)
        ][1:]  # what the first allocates and tunes is not counted
    return summary(tasks, rounds, flops)


def summary(
    tasks: int, rounds: Sequence[dict[str, float]], flops: dict[str, float]
) -> dict[str, Any]:
    above = spread([r["gate"] / r["selected"] for r in rounds])
    below = spread([min(r["all"], r["softmax"]) / r["gate"] for r in rounds])
    milli = {who: statistics.median(r[who] for r in rounds) * 1e3 for who in rounds[0]}
    print(f"{tasks} task(s): the gate takes {above['median']:.3f} of selected; ", end="")
    print(f"all experts take {below['median']:.1f} times the gate; ms:", end=" ")
    print(", ".join(f"{who} {value:.2f}" for who, value in milli.items()), flush=True)
    return {"of selected": above, "all are": below, "milliseconds": milli, "flops": flops}


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--calls", type=int, default=10, help="of gate and selected, a round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", type=int, nargs=3, metavar=("EXAMPLES", "DIM", "HIDDEN"))
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    gpu = torch.device(args.device).type == "cuda"
    shape = Shape(*args.shape) if args.shape else SHAPES["cuda" if gpu else "cpu"]
    result = {f"{tasks} tasks": compare(tasks, shape, args) for tasks in (1, 2)}
    if args.out:
        facts = {
            "command": "python benchmarks/conditional.py " + " ".join(sys.argv[1:]),
            "machine": torch.cuda.get_device_name() if gpu else f"CPU, {args.threads} threads",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "dtype": args.dtype,
            "experts": EXPERTS,
            "k": K,
            "examples": shape.examples,
            "dim": shape.dim,
            "hidden": shape.hidden,
            "rounds": args.rounds,
        }
        write_json(args.out, {**facts, "cases": result})


if __name__ == "__main__":
    main()
