"""LoRA on a student: only adapters learn, and what is kept is a plain model."""

import sys

import pytest
import tiny
import torch
from rows import encoder, rows, same, upcycled

from moiety.adapt import lora
from moiety.adapt.encoders import Encoder
from moiety.adapt.pretrain import further_pretrain, self_distill

SHORT = {"steps": 4, "batch": 6, "lr": 1e-2, "checks": 2}


@pytest.fixture(autouse=True)
def _peft():
    pytest.importorskip("peft", reason="LoRA is trained through peft")


@pytest.mark.parametrize("family", ["albert", "deberta-v2", "modernbert", "image"])
def test_a_student_starts_as_its_encoder_and_merges_into_it(family):
    made = encoder("image")
    if family != "image":
        made = Encoder.load(tiny.FAMILIES[family](), processor=tiny.tokenizer())
    made.model.eval()
    batch = made.batch(rows(made.kind, 4).take(torch.arange(4)))
    student = lora.with_adapters(made, 2, seed=0)
    before = made.represent(batch).features
    assert torch.equal(student.represent(batch).features, before)
    with torch.no_grad():
        for name, parameter in student.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    learnt = student.represent(batch).features
    assert not torch.allclose(learnt, before, atol=1e-3)
    lora.merge(student, made)
    assert torch.allclose(made.represent(batch).features, learnt, atol=1e-4)


@pytest.mark.parametrize("kind", ["image", "text"])
def test_only_dense_layers_of_the_trunk_and_the_head_learn(kind):
    model, data = encoder(kind), rows(kind)
    made = self_distill(model, data, lora=2, **SHORT)
    assert same(made.initial, model.model.state_dict())
    assert made.encoder.model.state_dict().keys() == made.initial.keys()
    trunk, rest = vars(made.encoder.groups()).values()
    learnt = {n for n, p in trunk.items() if not torch.equal(p, made.initial[n])}
    dense = {
        f"{name}.weight"
        for name, part in model.model.named_modules()
        if isinstance(part, torch.nn.Linear)
    }
    assert learnt == trunk.keys() & dense
    assert any(not torch.equal(p, made.initial[n]) for n, p in rest.items())
    for name in learnt:
        assert torch.linalg.matrix_rank(trunk[name] - made.initial[name], atol=1e-5) <= 2
    assert made.history[0]["distance"] == 0 < made.history[-1]["distance"]
    plain = self_distill(model, data, **SHORT)
    assert made.flops["further"] < plain.flops["further"]


def test_a_rank_changes_something_and_a_killed_call_goes_on(tmp_path):
    model, data = encoder("text"), rows("text")
    whole, other = (further_pretrain(model, data, lora=rank, **SHORT) for rank in (2, 3))
    assert not same(whole.stages[0].state, other.stages[0].state)

    def kill(stage, share):
        if share == 1.0:
            raise KeyboardInterrupt

    words = {"lora": 2, "out": tmp_path, "save_every": 0, **SHORT}
    with pytest.raises(KeyboardInterrupt):
        further_pretrain(model, data, tick=kill, **words)
    assert (tmp_path / "further" / "latest.safetensors").exists()
    again = further_pretrain(model, data, **words)
    assert same(again.stages[0].state, whole.stages[0].state)
    assert again.history == whole.history
    again.encoder.save(tmp_path / "adapted")
    loaded = type(model.model).from_pretrained(tmp_path / "adapted")
    assert same(loaded.state_dict(), again.encoder.model.state_dict())


def test_what_lora_cannot_do_is_refused(monkeypatch):
    data = rows("image")
    with pytest.raises(ValueError, match="the model has experts, which LoRA would leave"):
        further_pretrain(upcycled("image"), data, lora=2, **SHORT)
    with pytest.raises(ValueError, match="compares weights, which LoRA leaves"):
        self_distill(encoder("image"), data, match="weights", lora=2, **SHORT)
    with pytest.raises(ValueError, match="lora is a rank of at least 1, or None, got 0"):
        further_pretrain(encoder("image"), data, lora=0, **SHORT)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="lora needs peft, which is not there: pip install"):
        further_pretrain(encoder("image"), data, lora=2, **SHORT)
