"""Steps that a GPU repeats as one graph: the same weights, few shapes, what cannot be captured."""

import os
import time

import pytest
import torch
from rows import encoder, labelled, moved, rows

from moiety.adapt import cache, finetune, repeated, stage
from moiety.adapt.pretrain import further_pretrain, self_distill
from moiety.adapt.repeated import WARM, Repeated
from moiety.hf import upcycle

SHORT = {"steps": 8, "batch": 6, "lr": 1e-3, "checks": 2}


class Played:
    """What stands for a graph where there is no GPU."""

    def __init__(self, step, rows):
        self.step, self.rows = step, rows

    def replay(self, rows):
        return self.step(rows)


@pytest.fixture
def played(monkeypatch):
    """Shapes that were captured, by a graph that runs on the CPU."""
    found = []

    def capture(step, rows, name, pool):
        found.append(name)
        return Played(step, rows)

    monkeypatch.setattr(repeated, "capture", capture)
    return found


def near(one, two):
    gaps = [(one[n].double() - two[n].double()).norm() for n in one if one[n].is_floating_point()]
    size = sum(t.double().norm() for t in one.values() if t.is_floating_point())
    return float(sum(gaps) / size)


def without_dropout(model):
    """A model that draws nothing: captured and padded steps draw other numbers."""
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        setattr(model.model.config, name, 0.0)
    for part in model.model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    return model


def test_every_shape_is_captured_once_and_reads_its_input_anew(played):
    step = Repeated("sum", lambda tensors: {"sum": tensors["x"].sum()})
    for number in range(8):
        for length in (2, 3):
            assert step({"x": torch.full((length,), float(number))})["sum"] == number * length
    assert played == ["sum", "sum"] and step.seen.total() == 2 * (WARM + 1)


def test_what_cannot_be_captured_runs_as_it_is(monkeypatch):
    asked = []
    monkeypatch.setattr(repeated, "capture", lambda *_: asked.append(1))
    step = Repeated("sum", lambda tensors: {"sum": tensors["x"].sum()})
    assert [float(step({"x": torch.ones(2)})["sum"]) for _ in range(9)] == [2.0] * 9
    assert asked == [1]


@pytest.mark.parametrize("kind", ["image", "text"])
@pytest.mark.parametrize("words", [{}, {"match": "weights"}, {"distill_every": 2}], ids=str)
def test_a_stage_says_the_same_by_graphs(monkeypatch, played, kind, words):
    model, data = without_dropout(encoder(kind)), rows(kind)
    words = {**SHORT, "teacher": moved(model).model.state_dict(), **words}
    plain = self_distill(model, data, **words).stages[-1]
    monkeypatch.setattr(stage, "adamw", lambda e, r, captured, real=stage.adamw: real(e, r))
    keep = stage.Stage.__setattr__
    monkeypatch.setattr(  # there is no GPU to ask for
        stage.Stage, "__setattr__", lambda s, n, v: keep(s, n, True if n == "captures" else v)
    )
    graphs = self_distill(model, data, **words).stages[-1]
    assert set(played) == {"round-1"} and len(played) <= 2
    if kind == "image":
        assert all(torch.equal(graphs.state[n], t) for n, t in plain.state.items())
    assert near(graphs.state, plain.state) < 1e-5  # texts have more padding, and the same masks


# -- on a GPU --------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@gpu
@pytest.mark.gpu
@pytest.mark.filterwarnings("error:.*trains without a CUDA graph")
@pytest.mark.parametrize("kind", ["image", "text"])
@pytest.mark.parametrize("match", ["cls", "hidden", "prediction", "weights"])
def test_a_captured_stage_is_near_the_plain_one(kind, match):
    model, data = without_dropout(encoder(kind)).to("cuda"), rows(kind)
    words = {
        **SHORT,
        "steps": 20,
        "match": match,
        "teacher": moved(model.copy().to("cpu")).model.state_dict(),
    }
    plain = self_distill(model, data, **words)
    graphs = self_distill(model, data, capture=True, **words)
    initial = plain.initial
    assert near(plain.stages[-1].state, initial) > 1e-3
    assert near(plain.stages[-1].state, graphs.stages[-1].state) < 1e-4


@gpu
@pytest.mark.gpu
@pytest.mark.filterwarnings("error:.*trains without a CUDA graph")
def test_a_cache_is_written_while_a_step_is_captured(monkeypatch):
    monkeypatch.setattr(cache, "BATCH", 1)
    monkeypatch.setattr(cache, "CHUNK", 1)
    written, during, write = [], [], os.pwrite

    def slow(*args):
        time.sleep(0.05)
        written.append(write(*args))
        return written[-1]

    def seen(*args, real=repeated.capture):
        during.append(len(written))
        return real(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    monkeypatch.setattr(repeated, "capture", seen)
    model, data = without_dropout(encoder("image")).to("cuda"), rows("image", 60)
    words = {**SHORT, "teacher": moved(model.copy().to("cpu")).model.state_dict()}
    plain = self_distill(model, data, **words)
    written.clear()
    graphs = self_distill(model, data, capture=True, **words)
    assert during[0] < len(data)
    assert near(plain.stages[-1].state, graphs.stages[-1].state) < 1e-4


@gpu
@pytest.mark.gpu
@pytest.mark.filterwarnings("error:.*trains without a CUDA graph")
@pytest.mark.parametrize("method", ["plain", "recadam", "mars", "r3f"])
@pytest.mark.parametrize("kind", ["image", "text"])
def test_a_captured_fine_tuning_is_near_the_plain_one(kind, method):
    model, data = without_dropout(encoder(kind)).to("cuda"), labelled(kind)
    words = {"steps": 20, "batch": 8, "lr": 1e-3, "method": method}
    plain, graphs = (finetune(model, data, capture=c, **words) for c in (False, True))
    states = [tuned.classifier.model.state_dict() for tuned in (plain, graphs)]
    assert near(*states) < 1e-4


@gpu
@pytest.mark.gpu
def test_a_captured_further_pretraining_goes_on(tmp_path):
    model, data = encoder("image").to("cuda"), rows("image")
    words = {**SHORT, "steps": 20, "capture": True}
    whole = further_pretrain(model, data, **words)

    def kill(_, share):
        if share == 1.0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        further_pretrain(model, data, out=tmp_path, save_every=0, tick=kill, **words)
    again = further_pretrain(model, data, out=tmp_path, save_every=0, **words)
    assert near(whole.stages[0].state, again.stages[0].state) < 1e-4


@gpu
@pytest.mark.gpu
@pytest.mark.filterwarnings("error:.*trains without a CUDA graph")
@pytest.mark.parametrize("kind", ["image", "text"])
def test_a_captured_mixture_is_near_the_plain_one(kind):
    dense = without_dropout(encoder(kind))
    dense.model = upcycle(dense.model, experts=4, router="top-k", k=2, balance={"switch": 0.01})
    mixture = dense.to("cuda")
    plain, graphs = (
        further_pretrain(mixture, rows(kind), capture=c, **SHORT) for c in (False, True)
    )
    assert near(plain.stages[-1].state, graphs.stages[-1].state) < 1e-4
    words = {"steps": 20, "batch": 8, "lr": 1e-3}
    plain, graphs = (finetune(mixture, labelled(kind), capture=c, **words) for c in (False, True))
    states = [tuned.classifier.model.state_dict() for tuned in (plain, graphs)]
    assert near(*states) < 1e-4
