"""Our layer beside transformers' experts, routing given, in one interleaved run.

    python benchmarks/layer_cpu.py --out results/layer_cpu.json
    python benchmarks/layer_cpu.py --device cuda --compile --out results/layer_h200.json

On a CPU: swiglu, no bias, fp32, the two shapes below. On a GPU: the shapes of common models in
bf16. Every round times each contender once, in turn; the figure is the median over rounds of the
ratio of our time to that of the faster peer in the same round, with a 95 % interval of the median.
Below one is faster than the peer.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from dataclasses import dataclass

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy import stats
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import moiety
from moiety.io import write_json


@dataclass(frozen=True)
class Shape:
    name: str
    T: int
    d: int
    f: int
    E: int
    k: int
    activation: str = "silu"
    gated: bool = True

    @property
    def forward_flops(self) -> float:
        return 2.0 * self.T * self.k * (3 if self.gated else 2) * self.d * self.f


SHAPES = {
    "cpu": [Shape("wide", 4096, 256, 1024, 8, 2), Shape("fine-grained", 4096, 256, 128, 64, 8)],
    "cuda": [
        Shape("a Mixtral", 16384, 4096, 14336, 8, 2),
        Shape("b OLMoE", 32768, 2048, 1024, 64, 8),
        Shape("c Qwen3-30B", 32768, 2048, 768, 128, 8),
        Shape("d V-MoE-B/32", 25600, 768, 3072, 32, 2, "gelu", gated=False),
        Shape("e Switch-base", 32768, 768, 3072, 128, 1, "relu", gated=False),
    ],
}


@use_experts_implementation(has_gate=False)
class PlainExperts(nn.Module):
    """What transformers' grouped_mm asks of a model with plain (not gated) experts."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.num_experts = config.num_local_experts
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, *_: Tensor) -> Tensor:
        raise NotImplementedError("measured with grouped_mm only")


def peer(shape: Shape, implementation: str, w_in: nn.Parameter, w_out: nn.Parameter) -> nn.Module:
    """transformers' own experts over our weights."""
    config = MixtralConfig(
        hidden_size=shape.d,
        intermediate_size=shape.f,
        num_local_experts=shape.E,
        hidden_act=shape.activation,
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts = MixtralExperts(config) if shape.gated else PlainExperts(config)
    setattr(experts, "gate_up_proj" if shape.gated else "up_proj", w_in)
    experts.down_proj = w_out
    return experts


def inputs(shape: Shape, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tokens, weights and a random routing, all leaves that want a gradient."""
    torch.manual_seed(0)
    scores = torch.randn(shape.T, shape.E, device=device)
    weight, index = scores.softmax(-1).topk(shape.k)
    weight = weight / weight.sum(-1, keepdim=True)
    wide = shape.f * (2 if shape.gated else 1)

    def normal(*size: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*size, device=device, dtype=dtype) * std).requires_grad_()

    return {
        "x": normal(shape.T, shape.d),
        "weight": weight.requires_grad_(),
        "w_in": normal(shape.E, wide, shape.d, std=shape.d**-0.5),
        "w_out": normal(shape.E, shape.d, shape.f, std=shape.f**-0.5),
        "index": index,
        "grad": torch.randn(shape.T, shape.d, device=device, dtype=dtype),
    }


def contenders(shape: Shape, t: dict[str, Tensor], compiled: bool) -> dict:
    """Callables x, index, weight → y over the same weights."""
    ours = moiety.FeedForward(
        shape.E, shape.d, shape.f, activation=shape.activation, gated=shape.gated, bias=False
    )
    ours.w_in, ours.w_out = nn.Parameter(t["w_in"]), nn.Parameter(t["w_out"])
    t["w_in"], t["w_out"] = ours.w_in, ours.w_out

    def layer(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        routing = moiety.Routing(index=index, weight=weight, experts=shape.E, tokens=x.shape[0])
        return ours(x, routing)

    grouped = peer(shape, "grouped_mm", ours.w_in, ours.w_out)
    out = {"moiety auto": layer, "transformers grouped_mm": grouped}
    if t["x"].device.type == "cpu":
        out["transformers eager"] = peer(shape, "eager", ours.w_in, ours.w_out)
    if compiled:
        out["moiety compiled"] = torch.compile(layer, dynamic=False)
        out["transformers compiled"] = torch.compile(grouped, dynamic=False)
    return out


def timed(run, device: str) -> float:
    """Seconds of one call."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def passes(call, t: dict[str, Tensor]) -> dict:
    leaves = [t[n] for n in ("x", "weight", "w_in", "w_out")]

    def forward() -> Tensor:
        with torch.no_grad():
            return call(t["x"], t["index"], t["weight"])

    def both() -> list[Tensor]:
        y = call(t["x"], t["index"], t["weight"])
        return [y.detach(), *torch.autograd.grad(y, leaves, t["grad"])]

    return {"forward": forward, "forward+backward": both}


def agree(calls: dict, t: dict[str, Tensor]) -> dict[str, float]:
    """Largest relative difference of outputs and gradients to the first contender."""
    results = {name: passes(call, t)["forward+backward"]() for name, call in calls.items()}
    reference = next(iter(results.values()))
    gaps = {}
    for name, tensors in results.items():
        pairs = zip(tensors, reference, strict=True)
        gaps[name] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    return gaps


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Median with its distribution-free 95 % interval from the order statistics."""
    ordered, n = sorted(values), len(values)
    low = int(stats.binom.ppf(0.025, n, 0.5))
    middle = ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2
    return middle, ordered[max(low - 1, 0)], ordered[min(n - low, n - 1)]


def measure(shape: Shape, args) -> dict:
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    t = inputs(shape, args.device, dtype)
    calls = contenders(shape, t, args.compile)
    row = {"shape": vars(shape), "agreement": agree(calls, t), "passes": {}}
    for which in ("forward", "forward+backward"):
        runs = {name: passes(call, t)[which] for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for i in track(range(args.rounds + 3), f"{shape.name} {which}", transient=True):
            for name, run in runs.items():
                seconds = timed(run, args.device)
                if i >= 3:  # warm-up
                    times[name].append(seconds)
        row["passes"][which] = compare(times, shape, which)
    return row


def compare(times: dict[str, list[float]], shape: Shape, which: str) -> dict:
    flops = shape.forward_flops * (1 if which == "forward" else 3)
    median = {name: median_interval(v)[0] for name, v in times.items()}
    out = {
        "milliseconds": {n: round(v * 1e3, 3) for n, v in median.items()},
        "tflops": {n: round(flops / v / 1e12, 4) for n, v in median.items()},
        "ratio": {},
    }
    peers = [n for n in times if n.startswith("transformers")]
    best = min(peers, key=median.__getitem__)
    for ours in (n for n in times if n.startswith("moiety")):
        ratios = [a / b for a, b in zip(times[ours], times[best], strict=True)]
        middle, low, high = median_interval(ratios)
        out["ratio"][ours] = {"to": best, "median": middle, "low": low, "high": high}
    return out


def show(rows: list[dict]) -> None:
    table = Table(title="time, and ratio to the faster peer (median, 95 % interval)")
    for column in ("shape", "pass", "contender", "ms", "TFLOP/s", "ratio"):
        table.add_column(column, justify="right" if column in ("ms", "TFLOP/s") else "left")
    for row in rows:
        for which, result in row["passes"].items():
            for name, ms in result["milliseconds"].items():
                r = result["ratio"].get(name)
                ratio = f"{r['median']:.3f} [{r['low']:.3f}, {r['high']:.3f}]" if r else ""
                tflops = f"{result['tflops'][name]:.3f}"
                table.add_row(row["shape"]["name"], which, name, f"{ms:.2f}", tflops, ratio)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--compile", action="store_true", help="compiled contenders too")
    parser.add_argument("--shapes", default="", help="only shapes whose name starts so")
    parser.add_argument("--out", help="write the result as JSON")
    args = parser.parse_args()
    rows = []
    for shape in SHAPES[args.device]:
        if shape.name.startswith(args.shapes):
            rows.append(measure(shape, args))
            torch._dynamo.reset()  # or the limit on recompiles sends later shapes back to eager
            if args.device == "cuda":
                torch.cuda.empty_cache()
    show(rows)
    if args.out:
        write_json(args.out, {"command": command(), "machine": machine(args.device), "rows": rows})


def command() -> str:
    return "python " + " ".join(sys.argv)


def machine(device: str) -> dict[str, str]:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    threads = "" if device == "cuda" else f", {torch.get_num_threads()} threads"
    return {
        "device": name + threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
