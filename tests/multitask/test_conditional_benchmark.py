"""The benchmark of conditional execution runs, and counts the FLOPs that a binary gate saves."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from moiety.io import read_json

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_it_runs_and_flops_fall(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # others share this process
    bench, out = importlib.import_module("conditional"), tmp_path / "out.json"
    words = ["--rounds", "1", "--calls", "1", "--shape", "16", "8", "4", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["conditional.py", *words])
    bench.main()
    measured = read_json(out)
    for tasks in (1, 2):
        case = measured["cases"][f"{tasks} tasks"]
        flops, expert, tower = case["flops"], 2 * 16 * (8 * 4 + 4 * 8), 2 * 16 * 8
        assert flops["selected"] == tasks * (2 * expert + tower)
        assert flops["all"] == 64 * expert + tasks * tower
        mixing = 2 * 16 * 8 * tasks * 2 * tasks  # a product of weights and answers
        assert flops["gate"] == pytest.approx(flops["selected"] + mixing)
        assert flops["training, gate not yet binary"] > 8 * flops["training, gate binary"]
        assert case["of selected"]["median"] > 0
