"""Audits of models of transformers and of a problem's images, unchanged; and how one is shown."""

import json
import math

import pytest
import torch
import transformers as hf
from audit_cases import QUICK, data

import moiety
from moiety.data.problem import Problem, Split
from moiety.data.problem import Target as Column
from moiety.models import ImageTransformer
from moiety.robust import Audit, audit

# -- models --------------------------------------------------------------------------------------

TEXT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "num_experts_per_tok": 2,
}  # fmt: skip


def olmoe():
    return hf.OlmoeForCausalLM(hf.OlmoeConfig(**TEXT, num_experts=4))


def mixtral():
    return hf.MixtralForCausalLM(hf.MixtralConfig(**TEXT, num_local_experts=4))


def vit():
    config = hf.ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=24, num_labels=3,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def upcycled():
    return moiety.upcycle(vit(), experts=4, router="top-k", k=2, init="noise", exact=False)


def bold(make):
    """Weights large enough for predictions to differ."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(5)
    return model


@pytest.mark.parametrize("make", [olmoe, mixtral])
def test_text_models_are_attacked_in_embedding_space(make):
    model = bold(make)
    ids = torch.arange(3, 3 + 6 * 4).view(6, 4) % 32
    with torch.no_grad():
        y = model(input_ids=ids).logits[:, -1].argmax(-1)
    attacks = ["apgd", "apgd + router-margin"]
    found = audit(model, (ids, y), [0, 0.05, 0.5], attacks, **QUICK).result
    assert found["threat"]["bounds"] is None
    assert found["clean"]["error"] == 0.0  # the embeddings are those of the ids
    assert found["union"]["error"][-1] > 0
    assert len(found["routing"]) == 2
    for layer in found["routing"].values():
        assert layer["attacks"]["apgd + router-margin"]["change"][-1] > 0
        assert math.isclose(sum(layer["clean"]["load"]), 1.0)
    assert any(p != 0 for p in found["attribution"]["routes"])
    embedded = model.get_input_embeddings()(ids).detach()
    same = audit(model, (embedded, y), [0.5], "apgd", bounds=None, **QUICK).result
    assert same["attacks"]["apgd"]["loss"] == found["attacks"]["apgd"]["loss"][-1:]


def texts(**more):
    """Six texts of four tokens, and what else a tokenizer gives."""
    ids = torch.arange(3, 3 + 6 * 4).view(6, 4) % 32
    return {"input_ids": ids, "labels": ids[:, 0], **more}


def test_what_says_nothing_may_stand_beside_the_ids():
    given = texts(attention_mask=torch.ones(6, 4), position_ids=None, idx=torch.arange(6))
    model, plain = bold(mixtral), texts()
    found = audit(model, given, [0.5], "fgsm", **QUICK).result
    same = audit(model, (plain["input_ids"], plain["labels"]), [0.5], "fgsm", **QUICK).result
    assert found["attacks"]["fgsm"]["loss"] == same["attacks"]["fgsm"]["loss"]


PADDED = torch.tensor([[1, 1, 1, 1]] * 5 + [[1, 1, 1, 0]])
LEFT_OUT = {
    "mask": (texts(attention_mask=PADDED), "attention_mask hides some tokens: .* one length"),
    "places": (texts(position_ids=PADDED), "data hold position_ids, which the attacked model"),
    "right": ((texts()["input_ids"] * PADDED, PADDED[:, 0]), "ids begin or end with pad_token_id"),
    "left": ((texts()["input_ids"] * PADDED.flip(1), PADDED[:, 0]), "begin or end with pad_token"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_the_attacked_model_would_not_get_is_refused(case):
    given, says = LEFT_OUT[case]
    with pytest.raises(ValueError, match=says):
        audit(bold(mixtral), given, [0.5], "fgsm", **QUICK)


def test_an_upcycled_vit_has_the_error_of_its_dense_one_and_routes():
    x, _ = data(6, (1, 8, 8))
    dense, sparse = bold(vit), bold(upcycled)
    for model, layers in ((dense, 0), (sparse, 2)):
        with torch.no_grad():
            y = model(pixel_values=(x - 0.5) / 0.5).logits.argmax(-1)
        found = audit(
            model,
            (x, y),
            [0, 0.1],
            ["pgd", "apgd"],
            normalize=(0.5, 0.5),
            **{**QUICK, "lipschitz": 1},
        )
        result = found.result
        assert result["clean"]["error"] == 0
        assert result["union"]["error"][-1] > 0
        assert len(result["routing"] or {}) == layers
        assert (result["attribution"] is None) == (layers == 0)
        assert ("routing change" in str(found)) == (layers > 0)


def test_a_problem_of_images(tmp_path):
    images = torch.randint(0, 256, (9, 1, 8, 8), dtype=torch.uint8)
    split = Split({"images": images}, {"kind": torch.arange(9) % 3})
    columns = [Column("kind", "classes", ["a", "b", "c"])]
    problem = Problem("tiles", "image", columns, split, split, split, shape=(1, 8, 8),
                      mean=(0.5,), std=(0.25,))  # fmt: skip
    model = ImageTransformer(shape=(1, 8, 8), outputs=3, dim=16, depth=1).eval()
    found = audit(model, problem, [0.1], "fgsm", **QUICK).result
    assert found["data"] == {"name": "tiles", "examples": 9, "classes": 3}
    with torch.no_grad():
        error = (model(images).argmax(-1) != split.targets["kind"]).double().mean()
    assert found["clean"]["error"] == float(error)


# -- shown ---------------------------------------------------------------------------------------


def test_a_bar_in_a_terminal(model, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any stream for a terminal
    audit(model, data(4), [0.1], "fgsm", **{**QUICK, "progress": True})
    assert "masked gradients" in capsys.readouterr().err
    audit(model, data(4), [0.1], "fgsm", **QUICK)
    assert capsys.readouterr().err == ""


def test_the_table_and_the_page(found, tmp_path):
    shown = str(Audit(found))
    assert len(shown.splitlines()) < 20
    for word in ("union", "apgd + router-margin", "eps 0.1", "moe", "loss +"):
        assert word in shown
    assert f"{found['union']['error'][-1]:.1%}" in shown
    page = Audit(found).to_html(tmp_path / "audit.html").read_text()
    assert "apgd + router-margin" in page
    again = json.loads(Audit(found).to_json(tmp_path / "audit.json").read_text())
    assert again == found
