"""`export`: what is written, transformers loads alone, and it computes the same."""

import json
import sys

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from moiety import grow
from moiety.hf.export import export
from moiety.hf.probe import gap, make_probe
from moiety.hf.upcycle import upcycle
from moiety.moe import MoE

SMALL = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def make(name, **words):
    """A small causal model of transformers, with weights large enough that every part matters."""
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **words})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    return drawn(model)


def drawn(model, std=0.3):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * std)
    return model.eval()


def trained(model):
    """Experts and routers that differ, as after training."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in (m for m in model.modules() if isinstance(m, MoE)):
            for p in layer.parameters():
                p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    return model


def check(model, folder):
    """Load the folder with transformers, and compare on other tokens than export's own probe."""
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    probe = make_probe(model, {"input_ids": torch.arange(60).view(2, 30)})
    assert gap(probe.outputs(model), probe.outputs(loaded)) <= 1e-5
    assert "moiety" not in (folder / "config.json").read_text()
    return loaded


ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("name", "words", "how"),
    [
        ("Llama", {}, {"k": 2}),
        ("Llama", {}, {"k": 2, "init": "split"}),
        ("Llama", {"tie_word_embeddings": True, "rope_parameters": ROPE}, {"k": 1}),
        ("Llama", {"rms_norm_eps": 1e-2, "head_dim": 4, "attention_dropout": 0.1}, {"k": 3}),
        ("Mistral", {"sliding_window": 8}, {"k": 2}),
    ],
)
def test_llama_and_mistral_become_mixtral(name, words, how, tmp_path):
    model = trained(upcycle(make(name, **words), experts=6, **how))
    assert export(model, "mixtral", tmp_path / "out") == tmp_path / "out"
    loaded = check(model, tmp_path / "out")
    assert loaded.config.model_type == "mixtral"
    assert loaded.config.sliding_window == words.get("sliding_window")
    assert loaded.config.attention_dropout == words.get("attention_dropout", 0.0)
    assert loaded.config.intermediate_size == (12 if how.get("init") else 24)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("words", "how", "dense"),
    [
        ({}, {"k": 2}, []),
        ({"head_dim": 4, "attention_bias": True}, {"layers": "last:1"}, [0]),
        ({}, {"layers": [0], "init": "split", "k": 2}, [1]),
        ({}, {"k": 2, "renormalise": False, "exact": False}, []),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, {}, []),
    ],
)
def test_qwen3_becomes_qwen3_moe(words, how, dense, tmp_path):
    model = trained(upcycle(make("Qwen3", **words), experts=4, **how))
    export(model, "qwen3_moe", tmp_path / "out")
    loaded = check(model, tmp_path / "out")
    config = loaded.config
    assert (config.model_type, config.mlp_only_layers) == ("qwen3_moe", dense)
    assert config.norm_topk_prob == how.get("renormalise", True)
    assert config.sliding_window == words.get("sliding_window")


def test_half_precision_is_written_as_such(tmp_path):
    model = trained(upcycle(make("Llama").bfloat16(), experts=4, k=2))
    export(model, "mixtral", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == model.dtype == torch.bfloat16
    mine = model.model.layers[1].mlp.moe.experts.w_out
    assert torch.equal(loaded.model.layers[1].mlp.experts.down_proj, mine)


def test_the_model_stays_as_it_was(tmp_path):
    model = trained(upcycle(make("Llama"), experts=4, k=2).train())
    before = {n: (p, p.clone()) for n, p in model.named_parameters()}
    export(model, "mixtral", tmp_path / "out")
    assert model.training
    for name, p in model.named_parameters():
        assert p is before[name][0] and torch.equal(p, before[name][1])


# -- refusals --------------------------------------------------------------------------------------


def bert():
    config = transformers.BertConfig(**{**SMALL, "num_key_value_heads": 2})
    return drawn(transformers.BertForMaskedLM(config))


def classifier():
    return drawn(
        transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(**SMALL, pad_token_id=0)
        )
    )


def grown(model):
    grow(model, parents=[0])
    return model


WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
REFUSED = {
    "bert": (
        lambda: upcycle(bert(), 4),
        "mixtral",
        r"bert.encoder.layer.0.output.dense does not fit into mixtral: its experts are not gated",
    ),
    "gemma": (lambda: upcycle(make("Gemma"), 4), "mixtral", "its experts use gelu"),
    "gemma with silu": (
        lambda: upcycle(make("Gemma", hidden_act="silu"), 4),
        "mixtral",
        "the outputs would differ by",
    ),
    "dense layer": (
        lambda: upcycle(make("Llama"), 4, layers="last:1"),
        "mixtral",
        "layer 0 is dense, and mixtral has experts in every layer",
    ),
    "qk-norm": (
        lambda: upcycle(make("Qwen3"), 4),
        "mixtral",
        r"model.layers.0.self_attn.q_norm.weight has no place in mixtral",
    ),
    "no qk-norm": (
        lambda: upcycle(make("Llama"), 4),
        "qwen3_moe",
        r"qwen3_moe needs model.layers.0.self_attn.q_norm.weight",
    ),
    "attention bias": (
        lambda: upcycle(make("Llama", attention_bias=True), 4),
        "mixtral",
        r"self_attn.q_proj.bias has no place in mixtral",
    ),
    "expert bias": (
        lambda: upcycle(make("Llama", mlp_bias=True), 4),
        "mixtral",
        r"model.layers.0.mlp does not fit into mixtral: its experts have biases",
    ),
    "router": (
        lambda: upcycle(make("Llama"), 4, "cosine"),
        "mixtral",
        "router 'cosine' is not a linear top-k router",
    ),
    "plain weights": (
        lambda: upcycle(make("Llama"), 4, renormalise=False, exact=False),
        "mixtral",
        "do not sum to one",
    ),
    "capacity": (
        lambda: upcycle(
            make("Llama"), 4, k=1, capacity_factor=1.0, exact=False, allow_noncausal=True
        ),
        "mixtral",
        "it has a capacity",
    ),
    "low-rank": (
        lambda: upcycle(make("Llama"), 4, init="low-rank"),
        "mixtral",
        "its experts are LowRank",
    ),
    "grown": (lambda: grown(upcycle(make("Llama"), 4)), "mixtral", "grown by families"),
    "classifier": (lambda: upcycle(classifier(), 4), "mixtral", "score.weight has no place"),
    "without a head": (
        lambda: upcycle(make("Llama"), 4).model,
        "mixtral",
        r"layers.0.mlp has no place in mixtral, whose experts are at model.layers.0.mlp",
    ),
    "granite": (
        lambda: upcycle(make("Granite", residual_multiplier=0.5), 4),
        "mixtral",
        "the outputs would differ by",
    ),
    "two kinds of attention": (
        lambda: upcycle(make("Qwen3", **WINDOWS), 4),
        "qwen3_moe",
        "attend by full_attention, sliding_attention",
    ),
    "kind": (lambda: upcycle(make("Llama"), 4), "switch", "knows mixtral and qwen3_moe"),
    "dense model": (lambda: make("Llama"), "mixtral", "no transformers model made by upcycle"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_named_and_nothing_is_left(case, tmp_path):
    build, kind, said = REFUSED[case]
    model = build()
    with pytest.raises(ValueError, match=said):
        export(model, kind, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_layers_must_be_alike(tmp_path):
    model = upcycle(upcycle(make("Llama"), 4, layers=[0]), 2, layers=["model.layers.1.mlp"])
    with pytest.raises(ValueError, match=r"num_local_experts = 2 and another layer 4"):
        export(model, "mixtral", tmp_path / "out")


def test_a_folder_that_holds_something_is_left_alone(tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("mine")
    model = upcycle(make("Llama"), 4)
    with pytest.raises(ValueError, match="exists and is not empty"):
        export(model, "mixtral", out)
    monkeypatch.setattr(sys.modules["moiety.hf.export"], "TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="would differ"):
        export(model, "mixtral", out, overwrite=True)
    assert (out / "precious").read_text() == "mine"
    monkeypatch.undo()
    export(model, "mixtral", out, overwrite=True)
    assert not (out / "precious").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    check(model, out)


def test_an_empty_folder_is_filled(tmp_path):
    model = upcycle(make("Llama"), 4)
    export(model, "mixtral", str(tmp_path))
    check(model, tmp_path)
