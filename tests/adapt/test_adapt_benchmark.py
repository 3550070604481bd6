"""The benchmark of adaptation runs, and its peer does what it says."""

import importlib
import json
import math
import re
from pathlib import Path

import pytest
import torch

from moiety.adapt.objective import Objective
from moiety.adapt.pretrain import MATCHES
from moiety.adapt.recipe import Recipe

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = {
    "text": {"kind": "text", "length": 16, "words": 60, "dim": 64, "depth": 1},
    "image": {"kind": "image", "side": 8, "patch": 4, "dim": 64, "depth": 1, "decoder": (32, 1)},
}


@pytest.fixture
def shipped(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("adapt")


@pytest.fixture
def adapt(shipped, monkeypatch):
    module = shipped
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
        assert found["FLOPs ratio without a cache"] > found["FLOPs ratio"] > 1
    monkeypatch.setattr("sys.argv", [*argv, "--model", "image"])
    adapt.main()
    again = json.loads(out.read_text())["models"]
    assert again["text"] == told["models"]["text"] and again["image"] != told["models"]["image"]


@pytest.mark.parametrize(
    ("name", "cached", "online"),
    [("tiny-image", 3.47, 4.28), ("tiny-text", 1.94, 2.26), ("minilm", 1.86, 2.15)],
)
def test_counted_flops_are_those_of_the_guide(shipped, name, cached, online):
    shape = shipped.MODELS[name]
    encoder, rows = shipped.build(shape), shipped.data(shape, shape["batch"])
    recipe = Recipe(steps=1, batch=shape["batch"], lr=1e-4)
    flops = shipped.counted(encoder, rows, recipe, Objective(match=MATCHES[encoder.kind]))
    ratios = [flops[word] / flops["further"] for word in ("cached", "online")]
    assert ratios == pytest.approx([cached, online], abs=0.005)
    guide = (BENCHMARKS.parent / "docs" / "adapt.md").read_text()
    assert f" {cached:.2f} × |" in guide and re.search(rf"\b{online:.2f}\b", guide)


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
