"""Time of a training step of an upcycled encoder beside the dense one, eager and compiled.

    python benchmarks/upcycled_step.py --device cuda --out results/upcycled_step.json

A BERT of MiniLM's shape (6 layers of width 384), 32 examples of 40 tokens, every second one with
ten of padding; eight copied experts, k = 2, which need 1.7 times the FLOPs of dense. The two models
are timed in turns, so that both meet the same machine; a figure is the median over turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from finetune_minilm import EXPERTS, command
from layer_cpu import machine
from rich import print_json
from transformers import BertConfig, BertForSequenceClassification

import moiety
from moiety.io import write_json

SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_labels": 4,
}
STEPS, TURNS = 10, 9


def stepper(device: str, upcycled: bool, compiled: bool, bf16: bool) -> Callable[[], None]:
    """A training step of a fresh model, warmed up."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SHAPE)).to(device)
    if upcycled:
        model = moiety.upcycle(model, init="copy", inplace=True, **EXPERTS)
    model.train()
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(1000, 20000, (32, 40), device=device)
    mask = torch.ones_like(ids)
    mask[::2, 30:] = 0
    labels = torch.randint(SHAPE["num_labels"], (32,), device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = run(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    return step


def milliseconds(step: Callable[[], None], device: str, steps: int) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - start) / steps * 1e3


def compare(device: str, compiled: bool, bf16: bool, steps: int, turns: int) -> dict[str, float]:
    """Median step of each model, and the median of the ratios of turns."""
    dense, upcycled = (stepper(device, u, compiled, bf16) for u in (False, True))
    times = [
        (milliseconds(dense, device, steps), milliseconds(upcycled, device, steps))
        for _ in range(turns)
    ]
    return {
        "dense_ms": statistics.median(a for a, _ in times),
        "upcycled_ms": statistics.median(b for _, b in times),
        "ratio": statistics.median(b / a for a, b in times),
    }


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps in a turn")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--out", type=Path, required=True, help="the result, a JSON file")
    args = parser.parse_args(argv)
    result = {"command": command(__file__, argv), "machine": machine(args.device), "shape": SHAPE}
    for bf16 in (True, False):
        for compiled in (False, True):
            name = f"{'bf16' if bf16 else 'fp32'} {'compiled' if compiled else 'eager'}"
            torch.compiler.reset()
            result[name] = compare(args.device, compiled, bf16, args.steps, args.turns)
            print_json(data={name: result[name]})
            write_json(args.out, result)


if __name__ == "__main__":
    main(sys.argv[1:])
