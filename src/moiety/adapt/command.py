"""One adaptation from folders to a folder, as the command line runs it.

    asked = Asked(model="roberta/", unlabelled="papers.txt", labelled="citations/", steps=2000)
    with io.lease("out"):
        opened = begin(asked, Path("out"))
        adapted = pretrain(asked, opened, Path("out"))
        finish(asked, opened, adapted, Path("out"))

    plan.json           what was asked for; another command is refused in the same folder
    pretraining/        states of further pre-training and of each round (see `course`)
    fine-tuning/        state and scores of the fine-tuning
    adapted/            the masked model, for transformers
    classifier/         with labels, the classifier, for transformers
    check.safetensors   some inputs, and what both models say of them
    result.json         what was seen on the way, and the scores: written last

A call that was killed at any moment goes on when it is made again, to the same bits.
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import io
from ..cost import parameters
from .checking import write_check
from .corpus import Corpus, read_corpus
from .course import Tick, settle
from .encoders import Encoder
from .finetune import Tuned, finetune
from .labelled import Labelled, read_labelled
from .pretrain import Adapted, further_pretrain, self_distill

Way = Literal["self-distill", "further", "compare"]
PRETRAINING = ("steps", "batch", "lr", "checks", "stop", "patience", "precision", "warm_steps")
DISTILLATION = (
    *("rounds", "match", "mae_weight", "distill_weight", "distill_every", "match_routing"),
    *("cache", "cache_limit"),
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is wanted: the words of `moiety adapt`, and what decides the bits of its result."""

    model: str
    unlabelled: str
    labelled: str | None = None
    source: str | None = None
    method: Way = "self-distill"
    # pre-training
    steps: int = 2000
    batch: int | None = None
    lr: float | None = None
    checks: int = 8
    stop: Literal["probe"] | None = None
    patience: int = 3
    precision: Literal["float32", "bfloat16"] = "float32"
    warm_steps: int = 500
    # self-distillation
    rounds: int = 1
    match: Literal["hidden", "cls", "prediction", "weights"] | None = None
    mae_weight: float = 1.0
    distill_weight: float = 1.0
    distill_every: int = 1
    match_routing: float = 0.0
    cache: bool = True
    cache_limit: int | None = None
    # fine-tuning
    tune: Literal["plain", "recadam", "mars", "r3f"] = "plain"
    epochs: int = 10
    tune_batch: int | None = None
    tune_lr: float | None = None
    # reading
    text: str | None = None
    target: str | None = None
    length: int | None = None
    fit: bool = False
    data_dir: str | None = None
    # of a comparison alone
    seeds: int = 5
    labels: int | None = None
    metric: Literal["accuracy", "macro_f1"] = "accuracy"
    margin: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if self.labelled is None and self.stop == "probe":
            raise ValueError("--stop probe needs --labelled, whose training split it probes on")
        if self.labelled is None and self.method == "compare":
            raise ValueError("--method compare needs --labelled, to fine-tune on and to score")
        if self.method == "compare" and self.seeds < 5:
            raise ValueError(f"--seeds must be at least 5 to compare, got {self.seeds}")

    def words(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


@dataclass
class Opened:
    """Model and data, read."""

    encoder: Encoder
    corpus: Corpus
    source: Corpus | None
    labelled: Labelled | None
    processor: Any  # as it was saved: a tokenizer keeps settings of its last call


def begin(asked: Asked, out: Path | None, device: Any = None) -> Opened:
    """Read everything; what does not fit, or a folder of another command, raises.

    Without `out` nothing is written.
    """
    plan = dataclasses.asdict(asked)
    if out is not None and (out / "plan.json").exists():
        settle(out, plan)
    opened = open_all(asked, None if out is None else out / "pretraining")
    if device is not None:
        opened.encoder.to(device)
    if out is not None:
        for left in out.glob(".*.tmp"):  # by a process that was killed
            left.unlink()
        settle(out, plan)  # not before: a command that was refused can be put right
    return opened


def open_all(asked: Asked, folder: Path | None) -> Opened:
    """The model, and the data as it reads them."""
    encoder = Encoder.load(asked.model, seed=asked.seed)
    processor = copy.deepcopy(encoder.processor)
    shape: dict[str, Any] = {"length": asked.length, "fit": asked.fit, "seed": asked.seed}
    shape["data_dir"] = asked.data_dir

    def corpus(source: str, name: str) -> Corpus:
        at = None if folder is None else folder / name
        return read_corpus(source, encoder, column=asked.text, folder=at, **shape)

    labelled = None
    if asked.labelled is not None:
        words = {"targets": asked.target, "text": asked.text, **shape}
        labelled = read_labelled(asked.labelled, encoder, **words)
    source = None if asked.source is None else corpus(asked.source, "source")
    return Opened(encoder, corpus(asked.unlabelled, "corpus"), source, labelled, processor)


def pretrain(
    asked: Asked, opened: Opened, out: Path, tick: Tick | None = None, **more: Any
) -> Adapted:
    """Further pre-training or self-distillation; a comparison has the first inside the second."""
    words = {**asked.words(PRETRAINING), "seed": asked.seed, "out": out / "pretraining", **more}
    words |= {"source": opened.source, "labelled": opened.labelled}
    if tick is not None:
        words["tick"] = tick
    if asked.method == "further":
        return further_pretrain(opened.encoder, opened.corpus, **words)
    return self_distill(opened.encoder, opened.corpus, **words, **asked.words(DISTILLATION))


def tuned_from(
    asked: Asked, encoder: Encoder, train: Any, seed: int, out: Path, **more: Any
) -> Tuned:
    """Fine-tune an encoder on labelled rows, as was asked for."""
    tuned = finetune(
        encoder,
        train,
        method=asked.tune,
        epochs=asked.epochs,
        batch=asked.tune_batch,
        lr=asked.tune_lr,
        precision=asked.precision,
        seed=seed,
        out=out,
        **more,
    )
    shutil.rmtree(out / "classifier", ignore_errors=True)  # `save` writes it where it belongs
    return tuned


def finish(
    asked: Asked,
    opened: Opened,
    adapted: Adapted,
    out: Path,
    tick: Tick | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Fine-tune where there are labels, write both models, and say how it went."""
    tuned, labelled = None, opened.labelled
    if labelled is not None:
        tuned = tuned_from(
            asked,
            adapted.encoder,
            labelled.train,
            asked.seed,
            out / "fine-tuning",
            validation=labelled.validation,
            test=None if labelled.read_test is None else labelled.test,
            checks=4,
            tick=None if tick is None else lambda share: tick("fine-tuning", share),
            **more,
        )
    save(adapted.encoder, tuned, opened, out)
    result = {**told(asked, opened, adapted), "tuned": None}
    if tuned is not None:
        result["tuned"] = {"scores": tuned.scores, "distance": tuned.distance}
        result["tuned"] |= {"steps": tuned.recipe.steps, "history": tuned.history}
    io.write_json(out / "result.json", result)
    return result


def save(encoder: Encoder, tuned: Tuned | None, opened: Opened, out: Path) -> None:
    """Write the models as transformers loads them, and what they say of some inputs."""
    kept = encoder.copy()
    kept.processor = opened.processor
    kept.save(out / "adapted")
    if tuned is not None:
        dataclasses.replace(tuned.classifier, encoder=kept).save(out / "classifier")
    write_check(out / "check.safetensors", encoder, opened.corpus.held, tuned)


def told(asked: Asked, opened: Opened, adapted: Adapted) -> dict[str, Any]:
    """What is known of model, data and stages, as plain values; the same in every run."""
    stages = {
        stage.name: {
            "steps": stage.steps,
            "kept": stage.kept,
            "online": stage.online,
            "history": stage.history,
        }
        for stage in adapted.stages
    }
    return {
        "asked": dataclasses.asdict(asked),
        "model": about_model(opened.encoder),
        "data": about_data(opened),
        "stages": stages,
        "flops": adapted.flops,
    }


def about_model(encoder: Encoder) -> dict[str, Any]:
    return {
        "kind": encoder.kind,
        "class": type(encoder.model).__name__,
        "parameters": parameters(encoder.model),
        "made": encoder.made,
    }


def about_data(opened: Opened) -> dict[str, Any]:
    labelled = opened.labelled
    return {
        "train": len(opened.corpus.train),
        "held": len(opened.corpus.held),
        "notes": opened.corpus.notes,
        "source": None if opened.source is None else len(opened.source.held),
        "labelled": None
        if labelled is None
        else {
            "train": len(labelled.train),
            "validation": len(labelled.validation),
            "classes": labelled.classes,
            "test": labelled.read_test is not None,
        },
    }
