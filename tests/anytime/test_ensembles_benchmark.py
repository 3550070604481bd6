"""The benchmark of ensembles runs, and times the same work in one program and in a loop."""

import importlib
import sys
from pathlib import Path

import torch

from moiety.anytime.backbones import MLP, VGG19
from moiety.io import read_json

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_it_runs(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # others share this process
    bench, out = importlib.import_module("ensembles"), tmp_path / "out.json"
    cases = bench.CASES
    sizes = [sum(p.numel() for p in case.make().parameters()) for case in cases.values()]
    assert sizes == [55_050, 35_930]  # digest 4, section 4.2: MLP with c = 64, VGG19 with c = 16
    small = {"mlp": lambda: MLP(4), "vgg19": lambda: VGG19(2)}
    for name, make in small.items():
        monkeypatch.setitem(cases, name, bench.dataclasses.replace(cases[name], make=make))
    for module in (bench, importlib.import_module("many_seeds")):
        monkeypatch.setattr(module, "WARM", 1)
        monkeypatch.setattr(module, "EXAMPLES", 256)
    words = ["--members", "2", "--steps", "1", "--rounds", "1", "--rows", "140", "--epochs", "1"]
    monkeypatch.setattr(sys, "argv", ["ensembles.py", *words, "--out", str(out)])
    bench.main()
    measured = read_json(out)
    assert measured["command"].startswith("python benchmarks/ensembles.py --members 2")
    for case in measured["cases"].values():
        for word, others in (("step", {"together"}), ("phase", {"together", "phased"})):
            times = case[word]["times faster than the loop"]
            assert times.keys() == others
            assert all(0 < t["least"] <= t["median"] <= t["most"] for t in times.values())
