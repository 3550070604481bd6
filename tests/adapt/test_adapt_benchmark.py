"""The benchmark of adaptation runs, and its peer does what it says."""

import importlib
import json
import math
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = {
    "text": {"kind": "text", "length": 16, "words": 60, "dim": 64, "depth": 1},
    "image": {"kind": "image", "side": 8, "patch": 4, "dim": 64, "depth": 1, "decoder": (32, 1)},
}


@pytest.fixture
def adapt(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("adapt")
    sizes = {"batch": 4, "examples": 16}
    monkeypatch.setattr(module, "MODELS", {name: {**one, **sizes} for name, one in SMALL.items()})
    return module


def test_it_times_every_kind_of_step(adapt, monkeypatch, tmp_path):
    out = tmp_path / "adapt.json"
    argv = ["adapt.py", "--steps", "1", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", argv)
    adapt.main()
    told = json.loads(out.read_text())
    for name, found in told["models"].items():
        assert found["command"].endswith("--out results/adapt.json")
        named = {*adapt.LIMITS, *(["ours ÷ transformers"] if name == "text" else [])}
        assert set(found["ratios"]) == named
        assert all(0 < each < math.inf for each in found["ratios"].values())
        assert found["FLOPs ratio"] > 1
    monkeypatch.setattr("sys.argv", [*argv, "--model", "image"])
    adapt.main()
    again = json.loads(out.read_text())["models"]
    assert again["text"] == told["models"]["text"] and again["image"] != told["models"]["image"]


def test_the_peer_has_the_same_loss_but_for_its_mean(adapt):
    encoder = adapt.build(adapt.MODELS["text"])
    encoder.model.eval()
    rows = adapt.data(adapt.MODELS["text"], 4)
    batch = encoder.batch(rows.take(torch.arange(4)))
    mask = encoder.mask(batch, torch.Generator().manual_seed(0))
    usual = adapt.usual_loss(encoder.model, batch, mask)
    each = []
    for n in range(4):  # of one text, both means are the same
        one = {name: t[n : n + 1] for name, t in batch.items()}
        each.append((mask[n] >= 0).sum() * encoder.masked_loss(one, mask[n : n + 1]))
    torch.testing.assert_close(usual, sum(each) / (mask >= 0).sum())
