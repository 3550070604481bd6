"""`moiety upcycle`: a folder in, a complete folder out; a dry run that says what it would take."""

import json
import re

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from moiety.cli import upcycle as verb
from moiety.hf.loading import load_any
from moiety.hf.plan import Size, hollow
from moiety.hf.probe import gap, make_probe
from moiety.hf.saving import load
from moiety.hf.upcycle import receipt

SMALL = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}


def write(model, folder):
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def llama(tmp_path):
    """A folder with a small model and its tokenizer."""
    config = transformers.LlamaConfig(**SMALL, intermediate_size=24, num_key_value_heads=1)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    wrapped.save_pretrained(tmp_path / "llama")
    return write(transformers.LlamaForCausalLM(config), tmp_path / "llama")


def test_a_model_becomes_a_complete_folder_with_the_same_outputs(moiety, llama, tmp_path):
    out = tmp_path / "moe"
    words = ["--model", llama, "--out", out, "--experts", 4, "--k", 2, "--layers", "last:2"]
    code, text, _ = moiety("upcycle", *words)
    assert code == 0
    assert re.search(r"Parameters +[\d,]+ +[\d,]+ +1\.\d\d", text)
    assert "2 blocks, top-k, start: copy" in text
    assert f"moiety.load({str(out)!r})" in text
    dense, mixed = load_any(str(llama)), load(out)
    probe = make_probe(dense)
    assert gap(probe.outputs(dense), probe.outputs(mixed)) <= 1e-6
    assert receipt(mixed).layers == ["model.layers.2.mlp", "model.layers.3.mlp"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("a b")["input_ids"] == [1, 2]


def test_the_model_itself_is_never_written_over(moiety, llama):
    before = (llama / "config.json").read_bytes()
    for more in (["--force"], ["--dry-run"]):
        code, _, err = moiety("upcycle", "--model", llama, "--out", llama, *more)
        assert code == 2
        assert "is the model itself" in err
    assert (llama / "config.json").read_bytes() == before


def test_a_wrong_word_is_found_before_weights_are_read(moiety, llama, tmp_path):
    for words, message in (
        (["--k", 9], "k = 9"),
        (["--router", "topk"], "did you mean top-k"),
        (["--option", "ballance=1"], "did you mean balance"),
    ):
        code, text, err = moiety("upcycle", "--model", llama, "--out", tmp_path / "m", *words)
        assert code == 2
        assert message in err
        assert "Loading" not in text


def test_a_model_without_a_head_is_told_how_to_get_one(moiety, tmp_path):
    config = transformers.BertConfig(**SMALL, intermediate_size=24)
    folder = write(transformers.BertModel(config), tmp_path / "bert")
    code, text, _ = moiety("upcycle", "--model", folder, "--out", tmp_path / "m", "--experts", 2)
    assert code == 0
    assert "AutoModelForSequenceClassification.from_pretrained(" in text


def test_a_dry_run_of_a_model_with_experts_says_so(moiety, tmp_path):
    config = transformers.MixtralConfig(**SMALL, intermediate_size=24, num_key_value_heads=1)
    folder = write(transformers.MixtralForCausalLM(config), tmp_path / "mixtral")
    code, _, err = moiety("upcycle", "--model", folder, "--dry-run")
    assert code == 2
    assert "has experts of its own" in err


def test_every_option_reaches_the_model(moiety, llama, tmp_path):
    words = ["--experts", 6, "--router", "noisy-top-k", "--k", 3, "--layers", "0"]
    words += ["--layers", "*.3.mlp", "--init", "noise", "--amount", 0.1, "--no-exact"]
    words += ["--capacity-factor", 4, "--allow-noncausal", "--dtype", "bfloat16"]
    words += ["--option", "std=0.7", "--option", "overflow=priority"]
    code, _, err = moiety("upcycle", "--model", llama, "--out", tmp_path / "m", *words)
    assert code == 0, err
    model = load(tmp_path / "m")
    proof = receipt(model)
    assert proof.layers == ["model.layers.0.mlp", "model.layers.3.mlp"]
    assert (proof.router, proof.init) == ("noisy-top-k", "noise")
    assert proof.gap > 1e-3
    moe = model.model.layers[3].mlp.moe
    assert (moe.experts.experts, moe.router.k, moe.capacity_factor) == (6, 3, 4)
    assert (moe.router.options["std"], moe.overflow) == (0.7, "priority")
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("words", "check"),
    [
        (["--init", "low-rank", "--rank", 3], lambda e: e.rank == 3),
        (["--init", "split", "--shards", 4, "--k", 4], lambda e: e.hidden == 6),
    ],
)
def test_rank_and_shards(moiety, llama, tmp_path, words, check):
    moiety("upcycle", "--model", llama, "--out", tmp_path / "m", *words)
    assert check(load(tmp_path / "m").model.layers[0].mlp.moe.experts)


def test_the_same_seed_gives_the_same_weights(moiety, llama, tmp_path):
    stored = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        moiety("upcycle", "--model", llama, "--out", tmp_path / folder, "--seed", seed)
        stored.append((tmp_path / folder / "model.safetensors").read_bytes())
    assert stored[0] == stored[1] != stored[2]


# -- dry run ---------------------------------------------------------------------------------------


def t5():
    sizes = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, num_heads=2))


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, intermediate_size=24))


def vit():
    words = {k: v for k, v in SMALL.items() if k != "vocab_size"}
    config = transformers.ViTConfig(**words, intermediate_size=24, image_size=16, patch_size=4)
    return transformers.ViTForImageClassification(config)


def albert():  # one block that runs four times
    words = {**SMALL, "embedding_size": 8, "intermediate_size": 24}
    return transformers.AlbertForMaskedLM(transformers.AlbertConfig(**words))


FIGURES = [(make, init) for make in (t5, bert, vit) for init in ("copy", "split", "low-rank")]


@pytest.mark.parametrize(("make", "init"), [*FIGURES, (albert, "copy")])
def test_the_figures_of_a_dry_run_are_those_of_the_receipt(make, init, moiety, tmp_path):
    folder = write(make(), tmp_path / "model")
    words = ["--model", folder, "--experts", 4, "--k", 2, "--init", init]
    words += ["--layers", "last:1"]
    for file in folder.glob("*.safetensors"):
        file.rename(tmp_path / "away")  # only the config is read
    code, text, err = moiety("upcycle", *words, "--dry-run")
    assert code == 0, err
    (tmp_path / "away").rename(folder / "model.safetensors")
    assert moiety("upcycle", *words, "--out", tmp_path / "out")[0] == 0
    proof = receipt(load(tmp_path / "out"))
    seen = {
        row[0]: [int(n.replace(",", "")) for n in row[1:]]
        for row in re.findall(r"^ *([A-Z][A-Za-z ]+?)  +([\d,]+) +([\d,]+)", text, re.M)
    }
    assert seen["Parameters"] == [proof.parameters_before, proof.parameters_after]
    assert seen["Active for a token"] == [proof.active_before, proof.active_after]
    flops = [proof.flops_before, proof.flops_after]
    assert seen["Forward FLOPs a token"] == pytest.approx(flops, abs=0.5)
    assert all(name in text for name in proof.layers)


@pytest.mark.parametrize(
    "words",
    [
        ["--router", "switch", "--no-exact"],
        ["--router", "hash", "--k", 2],
        ["--router", "softmax"],
        ["--init", "noise", "--no-exact"],
        ["--init", "reinit", "--amount", 0.2, "--no-exact"],
        ["--option", 'balance={"switch": 0.1}'],
    ],
)
def test_a_dry_run_takes_what_a_run_takes(words, moiety, llama):
    code, text, err = moiety("upcycle", "--model", llama, *words, "--dry-run")
    assert code == 0, err
    assert "What it would take" in text


def test_a_dry_run_counts_bytes_and_writes_nothing(moiety, llama, tmp_path):
    before = sorted(p.name for p in tmp_path.rglob("*"))
    _, text, _ = moiety("upcycle", "--model", llama, "--out", tmp_path / "new", "--dry-run")
    assert sorted(p.name for p in tmp_path.rglob("*")) == before
    size = verb.figures_of(Size(parameters=1_000_000, trainable=100_000, active=0, flops=0.0))
    assert size["Weights, float32"] == "4.0 MB"
    assert size["Training, float32"] == "5.2 MB"  # 4 · (1 + 3 · 0.1)
    assert size["Training, bfloat16"] == "2.6 MB"
    assert "Training, bfloat16" in text


def test_a_hollow_model_has_all_shapes_and_few_numbers(llama):
    full, thin = load_any(str(llama)), hollow(str(llama))
    assert {n: p.shape for n, p in thin.named_parameters()} == {
        n: p.shape for n, p in full.named_parameters()
    }
    stored = sum(p.untyped_storage().nbytes() for p in thin.parameters())
    assert stored < sum(p.untyped_storage().nbytes() for p in full.parameters()) / 4


def test_a_dry_run_of_a_model_with_experts_is_refused(moiety, llama, tmp_path):
    moiety("upcycle", "--model", llama, "--out", tmp_path / "m", "--experts", 2)
    code, _, err = moiety("upcycle", "--model", tmp_path / "m", "--dry-run")
    assert code == 2
    assert "has experts already" in err


def test_what_reads_images_and_sound_comes_along(moiety, tmp_path):
    image = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    write(vit(), tmp_path / "vit")
    image.save_pretrained(tmp_path / "vit")
    assert moiety("upcycle", "--model", tmp_path / "vit", "--out", tmp_path / "a")[0] == 0
    assert transformers.AutoImageProcessor.from_pretrained(tmp_path / "a").size["height"] == 16
    write(vit(), tmp_path / "sound")
    sound = transformers.Wav2Vec2FeatureExtractor(sampling_rate=8000)
    sound.save_pretrained(tmp_path / "sound")
    verb.save(load(tmp_path / "a"), str(tmp_path / "sound"), tmp_path / "b")
    assert (
        json.loads((tmp_path / "b/preprocessor_config.json").read_text())["sampling_rate"] == 8000
    )


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--k", 9], "k = 9 experts a token, but there are only 8"),
        (["--router", "topk"], "topk"),
        (["--layers", "last:9"], "the model has 4 blocks"),
        (
            ["--init", "noise"],
            "take --init low-rank, which never does, or allow it with --no-exact",
        ),
        (["--router", "expert-choice", "--no-exact"], "or pass --allow-noncausal"),
        (["--option", "sharpness"], "--option takes name=value, got 'sharpness'"),
        (["--option", "rank=2"], "rank is no option of a router: give --rank"),
        (["--option", "sharpness=2"], "sharpness"),
        (["--shards", 2], "shards is about split"),
        (["--device", "nonsense"], "no device 'nonsense'"),
        (["--dtype", "int8"], "--dtype"),
    ],
)
def test_a_wrong_argument_is_one_sentence(moiety, llama, tmp_path, words, said, dry):
    out = tmp_path / "out"
    code, _, err = moiety("upcycle", "--model", llama, "--out", out, *words, *dry)
    last = err.strip().splitlines()[-1]
    assert code == 2
    assert last.startswith("moiety: ") and said in last
    assert not out.exists() or not any(out.iterdir())


def test_a_folder_without_a_model_is_told(moiety, tmp_path):
    for dry in ([], ["--dry-run"]):
        code, _, err = moiety("upcycle", "--model", tmp_path, "--out", tmp_path / "o", *dry)
        assert code == 2
        assert "no config.json" in err


def test_a_folder_in_use_is_refused_before_anything_is_loaded(moiety, llama, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with monkeypatch.context() as patched:
        patched.setattr(verb, "load", lambda *_: pytest.fail("it loaded"))
        code, _, err = moiety("upcycle", "--model", llama, "--out", out)
    assert code == 2
    assert "exists and is not empty: choose another folder, or --force" in err
    assert [p.name for p in out.iterdir()] == ["notes.txt"]
    assert moiety("upcycle", "--model", llama, "--out", out, "--force")[0] == 0
    assert (out / "notes.txt").read_text() == "mine"
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
