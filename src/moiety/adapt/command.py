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

import dataclasses
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import io
from ..cost import parameters
from ..data.named import NAMED
from ..moe import MoE
from .asked import DISTILLATION, PRETRAINING, TUNING, Asked
from .checking import write_check
from .classifier import Classifier
from .corpus import Corpus, read_corpus
from .course import Tick
from .encoders import Encoder
from .finetune import RATES as TUNE_RATES
from .finetune import Tuned, batch_size, finetune
from .folder import check_out, known_plan
from .labelled import Labelled, Reader, labelled_problem, read_labelled
from .pretrain import MATCHES, Adapted, further_pretrain, self_distill
from .reading import but_test, has_columns, is_one
from .recipe import BATCHES, RATES
from .rows import Rows
from .text import TextEncoder


@dataclass
class Opened:
    """Model and data, read."""

    encoder: Encoder
    corpus: Corpus | None  # none to fine-tune alone
    source: Corpus | None
    labelled: Labelled | None


def begin(asked: Asked, out: Path | None, device: Any = None) -> Opened:
    """Read everything; what does not fit, or a folder of another command, raises.

    Without `out` nothing is written.
    """
    plan = dataclasses.asdict(asked)
    if out is not None:
        check_out(asked, out)
    opened = open_all(asked, None if out is None else out / "pretraining")
    check_tuning(asked, opened)
    if device is not None:
        opened.encoder.to(device)
    if out is not None:
        io.sweep(out)
        if any(plan[name] != value for name, value in known_plan(out).items() if name in TUNING):
            shutil.rmtree(out / "fine-tuning", ignore_errors=True)
        io.write_json(out / "plan.json", plan)
    return opened


def check_tuning(asked: Asked, opened: Opened) -> None:
    """Raise now, not after the pre-training, for what fine-tuning would refuse."""
    if opened.labelled is None:
        return
    Classifier.build(opened.encoder, opened.labelled.classes)
    if asked.labels is not None:
        draw(opened.labelled, asked.labels, asked.seed)


def check_idle(asked: Asked, encoder: Encoder) -> None:
    """Raise for what this model or these data leave without effect."""
    if asked.warm_steps != Asked.warm_steps and not encoder.made:
        raise ValueError("--warm-steps goes with a model that lacks its head or decoder")
    if asked.fit and encoder.kind == "text":
        raise ValueError("--fit goes with images, and the model reads texts")
    if asked.length is not None and encoder.kind == "image":
        raise ValueError("--length goes with texts, and the model reads images")
    if asked.match_routing and not any(isinstance(p, MoE) for p in encoder.model.modules()):
        raise ValueError("--match-routing goes with a model with experts; see moiety upcycle")
    sources = [given for given in (asked.unlabelled, asked.source) if given is not None]
    if asked.data_dir is not None and not {*sources, asked.labelled} & NAMED.keys():
        raise ValueError("--data-dir goes with a built-in set, and there is none")
    if asked.labelled_text is not None and encoder.kind == "image":
        raise ValueError("--labelled-text goes with texts, and the model reads images")
    table = encoder.kind == "text" and asked.labelled is not None and asked.labelled not in NAMED
    if asked.labelled_text is not None and not table:
        raise ValueError("--labelled-text goes with a labelled table, and there is none")
    if asked.text is None or (table and asked.labelled_text is None):
        return
    if not any(has_columns(source, encoder.kind) for source in sources):
        named = "a table" if encoder.kind == "text" else "an .npz of images"
        raise ValueError(f"--text goes with {named}, and there is none")


def open_all(asked: Asked, folder: Path | None) -> Opened:
    """The model, and the data as it reads them."""
    encoder = Encoder.load(asked.model, seed=asked.seed)
    check_idle(asked, encoder)
    shape: dict[str, Any] = {"length": asked.length, "fit": asked.fit, "seed": asked.seed}
    shape["data_dir"] = asked.data_dir

    def corpus(source: Any, name: str) -> Corpus:
        at = None if folder is None else folder / name
        named = isinstance(source, str) and has_columns(source, encoder.kind)
        return read_corpus(
            source, encoder, column=asked.text if named else None, folder=at, **shape
        )

    unlabelled: Any = asked.unlabelled
    given: Any = asked.labelled
    labelled, note = None, ""
    if given is not None:
        text = asked.labelled_text or asked.text if encoder.kind == "text" else None
        if unlabelled is not None and is_one(unlabelled, given):
            if asked.labelled_text is not None:
                raise ValueError(
                    "--labelled-text goes with a labelled table of its own: --text names the "
                    "column of one that is both"
                )
            reader = Reader(encoder, asked.target, text, asked.length, asked.fit)
            path = Path(given).expanduser()
            given = labelled_problem(given, reader, asked.seed, asked.data_dir)
            unlabelled, note = but_test(given, path)
        labelled = read_labelled(given, encoder, targets=asked.target, text=text, **shape)
    found = None if unlabelled is None else corpus(unlabelled, "corpus")
    if found is not None and note:
        found.notes.insert(0, note)
    source = None if asked.source is None else corpus(asked.source, "source")
    return Opened(encoder, found, source, labelled)


def draw(labelled: Labelled, count: int | None, seed: int) -> Rows:
    """Some labelled training examples by the seed, at least one of each class; or all of them."""
    train = labelled.train
    if count is None:
        return train
    assert train.labels is not None
    classes = len(train.labels.unique())
    if not classes <= count <= len(train):
        raise ValueError(
            f"--labels must be from {classes}, one for each class, to {len(train)}, got {count}"
        )
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    first = {int((train.labels[order] == c).nonzero()[0]) for c in train.labels.unique()}
    rest = [place for place in range(len(order)) if place not in first]
    return train.part(order[sorted([*first, *rest[: count - classes]])])


def pretrain(
    asked: Asked, opened: Opened, out: Path, tick: Tick | None = None, **more: Any
) -> Adapted | None:
    """Further pre-training or self-distillation; a comparison has the first inside the second.

    None where only a classifier is wanted.
    """
    if asked.method == "fine-tune":
        return None
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
    """Fine-tune an encoder on labelled rows, as was asked for; the caller saves it."""
    return finetune(
        encoder,
        train,
        method=asked.tune,
        epochs=asked.epochs,
        batch=asked.tune_batch,
        lr=asked.tune_lr,
        precision=asked.precision,
        seed=seed,
        out=out,
        save_classifier=False,
        **more,
    )


def finish(
    asked: Asked,
    opened: Opened,
    adapted: Adapted | None,
    out: Path,
    tick: Tick | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Fine-tune where there are labels, write both models, and say how it went."""
    tuned, labelled = None, opened.labelled
    if adapted is not None:
        adapted.encoder.save(out / "adapted")
    if labelled is not None:
        tuned = tuned_from(
            asked,
            adapted.encoder if adapted else opened.encoder,
            labelled.train,
            asked.seed,
            out / "fine-tuning",
            validation=labelled.validation,
            test=None if labelled.read_test is None else labelled.test,
            checks=4,
            tick=None if tick is None else partial(tick, "fine-tuning"),
            scored=None if tick is None else lambda split, share: tick(f"scoring {split}", share),
            **more,
        )
        tuned.save(out / "classifier")
    check(adapted.encoder if adapted else None, tuned, opened, out)
    result = {**told(asked, opened, adapted), "tuned": None}
    if tuned is not None:
        result["tuned"] = {"scores": tuned.scores, "distance": tuned.distance}
        result["tuned"] |= {"steps": tuned.recipe.steps, "history": tuned.history}
    io.write_json(out / "result.json", result)
    return result


def check(encoder: Encoder | None, tuned: Tuned | None, opened: Opened, out: Path) -> None:
    """Write what the saved models say of some inputs."""
    if opened.corpus is not None:
        rows = opened.corpus.held
    else:
        assert opened.labelled is not None
        rows = opened.labelled.validation
    write_check(out / "check.safetensors", encoder, rows, tuned)


def told(asked: Asked, opened: Opened, adapted: Adapted | None) -> dict[str, Any]:
    """What is known of model, data and stages, as plain values; the same in every run."""
    stages = {
        stage.name: {
            "steps": stage.steps,
            "kept": stage.kept,
            "online": stage.online,
            "history": stage.history,
        }
        for stage in (adapted.stages if adapted else [])
    }
    return {
        "asked": dataclasses.asdict(asked),
        "used": used(asked, opened),
        "model": about_model(opened.encoder),
        "data": about_data(opened),
        "stages": stages,
        "flops": adapted.flops if adapted else {},
    }


def used(asked: Asked, opened: Opened) -> dict[str, Any]:
    """What was taken where nothing was asked for."""
    encoder, found = opened.encoder, dict[str, Any]()
    if opened.corpus is not None:
        found["batch"] = min(BATCHES[encoder.kind], len(opened.corpus.train))
        found["lr"] = RATES[encoder.kind]
        if asked.method != "further":
            found["match"] = MATCHES[encoder.kind]
    if isinstance(encoder, TextEncoder):
        found["length"] = encoder.row_length()
    if opened.labelled is not None:
        rows = asked.labels or len(opened.labelled.train)
        found["tune_batch"] = batch_size(encoder.kind, None, rows)
        found["tune_lr"] = TUNE_RATES[encoder.kind]
    return {name: value for name, value in found.items() if getattr(asked, name) is None}


def about_model(encoder: Encoder) -> dict[str, Any]:
    return {
        "kind": encoder.kind,
        "class": type(encoder.model).__name__,
        "parameters": parameters(encoder.model),
        "made": encoder.made,
    }


def about_data(opened: Opened) -> dict[str, Any]:
    corpus, source, labelled = opened.corpus, opened.source, opened.labelled
    return {
        "train": None if corpus is None else len(corpus.train),
        "held": None if corpus is None else len(corpus.held),
        "notes": [] if corpus is None else corpus.notes,
        "source": None if source is None else len(source.held),
        "labelled": None
        if labelled is None
        else {
            "train": len(labelled.train),
            "validation": len(labelled.validation),
            "classes": labelled.classes,
            "notes": labelled.notes,
            "test": labelled.read_test is not None,
        },
    }
