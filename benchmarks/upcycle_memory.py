"""Time and memory of upcycling Llama-shaped models in place, with random bf16 weights.

    python benchmarks/upcycle_memory.py --out results/upcycle_memory.json
    python benchmarks/upcycle_memory.py copy-1b --scale tiny --device cpu --out out/memory.json

low-rank-7b: eight low-rank experts on a frozen model of 7 B, and one training step of experts and
routers, within 24 GB (10^9 bytes). copy-1b: eight copies in a model of 1.1 B, in less than ten
seconds, with a peak of at most 1.1 times the memory of the result. On a CPU, no peak is taken.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from finetune_minilm import EXPERTS, command, receipt
from layer_cpu import machine
from rich import print_json
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import moiety
from moiety.cost import parameters
from moiety.io import read_json, write_json

GB = 1e9
SHAPES = {
    "low-rank-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "copy-1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
}
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def build(shape: dict[str, int], device: str) -> nn.Module:
    """The dense model, made on the device in bf16 with no fp32 copy on the way."""
    torch.manual_seed(0)
    with torch.device(device):
        config = LlamaConfig(vocab_size=32000, **shape)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def measured(run: Callable[[], Any], device: str) -> tuple[Any, dict[str, float]]:
    """What `run` returns, its seconds, and on a GPU its peak of memory, all that lives included."""
    if device == "cuda":
        torch.cuda.synchronize()
        gc.collect()  # what an earlier case has left
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    cost = {"seconds": time.perf_counter() - start}
    if device == "cuda":
        cost["peak_gb"] = torch.cuda.max_memory_allocated() / GB
        cost["peak_reserved_gb"] = torch.cuda.max_memory_reserved() / GB
    return result, cost


def size_gb(model: nn.Module) -> float:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors) / GB


def freeze_all_but_experts(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """What trains, by group; the base under low-rank experts is frozen by upcycling already."""
    groups = {group["name"]: group["params"] for group in moiety.param_groups(model)}
    for parameter in groups.pop("rest"):
        parameter.requires_grad_(False)
    return {name: [p for p in params if p.requires_grad] for name, params in groups.items()}


def train_step(model: nn.Module, groups: dict[str, list[nn.Parameter]], tokens: int) -> dict:
    """One step of AdamW with gradient checkpointing; the loss and each group's gradient norm."""
    model.train()
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW([p for params in groups.values() for p in params], lr=1e-4)
    ids = torch.randint(model.config.vocab_size, (1, tokens), device=model.device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    norms = {
        name: float(nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]))
        for name, params in groups.items()
    }
    optimizer.step()
    return {"loss": loss.item(), "gradient_norm": norms}


def low_rank_7b(shape: dict[str, int], device: str) -> dict[str, Any]:
    model = build(shape, device)
    options = {**EXPERTS, "init": "low-rank", "rank": 8}
    model, upcycling = measured(lambda: moiety.upcycle(model, inplace=True, **options), device)
    groups = freeze_all_but_experts(model)
    tokens = 512
    step, cost = measured(lambda: train_step(model, groups, tokens), device)
    peaks = [c["peak_gb"] for c in (upcycling, cost) if "peak_gb" in c]
    return {
        "options": options,
        "upcycling": upcycling,
        "step": {"tokens": tokens, **step, **cost},
        "trainable": parameters(model, trainable=True),
        "model_gb": size_gb(model),
        "receipt": receipt(model),
        "holds": {
            "loss is finite": math.isfinite(step["loss"]),
            "gradients reach the experts": step["gradient_norm"]["experts"] > 0,
            "peak below 24 GB": max(peaks) < 24 if peaks else None,
        },
    }


def copy_1b(shape: dict[str, int], device: str) -> dict[str, Any]:
    model = build(shape, device)
    options = {**EXPERTS, "init": "copy"}
    model, upcycling = measured(lambda: moiety.upcycle(model, inplace=True, **options), device)
    after = size_gb(model)
    ratio = upcycling["peak_gb"] / after if "peak_gb" in upcycling else None
    return {
        "options": options,
        "upcycling": upcycling,
        "model_gb": after,
        "peak_to_model": ratio,
        "receipt": receipt(model),
        "holds": {
            "in less than 10 seconds": upcycling["seconds"] < 10,
            "peak at most 1.1 times the model": None if ratio is None else ratio <= 1.1,
        },
    }


CASES = {"low-rank-7b": low_rank_7b, "copy-1b": copy_1b}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default: both")
    parser.add_argument("--scale", choices=["full", "tiny"], default="full")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="the result, a JSON file")
    args = parser.parse_args(argv)
    unknown = [case for case in args.cases if case not in CASES]
    if unknown:
        parser.error(f"no case {', '.join(unknown)}: choose of {', '.join(CASES)}")
    results = read_json(args.out) if args.out.exists() else {}
    for case in args.cases or CASES:
        shape = TINY if args.scale == "tiny" else SHAPES[case]
        print(f"{case}: running", flush=True)
        head = {"command": command(__file__, argv), "machine": machine(args.device)}
        results[case] = {**head, "shape": shape, **CASES[case](shape, args.device)}
        write_json(args.out, results)
        print_json(data=results[case])


if __name__ == "__main__":
    main(sys.argv[1:])
