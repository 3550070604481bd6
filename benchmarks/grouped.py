"""Time of the grouped product in float32 on a GPU: our kernels beside torch's `grouped_mm`.

    python benchmarks/grouped.py --out results/grouped.json

The product of a layer's forward pass, and the sums over rows of its weights' gradient, for sizes of
small and of large experts with rows spread evenly. The two are timed in turns; a figure is the
median over turns, and "ratio" is torch's time through ours. TF32 as torch has it, off and on; where
it is on and experts are wide, torch is faster, and a layer takes torch's (experts/grouped.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from finetune_minilm import command
from layer_cpu import machine
from rich import print_json
from torch import Tensor
from torch.nn import functional as F
from upcycled_step import milliseconds

from moiety.experts.grouped import grouped_mm, grouped_outer
from moiety.io import write_json

SIZES = [  # rows, inputs, outputs, experts
    (98304, 64, 256, 32),
    (98304, 256, 64, 32),
    (32768, 64, 256, 8),
    (16384, 768, 3072, 64),
    (16384, 1024, 4096, 8),
    (16384, 4096, 1024, 8),
]
STEPS, TURNS = 10, 7


def pairs(
    rows: int, inputs: int, outputs: int, experts: int, device: str
) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """What ours and torch's compute alike, by name."""
    torch.manual_seed(0)
    a_NI, g_NO = (torch.randn(rows, width, device=device) for width in (inputs, outputs))
    w_EOI = torch.randn(experts, outputs, inputs, device=device)
    ends_E = (torch.arange(1, experts + 1, device=device) * (rows // experts)).int()
    product, outer = grouped_mm, grouped_outer
    if device == "cuda":
        from moiety.experts.kernels import outer, product
    return {
        "product": (
            lambda: product(a_NI, w_EOI, ends_E),
            lambda: F.grouped_mm(a_NI, w_EOI.transpose(1, 2), offs=ends_E),
        ),
        "sums": (
            lambda: outer(g_NO, a_NI, ends_E),
            lambda: F.grouped_mm(g_NO.t(), a_NI, offs=ends_E),
        ),
    }


def compare(
    ours: Callable[[], Tensor], torchs: Callable[[], Tensor], device: str, steps: int, turns: int
) -> dict[str, float]:
    """Median times in microseconds, how many times ours torch takes, and how far apart they are."""
    a, b = ours(), torchs()
    times = [
        (1e3 * milliseconds(ours, device, steps), 1e3 * milliseconds(torchs, device, steps))
        for _ in range(turns)
    ]
    return {
        "ours_us": statistics.median(x for x, _ in times),
        "torch_us": statistics.median(y for _, y in times),
        "ratio": statistics.median(y / x for x, y in times),
        "largest_difference": float((a - b).abs().max() / b.abs().max()),
    }


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many, smallest first")
    parser.add_argument("--steps", type=int, default=STEPS, help="products in a turn")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--out", type=Path, required=True, help="the result, a JSON file")
    args = parser.parse_args(argv)
    cases = []
    for tf32 in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        for rows, inputs, outputs, experts in SIZES[: args.sizes]:
            size = {"rows": rows, "inputs": inputs, "outputs": outputs, "experts": experts}
            for name, both in pairs(rows, inputs, outputs, experts, args.device).items():
                found = compare(*both, args.device, args.steps, args.turns)
                cases.append({"what": name, "tf32": tf32, **size, **found})
                print_json(data=cases[-1])
    about = {"command": command(__file__, argv), "machine": machine(args.device)}
    write_json(args.out, {**about, "cases": cases})


if __name__ == "__main__":
    main(sys.argv[1:])
