"""`anytime/cifar`: images, and cells of VGG19 beside the library."""

import pytest
import torch

from moiety.anytime import VGG19, TreeVGG19, learner, run_stream
from moiety.anytime.backbones import crop_flip
from moiety.anytime.data import Examples
from moiety.anytime.fitting import Training
from moiety.anytime.stream import cut
from moiety.studies.anytime import vision
from moiety.studies.anytime.cifar import WAITS, WIDTHS, study
from moiety.studies.anytime.engine import Cell, run_cell
from moiety.studies.anytime.statements import arm

CPU = torch.device("cpu")


def test_the_grid_is_the_issue_s():
    assert (WAITS, WIDTHS) == ((2, 10, 50, 100), (8, 32))
    full = study.scale("full").settings
    assert full["batches"] == 100 and full["epochs"] <= 30
    periods = [vision.period_of({**full, **study.arms[arm("gEns", 8, w)]}) for w in WAITS]
    assert periods == [5, 2, 1, 1]


def test_a_cell_is_a_vgg_with_the_paper_s_training():
    settings = {**study.scale("smoke").settings, **study.arms[arm("gMoE", 32, 10)]}
    cell = vision.cell_of(settings, CPU)
    assert isinstance(cell.make(0), TreeVGG19)
    assert cell.train.x.shape == (24, 1, 32, 32) and cell.training.augment is crop_flip
    rules = cell.rules()
    assert (rules.optimizer, rules.lr, rules.weight_decay) == ("sgd", 0.01, 1e-4)
    assert rules.options["momentum"] == 0.9
    plain = vision.cell_of({**settings, "learner": "single"}, CPU).make(0)
    assert type(plain) is VGG19 and plain[-1].in_features == 1 == 32 // settings["narrow"]


def test_vggs_in_one_program_have_the_ledgers_of_the_library(tmp_path):
    g = torch.Generator().manual_seed(0)
    data = Examples(torch.randn(40, 1, 32, 32, generator=g), torch.arange(40) % 3)
    training = Training(
        method="sgd", lr=0.05, options={"momentum": 0.9}, batch=16, epochs=1, augment=crop_flip
    )
    words = {"classes": 3, "shape": (1, 32, 32)}
    cell = Cell(
        train=data,
        test=data,
        batches=2,
        classes=3,
        members=2,
        training=training,
        make=lambda seed: VGG19(2, **words),
    )
    mine = run_cell(cell, [5], ["ensemble"]).lines["ensemble"][0]
    made = learner("ensemble", cell.make, members=2, seed=5, training=training)
    stream = cut(data, 2, seed=5)
    theirs = run_stream(stream, made, test=data, seed=5, overlap=1.0, out=tmp_path).lines
    for a, b in zip(mine, theirs, strict=True):
        assert a["steps"] == b["steps"] and a["parameters"] == b["parameters"]
        assert a["flops"] == pytest.approx(b["flops"])
        assert a["error"] == pytest.approx(b["error"], abs=0.06)  # near ties, after batch norm
