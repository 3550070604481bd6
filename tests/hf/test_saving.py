"""Saved and loaded again, a model is the same to the bit; what is damaged raises."""

import copy
import gc
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import moiety
from moiety.experts import LowRank
from moiety.hf.place import describe_mixtures, mixtures
from moiety.hf.probe import gap, make_probe
from moiety.hf.weights import INDEX, SINGLE

SIZE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
TEXT = {"vocab_size": 50, "max_position_embeddings": 32, "pad_token_id": 0, **SIZE}
GPT2 = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
OPT = {"vocab_size": 50, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24}
OPT |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
KINDS = {
    "bert": ("BertForSequenceClassification", "BertConfig", TEXT),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**T5, "decoder_start_token_id": 0}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**TEXT, "num_key_value_heads": 1}),
    "vit": ("ViTForImageClassification", "ViTConfig", {**SIZE, "image_size": 8, "patch_size": 4}),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT),
}
AUTO = {
    "bert": "AutoModelForSequenceClassification",
    "gpt2": "AutoModelForCausalLM",
    "t5": "AutoModelForSeq2SeqLM",
    "llama": "AutoModelForCausalLM",
    "vit": "AutoModelForImageClassification",
    "opt": "AutoModelForCausalLM",
}


def dense(kind: str) -> nn.Module:
    torch.manual_seed(0)
    name, config, sizes = KINDS[kind]
    return getattr(transformers, name)(getattr(transformers, config)(**sizes)).eval()


def moved(model: nn.Module) -> nn.Module:
    """The model after something like training: no two experts are alike."""
    torch.manual_seed(1)
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * 0.02)
    return model


def upcycled(kind: str, **words) -> nn.Module:
    return moved(moiety.upcycle(dense(kind), **{"experts": 4, "k": 2, **words}))


def assert_same(a: nn.Module, b: nn.Module, probe=None) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name
    inputs = make_probe(a, probe)
    # Memory that is aligned otherwise may be added up in another order.
    assert gap(inputs.outputs(a), inputs.outputs(b)) <= 1e-6
    assert describe_mixtures(a) == describe_mixtures(b)


# -- models of transformers ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_comes_back_to_the_bit_by_all_three_ways(kind, tmp_path):
    model = upcycled(kind)
    moiety.save(model, tmp_path)
    loaded = moiety.load(tmp_path)
    assert type(loaded) is type(model) and not loaded.training
    assert_same(model, loaded)
    assert moiety.receipt(loaded) == moiety.receipt(model)
    concrete = type(model).from_pretrained(tmp_path)
    assert_same(model, concrete)
    assert_same(model, getattr(transformers, AUTO[kind]).from_pretrained(tmp_path))
    for word in ("hf_quantizer", "is_quantized", "quantization_method"):
        assert not hasattr(concrete, word)
    concrete.save_pretrained(tmp_path / "again")
    assert_same(model, moiety.load(tmp_path / "again"))


def test_tied_weights_are_stored_once_and_tied_again(tmp_path):
    model = upcycled("gpt2")
    moiety.save(model, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / SINGLE)
    loaded = moiety.load(tmp_path)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


@pytest.mark.parametrize("init", ["copy", "split", "low-rank"])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_every_kind_of_experts_comes_back(kind, init, tmp_path):
    model = upcycled(kind, init=init, **({"rank": 2} if init == "low-rank" else {}))
    moiety.save(model, tmp_path)
    loaded = moiety.load(tmp_path)
    assert_same(model, loaded)
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert [n for n, p in loaded.named_parameters() if not p.requires_grad] == frozen
    assert bool(frozen) == (init == "low-rank")


def test_low_rank_bases_that_train_come_back_trainable(tmp_path):
    moiety.save(upcycled("bert", init="low-rank", frozen=False, rank=2), tmp_path)
    loaded = moiety.load(tmp_path)
    experts = next(mixtures(loaded))[1].moe.experts
    assert isinstance(experts, LowRank) and not experts.frozen
    assert all(p.requires_grad for p in loaded.parameters())


def test_what_a_class_of_transformers_freezes_stays_frozen(tmp_path):
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "vocab_size": 50, "d_model": 16}
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = transformers.PegasusModel(transformers.PegasusConfig(**sizes, **heads))
    model = moiety.upcycle(model, experts=4, k=2)
    assert not model.encoder.embed_positions.weight.requires_grad
    moiety.save(model, tmp_path)
    loaded = moiety.load(tmp_path)
    assert not loaded.encoder.embed_positions.weight.requires_grad
    assert loaded.encoder.layers[0].fc2.moe.experts.w_in.requires_grad


ROUTERS = ["switch", "softmax", "noisy-top-k", "sigmoid-balanced", "dselect-k", "tree", "hash"]
ROUTERS += ["expert-choice", "cosine", "top-k-static", "gumbel-static"]


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_comes_back_with_what_it_counts(router, tmp_path):
    words = {"experts": 4, "router": router, "init": "low-rank", "rank": 2}
    model = moved(moiety.upcycle(dense("bert"), **words))
    inputs = make_probe(model)
    inputs.run(model.train())  # counters and running loads move
    moiety.save(model.eval(), tmp_path)
    loaded = moiety.load(tmp_path)
    assert_same(model, loaded)
    inputs.run(loaded.train())
    for name, buffer in loaded.named_buffers():
        assert not buffer.is_floating_point() or torch.isfinite(buffer).all(), name


def test_the_layer_s_settings_come_back(tmp_path):
    words = {"capacity_factor": 1.5, "group": "example", "balance": {"switch": 0.5}}
    model = upcycled("vit", init="low-rank", rank=2, **words)
    moiety.save(model, tmp_path)
    layer = next(mixtures(moiety.load(tmp_path)))[1].moe
    for word, value in words.items():
        assert getattr(layer, word) == value


def test_bf16_stays_and_dtype_and_device_are_obeyed(tmp_path):
    config, bf16 = dense("llama").config, torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=bf16)
    words = {"experts": 4, "router": "sigmoid-balanced", "k": 2, "init": "low-rank"}
    model = moved(moiety.upcycle(model, **words))
    moiety.save(model, tmp_path)
    assert_same(model, moiety.load(tmp_path))  # the balance bias is float32, and stays so
    double = moiety.load(tmp_path, dtype=torch.float64, device="cpu")
    assert {p.dtype for p in double.parameters()} == {torch.float64}
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    assert {p.dtype for p in half.parameters()} == {torch.float16}
    assert_same(model, type(model).from_pretrained(tmp_path, dtype=bf16))


def test_a_router_that_starts_from_a_factorisation_comes_back_in_bf16(tmp_path):
    words = {"experts": 4, "router": "perturbed-cosine", "k": 2}
    model = moiety.upcycle(dense("bert").bfloat16(), **words)
    moiety.save(model, tmp_path)
    assert_same(model, moiety.load(tmp_path))


def test_many_shards_with_an_index(tmp_path):
    model = upcycled("t5")
    moiety.save(model, tmp_path, max_shard_size="5KB")
    assert (tmp_path / INDEX).is_file() and len([*tmp_path.glob("model-*.safetensors")]) > 3
    assert_same(model, moiety.load(tmp_path))
    assert_same(model, type(model).from_pretrained(tmp_path))
    moiety.save(model, tmp_path)  # the old shards are gone
    assert sorted(p.name for p in tmp_path.glob("model*")) == [SINGLE]
    assert_same(model, moiety.load(tmp_path))


@pytest.mark.parametrize("how", ["family", "rows"])
def test_a_grown_model_is_saved_as_grown(how, tmp_path):
    model = upcycled("bert")
    moiety.grow(model, parents=[1], how=how)
    moiety.grow(model, parents=[4], how=how)
    moved(model)
    model.save_pretrained(tmp_path / "a")
    moiety.save(model, tmp_path / "b")
    for folder in ("a", "b"):
        loaded = moiety.load(tmp_path / folder)
        assert next(mixtures(loaded))[1].moe.experts.experts == 6
        assert_same(model, loaded)


def test_a_grown_tree_is_saved_as_grown(tmp_path):
    model = moved(moiety.upcycle(dense("bert"), experts=3, router="tree"))
    moiety.grow(model, parents=[2])
    moiety.save(model, tmp_path)
    assert_same(model, moiety.load(tmp_path))


def test_copies_and_pickles_describe_themselves(tmp_path):
    model = upcycled("bert")
    twin = copy.deepcopy(model)
    moiety.grow(model, parents=[0])
    twin.save_pretrained(tmp_path / "twin")
    assert_same(twin, moiety.load(tmp_path / "twin"))
    alone = copy.deepcopy(model.config)
    again = pickle.loads(pickle.dumps(model))
    told = model.config.to_dict()["quantization_config"]
    assert alone.to_dict()["quantization_config"] == told
    del model
    gc.collect()
    assert alone.to_dict()["quantization_config"] == told
    moiety.save(again, tmp_path / "pickled")
    assert_same(again, moiety.load(tmp_path / "pickled"))


def test_heads_come_and_go(tmp_path):
    model = upcycled("bert")
    moiety.save(model, tmp_path / "head")
    bare = transformers.BertModel.from_pretrained(tmp_path / "head")
    assert len([*mixtures(bare)]) == 2
    assert_same(model.bert, bare)
    bare.save_pretrained(tmp_path / "bare")
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "bare")
    inner = again.bert.encoder.state_dict()
    assert all(torch.equal(v, inner[k]) for k, v in model.bert.encoder.state_dict().items())
    moiety.save(upcycled("t5"), tmp_path / "t5")
    encoder = transformers.T5EncoderModel.from_pretrained(tmp_path / "t5")
    assert len([*mixtures(encoder)]) == 2


def test_a_part_is_saved_without_a_change_to_the_whole(tmp_path):
    model = upcycled("bert")
    moiety.save(model.bert, tmp_path / "a")
    model.bert.save_pretrained(tmp_path / "b")
    moiety.save(model, tmp_path / "whole")
    assert_same(model.bert, moiety.load(tmp_path / "a"))
    assert_same(model.bert, moiety.load(tmp_path / "b"))
    assert_same(model, moiety.load(tmp_path / "whole"))


def test_a_wrapped_model_is_saved_by_its_names_there(tmp_path):
    ids = torch.randint(50, (2, 5))
    model = nn.Sequential(upcycled("bert").bert.embeddings, upcycled("bert").bert.encoder)
    moiety.save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["class"] == "Sequential"
    into = nn.Sequential(dense("bert").bert.embeddings, dense("bert").bert.encoder)
    assert_same(model, moiety.load(tmp_path, into=into), ids)


def test_a_quantised_base_is_not_taken_for_ours(tmp_path):
    model = dense("bert")
    model.config.quantization_config = {"quant_method": "other"}
    model = moiety.upcycle(model, experts=4, init="low-rank", rank=2)
    assert model.config.quantization_config == {"quant_method": "other"}
    with pytest.raises(ValueError, match="quantised base"):
        moiety.save(model, tmp_path)


def test_a_config_that_was_read_or_used_serves_again(tmp_path):
    model = upcycled("bert")
    moiety.save(model, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert_same(model, type(model).from_pretrained(tmp_path, config=config))
    assert_same(model, type(model).from_pretrained(tmp_path, config=model.config))


def test_transformers_alone_refuses(tmp_path):
    moiety.save(upcycled("bert"), tmp_path)
    code = f"""
import transformers, sys
try:
    transformers.AutoModelForSequenceClassification.from_pretrained({str(tmp_path)!r})
finally:
    assert not any(name.startswith("moiety") for name in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "moiety" in ran.stderr and "mismatched" in ran.stderr, ran.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_no_dense_model_takes_the_weights(kind, tmp_path):
    moiety.save(upcycled(kind), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]  # what transformers alone sees
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="mismatched"):
        type(dense(kind)).from_pretrained(tmp_path)


# -- plain modules ---------------------------------------------------------------------------------


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.moe = moiety.MoE("top-k", dim=16, hidden=24, experts=4, k=2)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.moe(self.embed(ids)))


def test_a_plain_module_is_loaded_into_the_dense_or_the_same_one(tmp_path):
    x = torch.randn(2, 5, 16)
    model = moved(moiety.upcycle(encoder(), experts=4, k=2, probe=x))
    moiety.save(model, tmp_path, max_shard_size="5KB")
    target = encoder()
    loaded = moiety.load(tmp_path, into=target)
    assert loaded is target
    assert_same(model, loaded, x)
    assert moiety.receipt(loaded) == moiety.receipt(model)
    assert_same(model, moiety.load(tmp_path, into=moiety.upcycle(encoder(), 4, k=2, probe=x)), x)
    loaded(x).sum().backward()
    assert all(p.grad is not None for p in loaded.parameters() if p.requires_grad)
    with pytest.raises(ValueError, match="into=module"):
        moiety.load(tmp_path)
    with pytest.raises(ValueError, match="other mixtures"):
        moiety.load(tmp_path, into=moiety.upcycle(encoder(), 3, k=2, probe=x))


def test_a_module_that_does_not_fit_stays_as_it_was(tmp_path):
    x = torch.randn(2, 5, 16)
    moiety.save(moiety.upcycle(encoder(), experts=4, k=2, probe=x), tmp_path)
    for other in (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24), 3),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 20), 2),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24), 1),
        nn.Linear(3, 3),
    ):
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError):
            moiety.load(tmp_path, into=other)
        assert before.keys() == other.state_dict().keys()


def test_hand_placed_layers_and_ties(tmp_path):
    ids = torch.randint(50, (2, 5))
    model = moved(Tied())
    moiety.save(model, tmp_path)
    assert "head.weight" not in load_file(tmp_path / SINGLE)
    loaded = moiety.load(tmp_path, into=Tied())
    assert_same(model, loaded, ids)
    assert loaded.head.weight is loaded.embed.weight
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(50, 16))
    with pytest.raises(ValueError, match=r"head\.weight is missing"):
        moiety.load(tmp_path, into=untied)


def test_token_wise_modules_as_experts(tmp_path):
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 16)

        def forward(self, x):
            return self.c(torch.tanh(self.b(torch.sin(self.a(x)))))

    x = torch.randn(2, 5, 16)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LayerNorm(16), Strange())
    model = moved(moiety.upcycle(plain, experts=3, k=2, probe=x))
    assert describe_mixtures(model)[0]["experts"]["kind"] == "module"
    moiety.save(model, tmp_path)
    assert_same(model, moiety.load(tmp_path, into=copy.deepcopy(plain)), x)


def test_a_model_of_transformers_can_be_filled_too(tmp_path):
    model = upcycled("gpt2")
    moiety.save(model, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    loaded = moiety.load(tmp_path, into=transformers.GPT2LMHeadModel(config))
    assert_same(model, loaded)
    loaded.save_pretrained(tmp_path / "again")
    assert_same(model, moiety.load(tmp_path / "again"))


# -- what is refused -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    moiety.save(upcycled("bert"), folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A fresh copy; without checksums, as the Trainer writes it, so that the rest is tested."""
    shutil.copytree(saved, tmp_path / "model")
    edit(tmp_path / "model", lambda c: c["quantization_config"].pop("files"))
    return tmp_path / "model"


def edit(folder: Path, change) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def first(config: dict) -> dict:
    return config["quantization_config"]["mixtures"][0]


CHANGES = {
    "router": (lambda c: first(c)["router"].update(name="nonesuch"), "nonesuch"),
    "option": (lambda c: first(c)["router"]["options"].update(k=9), "k = 9"),
    "unknown option": (lambda c: first(c)["router"]["options"].update(a=9), "'a'"),
    "activation": (lambda c: first(c)["block"].update(activation="nonesuch"), "nonesuch"),
    "kind": (lambda c: first(c)["experts"].update(kind="nonesuch"), "nonesuch"),
    "module": (lambda c: first(c)["block"].update(outer="bert.nonesuch"), "nonesuch"),
    "block": (lambda c: first(c)["block"].update(nonesuch=1), "nonesuch"),
    "width": (lambda c: first(c)["block"].update(hidden=25), "24"),
    "fewer experts": (lambda c: first(c)["experts"].update(count=3), "experts"),
    "many experts": (lambda c: first(c)["experts"].update(count=10**12), "do not hold"),
    "no mixtures": (lambda c: c["quantization_config"].update(mixtures=[]), "should be"),
    "no list": (lambda c: c["quantization_config"].update(mixtures=7), "cannot be read"),
    "one mixture": (lambda c: c["quantization_config"]["mixtures"].pop(), "should be"),
    "grown": (lambda c: first(c).update(grown=[77]), "77"),
    "version": (lambda c: c["quantization_config"].update(version=99), "99"),
    "dense": (lambda c: c.pop("quantization_config"), "from_pretrained"),
    "remote code": (lambda c: c.update(auto_map={"AutoModel": "x.Y"}), "auto_map"),
    "kernel": (lambda c: c.update(_attn_implementation="some/kernel"), "kernel|implementation"),
    "explicit file": (lambda c: c.update(transformers_weights="../x.safetensors"), "weights"),
    "dotted class": (lambda c: c.update(architectures=["models.bert.BertModel"]), "no 'models"),
    "no class": (lambda c: c.update(architectures=["logging"]), "logging"),
    "other class": (lambda c: c.update(architectures=["GPT2LMHeadModel"]), "GPT2"),
    "model type": (lambda c: c.update(model_type="nonesuch"), "nonesuch"),
    "layers": (lambda c: c.update(num_hidden_layers=3), "missing"),
    "hidden": (lambda c: c.update(hidden_size=32), "maps"),
    "vocabulary": (lambda c: c.update(vocab_size=51), "word_embeddings"),
    "labels": (lambda c: c.update(id2label={str(i): str(i) for i in range(5)}), "classifier"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_config_that_does_not_fit_is_refused(case, folder):
    change, word = CHANGES[case]
    edit(folder, change)
    with pytest.raises(ValueError, match=word):
        moiety.load(folder)


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


KEY = "bert.encoder.layer.0.output.dense.moe.experts.w_in"
TENSORS = {
    "missing": lambda t: t.pop(KEY),
    "missing head": lambda t: t.pop("classifier.weight"),
    "extra": lambda t: t.update(nonesuch=torch.zeros(2)),
    "extra expert": lambda t: t.update({KEY: torch.zeros(5, 24, 16)}),
    "shape": lambda t: t.update({KEY: torch.zeros(4, 16, 24)}),
    "head shape": lambda t: t.update({"classifier.weight": torch.zeros(3, 16)}),
    "type": lambda t: t.update({KEY: torch.zeros(4, 24, 16, dtype=torch.long)}),
}


@pytest.mark.parametrize("case", TENSORS)
def test_weights_that_do_not_fit_are_refused_by_name(case, folder):
    rewrite(folder, TENSORS[case])
    key = {"missing head": "classifier", "extra": "nonesuch", "head shape": "classifier"}
    with pytest.raises(ValueError, match=key.get(case, "moe.experts.w_in")):
        moiety.load(folder)
    with pytest.raises(ValueError, match=key.get(case, "moe.experts.w_in")):
        moiety.load(folder, into=dense("bert"))
    if case in ("missing", "extra expert", "shape", "type", "head shape"):
        with pytest.raises(ValueError):  # transformers itself would take it
            transformers.AutoModelForSequenceClassification.from_pretrained(folder)


def test_pickles_are_never_read(folder):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (folder / "exploded",))

    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        moiety.load(folder)
    assert not (folder / "exploded").exists()


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "gone.safetensors", 3])
def test_an_index_stays_in_its_folder(name, folder):
    shutil.copy(folder / SINGLE, folder.parent / SINGLE)
    keys = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(keys, name)}))
    with pytest.raises(ValueError, match="index"):
        moiety.load(folder)


def test_an_index_and_its_shards_agree(tmp_path):
    moiety.save(upcycled("bert"), tmp_path, max_shard_size="5KB")
    index = json.loads((tmp_path / INDEX).read_text())
    names = index["weight_map"]
    shared = next(k for k, v in names.items() if [*names.values()].count(v) > 1)
    del names[shared]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"agree about {shared}"):
        moiety.load(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(ValueError, match="weight_map"):
        moiety.load(tmp_path)


def test_a_flipped_bit_in_a_weight_is_seen(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "model")
    data = bytearray((tmp_path / "model" / SINGLE).read_bytes())
    data[-5] ^= 1
    (tmp_path / "model" / SINGLE).write_bytes(data)
    with pytest.raises(ValueError, match="SHA-256"):
        moiety.load(tmp_path / "model")


@pytest.mark.parametrize("seed", range(12))
def test_damaged_files_raise_or_change_nothing(seed, folder):
    draw = random.Random(seed)
    whole = moiety.load(folder)
    name = draw.choice([SINGLE, "config.json"])
    data = bytearray((folder / name).read_bytes())
    if draw.random() < 0.4:
        data = data[: draw.randrange(len(data))]
    else:  # in the header of the weights: behind it, only checksums can tell
        for _ in range(3):
            data[draw.randrange(min(len(data), 2000))] ^= 1 << draw.randrange(8)
    (folder / name).write_bytes(data)
    try:
        loaded = moiety.load(folder)
    except ValueError:
        return
    assert name == "config.json" or whole.state_dict().keys() == loaded.state_dict().keys()


def test_other_folders_are_refused_in_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        moiety.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="JSON"):
        moiety.load(tmp_path)
    dense("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no mixtures"):
        moiety.load(tmp_path)
    with pytest.raises(ValueError, match="no MoE layer"):
        moiety.save(dense("bert"), tmp_path / "new")
    with pytest.raises(ValueError, match="is a file"):
        moiety.save(upcycled("bert"), tmp_path / "config.json")


def test_other_weights_in_the_folder_stay(tmp_path):
    moiety.save(upcycled("bert"), tmp_path, max_shard_size="10KB")
    (tmp_path / "model_best.safetensors").write_text("of somebody else")
    moiety.save(upcycled("bert"), tmp_path)
    left = {p.name for p in tmp_path.glob("*.safetensors*")}
    assert left == {SINGLE, "model_best.safetensors"}
    moiety.load(tmp_path)


def test_an_interrupted_save_leaves_nothing_that_loads(tmp_path, monkeypatch):
    moiety.save(upcycled("bert"), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    replace = os.replace

    def fail_at_the_config(old, new):
        replace(old, 1 / 0 if new == tmp_path / "config.json" else new)

    monkeypatch.setattr(os, "replace", fail_at_the_config)
    with pytest.raises(ZeroDivisionError):
        moiety.save(upcycled("bert", experts=3), tmp_path)
    with pytest.raises(ValueError, match=r"no config\.json"):
        moiety.load(tmp_path)
    assert (tmp_path / "tokenizer.json").exists() and not [*tmp_path.glob(".saving*")]


# -- the Trainer -----------------------------------------------------------------------------------


class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        draw = torch.Generator().manual_seed(i)
        ids = torch.randint(1, 50, (8,), generator=draw)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": i % 2}


def trainer(model, out, **words):
    settings = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
        **words,
    }
    args = transformers.TrainingArguments(str(out), **settings)
    return transformers.Trainer(model, args, train_dataset=Words(), eval_dataset=Words())


def test_checkpoints_of_the_trainer_load_and_resume(tmp_path):
    first_run = trainer(upcycled("bert"), tmp_path)
    first_run.train()
    end = first_run.model.eval()
    assert_same(end, moiety.load(tmp_path / "checkpoint-4"))
    kind = transformers.AutoModelForSequenceClassification
    assert_same(end, kind.from_pretrained(tmp_path / "checkpoint-4"))
    again = trainer(upcycled("bert"), tmp_path / "b")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(end, again.model.eval())
    loaded = trainer(moiety.load(tmp_path / "checkpoint-2"), tmp_path / "c")
    loaded.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(end, loaded.model.eval())


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    words = {"eval_steps": 2, "eval_strategy": "steps", "load_best_model_at_end": True}
    run = trainer(upcycled("bert"), tmp_path, metric_for_best_model="eval_runtime", **words)
    run.train()
    best = Path(run.state.best_model_checkpoint)
    assert_same(run.model.eval(), moiety.load(best))
    # Sharded checkpoints are read by another function, which counts names strictly.
    moiety.save(moved(moiety.load(best)), tmp_path / "sharded", max_shard_size="5KB")
    from transformers.trainer_utils import load_sharded_checkpoint

    load_sharded_checkpoint(run.model, str(tmp_path / "sharded"), strict=True)
    assert_same(run.model, moiety.load(tmp_path / "sharded"))
