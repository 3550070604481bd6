"""`moiety health`: planted models end in a page that names the plant; mistakes in one sentence."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import moiety as package
from moiety.hf import loading
from moiety.hf.examples import prepare
from moiety.hf.transformers_hook import METHOD
from planted import KINDS, LAYER, planted, save, texts, tokenizer


@pytest.fixture
def lines(tmp_path):
    (tmp_path / "data.txt").write_text("\n".join(texts(32)) + "\n\n")
    return tmp_path / "data.txt"


@pytest.fixture
def ragged(tmp_path):
    (tmp_path / "ragged.txt").write_text("\n".join(texts(32, ragged=True)))
    return tmp_path / "ragged.txt"


def whole(text):
    return text.replace("\n", "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_model_gets_a_page_without_findings(moiety, tmp_path, lines, kind):
    model = save(tmp_path / kind, kind)
    code, out, _ = moiety("health", "--model", model, "--data", lines, "--out", tmp_path / "out")
    assert code == 0
    assert "No problem found." in out
    assert str(tmp_path / "out/health.html") in whole(out)
    html = (tmp_path / "out/health.html").read_text()
    assert "No problem found." in html
    assert f"Routing health of {kind}" in html
    assert re.search(r"<code>w\d+</code>", html)  # typical tokens, as text
    assert "Padding took no slot" in html
    result = json.loads((tmp_path / "out/health.json").read_text())
    assert result["examples"] == 32
    assert [layer["experts"] for layer in result["layers"]] == [8, 8]


@pytest.mark.parametrize("kind", KINDS)
def test_planted_defects_are_named_on_screen_and_page(moiety, tmp_path, ragged, kind):
    model = save(tmp_path / kind, kind, dead=5, magnet=3)
    page = tmp_path / "page.html"
    code, out, _ = moiety("health", "--model", model, "--data", ragged, "--out", page)
    assert code == 0
    dead = f"{LAYER[kind].format(1)}: expert 5 got no token."
    assert f"- {dead}" in out
    assert re.search(rf"- {LAYER[kind].format(0)}: padding takes \d+% of the slots", out)
    html = page.read_text()
    assert dead in html.replace("<strong>", "").replace("</strong>", "")
    assert re.search(r"100% of them to experts .*\b3\b.*, which get", html)
    assert (tmp_path / "page.json").exists()


def test_a_dry_run_names_layers_and_writes_nothing(moiety, tmp_path, lines):
    model = save(tmp_path / "m", "olmoe")
    given = ["--model", model, "--data", lines, "--out", tmp_path / "out", "--limit", 20]
    code, out, _ = moiety("health", *given, "--dry-run")
    assert code == 0
    assert "20 examples in 3 batches" in whole(out)
    assert "model.layers.1.mlp: 8 experts" in out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv", "parquet"])
def test_columns_of_tables_are_read(moiety, tmp_path, suffix):
    import pandas

    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    data = tmp_path / f"data.{suffix}"
    table = pandas.DataFrame({"id": range(8), "words": texts(8)})
    write = {
        "jsonl": lambda: table.to_json(data, orient="records", lines=True),
        "csv": lambda: table.to_csv(data, index=False),
        "tsv": lambda: table.to_csv(data, index=False, sep="\t"),
        "parquet": lambda: table.to_parquet(data),
    }
    write[suffix]()
    model, out = save(tmp_path / "m", "mixtral"), tmp_path / "out"
    given = ["health", "--model", model, "--data", data, "--out", out]
    code, _, err = moiety(*given)
    assert code == 2
    assert "has no column 'text'; --column may be id, words" in err
    assert moiety(*given, "--column", "words")[0] == 0
    assert json.loads((out / "health.json").read_text())["examples"] == 8


def test_the_folder_one_is_in_has_a_name(moiety, tmp_path, lines, monkeypatch):
    monkeypatch.chdir(save(tmp_path / "mine", "olmoe"))
    assert moiety("health", "--model", ".", "--data", lines, "--out", tmp_path / "out")[0] == 0
    assert "Routing health of mine" in (tmp_path / "out/health.html").read_text()


def test_options_change_what_is_read(moiety, tmp_path, lines):
    model, out = save(tmp_path / "m", "mixtral"), tmp_path / "out"
    given = ["health", "--model", model, "--data", lines, "--out", out]
    assert moiety(*given, "--limit", 10, "--max-length", 6, "--batch-size", 5)[0] == 0
    result = json.loads((out / "health.json").read_text())
    assert result["examples"] == 10
    assert result["layers"][0]["tokens"] == 10 * 6
    assert "batches of 5" in result["settings"]["Data"]


def test_token_ids_need_no_tokenizer_and_texts_do(moiety, tmp_path, lines):
    planted("mixtral").save_pretrained(tmp_path / "m")
    data = tmp_path / "ids.jsonl"
    data.write_text("\n".join(json.dumps({"input_ids": [2, 3, 4, 5 + i]}) for i in range(9)))
    given = ["health", "--model", tmp_path / "m", "--out", tmp_path / "out", "--data"]
    code, _, err = moiety(*given, lines)
    assert code == 2
    assert "brings no tokenizer" in err
    assert err.count("moiety:") == 1
    assert moiety(*given, data)[0] == 0
    assert "<code>#2</code>" in (tmp_path / "out/health.html").read_text()
    data.write_text(json.dumps({"input_ids": [2, 999]}))
    assert "token id 999 is outside the model's vocabulary of 62" in moiety(*given, data)[2]


def dense():
    config = LlamaConfig(
        vocab_size=62,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def test_a_dense_model_is_told_so(moiety, tmp_path, lines):
    dense().save_pretrained(tmp_path / "dense")
    given = ["--model", tmp_path / "dense", "--data", lines, "--out", tmp_path / "out"]
    code, _, err = moiety("health", *given)
    assert code == 2
    assert "holds nothing to look at: LlamaForCausalLM has no MoE layer" in err
    assert err.count("moiety:") == 1


def test_an_upcycled_model_is_measured_and_gives_padding_no_slot(moiety, tmp_path, ragged):
    folder = tmp_path / "upcycled"
    package.save(package.upcycle(dense(), experts=4, router="top-k", k=2), folder)
    tokenizer().save_pretrained(folder)
    out = tmp_path / "out"
    assert moiety("health", "--model", folder, "--data", ragged, "--out", out)[0] == 0
    (layer,) = json.loads((out / "health.json").read_text())["layers"]
    assert (layer["experts"], layer["padding"]["share"]) == (4, 0)
    assert layer["slots"] == 2 * layer["tokens"] == 2 * len(ragged.read_text().split())


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "\n \n", "holds no example"),
        ("a.doc", "x", "must be one of .txt, .jsonl"),
        ("a.jsonl", '{"text": "a"}\n{', "example 2: this is not JSON"),
        ("a.jsonl", '{"input_ids": "abc"}', "lists of token ids"),
        ("a.csv", 'text\n"never closed', "a.csv cannot be read: Error tokenizing"),
        ("a.csv", "", "a.csv is empty; its first line must name"),
        ("a.parquet", "x", "a.parquet"),
        ("a.npy", "", "a.npy holds no array that numpy can read"),
        ("a.npz", "PK", "a.npz holds no array that numpy can read"),
    ],
)
def test_bad_data_is_one_sentence(moiety, tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    given = ["--model", tmp_path, "--data", tmp_path / name, "--out", tmp_path / "out"]
    code, out, err = moiety("health", *given)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "examples"),
    [
        ('\ufeff{"text": "w1 w2"}\n{"text": "w3"}', 2),  # as some editors begin a file
        ('{"text": "w1 \\ud800 w2"}', 1),  # half a pair of surrogates
        ('{"input_ids": [2, 3]}\n[4]\n"x"', 1),
    ],
)
def test_odd_lines_are_read(moiety, tmp_path, content, examples):
    (tmp_path / "a.jsonl").write_text(content, encoding="utf-8")
    model, out = save(tmp_path / "m", "olmoe"), tmp_path / "out"
    code, _, err = moiety("health", "--model", model, "--data", tmp_path / "a.jsonl", "--out", out)
    assert code == 0, err
    assert json.loads((out / "health.json").read_text())["examples"] == examples


def test_a_padding_token_that_the_model_does_not_have_is_not_used(tmp_path):
    model = save(tmp_path / "m", "olmoe")
    beyond = tokenizer()
    beyond.add_special_tokens({"pad_token": "<new>"})
    beyond.save_pretrained(model)
    assert beyond.pad_token_id == 62  # of 0 … 61
    given = prepare(loading.load_any(str(model)), str(model), "text", ["w1", "w1 w2"], 2, 8)
    assert given.pad == 0
    assert next(iter(given))["input_ids"].tolist() == [[3, 0], [3, 4]]


def test_texts_are_cut_to_what_the_tokenizer_says_the_model_takes(tmp_path):
    model = save(tmp_path / "m", "olmoe")
    short = tokenizer()
    short.model_max_length = 3
    short.save_pretrained(model)
    texts = ["w1 w2 w3 w4 w5"]
    loaded = loading.load_any(str(model))
    assert [len(row) for row in prepare(loaded, str(model), "text", texts, 2, 8).examples] == [3]
    assert [len(row) for row in prepare(loaded, str(model), "text", texts, 2, 2).examples] == [2]


def test_a_missing_file_and_a_folder_without_a_model_are_one_sentence(moiety, tmp_path, lines):
    out = ["--out", tmp_path / "out"]
    assert (
        "no data file" in moiety("health", "--model", "x", "--data", tmp_path / "no.txt", *out)[2]
    )
    code, _, err = moiety("health", "--model", tmp_path, "--data", lines, *out)
    assert code == 2
    assert "there is no config.json in it" in err


def test_a_hub_id_offline_is_one_sentence(moiety, lines, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    given = ["--model", "nobody/nothing", "--data", lines, "--out", tmp_path / "out"]
    code, _, err = moiety("health", *given)
    assert code == 2
    assert "nobody/nothing: there is no such folder here, and from the hub:" in err
    assert err.count("moiety:") == 1


def test_weights_that_are_pickled_are_not_loaded(moiety, tmp_path, lines):
    model = save(tmp_path / "m", "mixtral")
    (model / "model.safetensors").unlink()
    torch.save({}, model / "pytorch_model.bin")
    code, _, err = moiety("health", "--model", model, "--data", lines, "--out", tmp_path / "out")
    assert code == 2
    assert "cannot be loaded" in err


def test_images_are_read(tmp_path):
    from moiety.hf.examples import image_batches, read

    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    np.save(tmp_path / "a.npy", images)
    np.savez(tmp_path / "a.npz", images=images, labels=np.zeros(5))
    for name in ("a.npy", "a.npz"):
        kind, rows = read(tmp_path / name, limit=4)
        assert kind == "images"
        assert np.array_equal(rows, images[:4])
    (batch,) = image_batches(rows, 8, processor=None, pixels=4)
    assert batch["pixel_values"].shape == (4, 3, 4, 4)
    assert batch["pixel_values"].abs().max() <= 1
    np.save(tmp_path / "b.npy", images.astype(float))
    with pytest.raises(ValueError, match=r"uint8 \[N, H, W, C\] or, grey ones, .* got float64"):
        read(tmp_path / "b.npy")


def test_only_classes_of_transformers_are_used(tmp_path):
    save(tmp_path / "m", "mixtral")
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(config | {"architectures": ["os"]}))
    assert type(loading.load_any(str(tmp_path / "m"))).__name__ == "MixtralModel"


def test_what_moiety_saved_is_loaded_by_moiety(tmp_path, monkeypatch):
    save(tmp_path / "m", "mixtral")
    config = json.loads((tmp_path / "m/config.json").read_text())
    config["quantization_config"] = {"quant_method": METHOD}
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    monkeypatch.setattr("moiety.hf.saving.load", lambda folder: ("ours", folder))
    assert loading.load_any(str(tmp_path / "m")) == ("ours", str(tmp_path / "m"))


def test_the_command_line_does_not_load_transformers():
    code = "import sys, moiety.cli; moiety.cli.build_app(); print('transformers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
