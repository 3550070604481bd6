"""The engine of the studies beside `run_stream`: the same ledgers, to round-off."""

import warnings
from dataclasses import replace

import pytest
import torch

from moiety.anytime import MLP, VGG19, TreeMLP, TreeVGG19, learner, run_stream, summary
from moiety.anytime.backbones import crop_flip
from moiety.anytime.data import Examples
from moiety.anytime.fitting import Training
from moiety.anytime.metering import Meter
from moiety.anytime.stream import cut
from moiety.lab.checkpoint import Checkpoint
from moiety.studies.anytime import engine
from moiety.studies.anytime.engine import Cell, run_cell
from moiety.train.phased import Phased

TRAINING = Training(method="sgd", lr=0.2, batch=32, epochs=8, patience=2, min_gain=0.01)
CLASSES, BATCHES = 4, 5
METER = Meter()


def examples(rows, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 12, generator=g)
    weight = torch.randn(12, CLASSES, generator=torch.Generator().manual_seed(9))
    return Examples(x, (x @ weight + torch.randn(rows, CLASSES, generator=g)).argmax(1))


TRAIN, TEST = examples(403, 0), examples(200, 1)  # the first mega-batches are one row longer


def mlp(seed):
    return MLP(6, inputs=12, classes=CLASSES)


def tree(seed):
    return TreeMLP(6, inputs=12, classes=CLASSES)


def cell(**words):
    common = {"train": TRAIN, "test": TEST, "batches": BATCHES, "classes": CLASSES, "make": mlp}
    return Cell(**{**common, "training": TRAINING, "members": 2, **words})


def library(name, seed, out, *, wait="1", replay="none", make=mlp, **options):
    stream = cut(TRAIN, BATCHES, seed=seed)
    made = learner(name, make, seed=seed, training=TRAINING, meter=METER, **options)
    words = {"wait": wait, "replay": replay, "test": TEST, "seed": seed}
    return run_stream(stream, made, out=out, **words).lines


def same(mine, theirs):
    """The same ledger, but for round-off, bytes, names and gaps."""
    assert len(mine) == len(theirs) == BATCHES
    for a, b in zip(mine, theirs):
        for word in ("t", "rows", "phase", "trained", "steps", "examples", "parameters"):
            assert a[word] == b[word], word
        assert a["inference_flops"] == b["inference_flops"]
        assert a["error"] == pytest.approx(b["error"], abs=1e-9)
        assert (a["validation"] or 0) == pytest.approx(b["validation"] or 0, abs=1e-9)
        assert a["flops"] == pytest.approx(b["flops"], rel=1e-9)
    a, b = summary(mine), summary(theirs)
    for word in ("cer", "average", "mem", "comp", "comp_forward", "comp_validation", "comp_growth"):
        assert getattr(a, word) == pytest.approx(getattr(b, word), rel=1e-9), word


@pytest.mark.parametrize(
    ("wait", "replay", "every"), [("1", "none", 1), ("2", "0.5", 2), ("5", "none", 1)]
)
def test_the_ledgers_are_those_of_the_library(wait, replay, every, tmp_path):
    course = run_cell(cell(wait=wait, replay=replay, every=every), seeds=[3, 4])
    options = {"ensemble": {"members": 2}, "growing-ensemble": {"every": every}}
    for name, by_seed in course.lines.items():
        for i, seed in enumerate([3, 4]):
            out = tmp_path / f"{name}{seed}"
            own = options.get(name, {})
            same(by_seed[i], library(name, seed, out, wait=wait, replay=replay, **own))


@pytest.mark.parametrize(
    ("name", "make", "options"),
    [("mixture", mlp, {"members": 2}), ("growing-moe", tree, {"every": 1})],
)
def test_learners_of_other_structures(name, make, options, tmp_path):
    course = run_cell(cell(make=make, options=options, wait="2"), [3, 4], [name])
    for i, seed in enumerate([3, 4]):
        theirs = library(name, seed, tmp_path / str(seed), make=make, wait="2", **options)
        same(course.lines[name][i], theirs)
    if name == "growing-moe":
        assert [line["growth"] is None for line in course.lines[name][0] if line["trained"]] == [
            True,
            False,
            False,
        ]


def test_a_policy_that_looks_at_results_runs_a_learner_alone(tmp_path):
    plateau = cell(wait="plateau:0.2:4")
    mine = run_cell(plateau, [3], ["single"]).lines["single"][0]
    same(mine, library("single", 3, tmp_path, wait="plateau:0.2:4"))
    assert [line["trained"] for line in mine] != [True] * BATCHES
    with pytest.raises(ValueError, match="run each alone"):
        run_cell(plateau, range(12), ["single"])  # some seeds differ


def test_replay_with_the_steps_of_a_course_without():
    free = run_cell(cell(), [3, 4])
    capped = run_cell(cell(replay="1"), [3, 4], like=free)
    more = run_cell(cell(replay="1"), [3, 4])
    assert capped.checks == free.checks
    for name, by_seed in free.lines.items():
        for i, mine in enumerate(by_seed):
            steps = [[line["steps"] for line in c.lines[name][i]] for c in (free, capped, more)]
            assert steps[0] == steps[1] != steps[2]
            assert capped.lines[name][i][0]["error"] == mine[0]["error"]
            assert capped.lines[name][i][-1]["error"] != mine[-1]["error"]


def test_what_a_cell_cannot_do_is_said():
    with pytest.raises(ValueError, match="without clip and steps"):
        run_cell(cell(training=Training(steps=3)), [0])


# -- on a GPU ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["single", "ensemble", "growing-ensemble"], {"replay": "0.5", "every": 2}),
        (["mixture"], {"options": {"members": 2}}),
        (["growing-moe"], {"make": tree, "replay": "0.5"}),
        (["firefly"], {"options": {"candidates": 3, "every": 2}}),
    ],
    ids=["stack", "mixture", "growing-moe", "firefly"],
)
def test_a_killed_cell_goes_on_after_its_last_phase(tmp_path, monkeypatch, names, words):
    monkeypatch.setattr(engine, "SAVE", -1.0)
    whole = run_cell(cell(**words), [3, 4], names)
    checkpoint, trained, real = Checkpoint(tmp_path), [], Phased.phase

    def dies(self, *args, **more):
        trained.append(1)
        if len(trained) == 4:
            raise KeyboardInterrupt
        return real(self, *args, **more)

    monkeypatch.setattr(Phased, "phase", dies)
    with pytest.raises(KeyboardInterrupt):
        run_cell(cell(**words), [3, 4], names, checkpoint=checkpoint)
    again = run_cell(cell(**words), [3, 4], names, checkpoint=checkpoint)
    assert len(trained) < 4 + BATCHES
    assert again.checks == whole.checks
    for name in names:
        for mine, theirs in zip(again.lines[name], whole.lines[name], strict=True):
            for one, other in zip(mine, theirs, strict=True):
                assert {**one, "seconds": 0} == {**other, "seconds": 0}


without = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pixels = {"shape": (1, 32, 32), "classes": CLASSES}


def on_gpu(names, **words):
    """A course on the device; a step that could not be captured would warn."""
    own = cell(**words)
    own = replace(own, train=own.train.to("cuda"), test=own.test.to("cuda"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without a CUDA graph")
        return run_cell(own, [3, 4], names)


@pytest.mark.gpu
@without
@pytest.mark.parametrize(
    ("names", "make", "options"),
    [
        (["single", "ensemble", "growing-ensemble"], mlp, {}),
        (["mixture"], mlp, {"members": 2}),
        (["growing-moe"], tree, {}),
        (["firefly"], mlp, {"candidates": 3}),
    ],
    ids=["stack", "mixture", "growing-moe", "firefly"],
)
def test_a_gpu_gives_about_the_ledgers_of_a_cpu(names, make, options):
    here = run_cell(cell(make=make, options=options), [3, 4], names)
    there = on_gpu(names, make=make, options=options)
    for name in names:
        for mine, theirs in zip(there.lines[name], here.lines[name]):
            assert mine[0]["parameters"] == theirs[0]["parameters"]
            assert summary(mine).average == pytest.approx(summary(theirs).average, abs=0.05)


@pytest.mark.gpu
@without
@pytest.mark.parametrize(
    ("names", "make"),
    [
        (["ensemble"], lambda seed: VGG19(4, **pixels)),
        (["growing-moe"], lambda seed: TreeVGG19(4, **pixels)),
        (["firefly"], lambda seed: VGG19(4, **pixels)),
    ],
    ids=["ensemble", "growing-moe", "firefly"],
)
def test_images_on_a_gpu(names, make):
    g = torch.Generator().manual_seed(0)
    data = Examples(torch.randn(200, 1, 32, 32, generator=g), torch.arange(200) % CLASSES)
    training = Training(
        method="sgd", options={"momentum": 0.9}, batch=16, epochs=4, augment=crop_flip
    )
    words = {"train": data, "test": data, "make": make, "training": training}
    lines = on_gpu(names, batches=2, **words).lines[names[0]]
    assert all(0 <= line["error"] <= 1 and line["steps"] for one in lines for line in one)
