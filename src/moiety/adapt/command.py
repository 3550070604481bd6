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
from pathlib import Path
from typing import Any

import torch

from .. import io
from ..cost import parameters
from ..data.named import NAMED
from ..moe import MoE
from .asked import DISTILLATION, PRETRAINING, Asked
from .checking import write_check
from .classifier import Classifier
from .corpus import Corpus, read_corpus
from .course import Tick, settle
from .encoders import Encoder
from .finetune import RATES as TUNE_RATES
from .finetune import Tuned, batch_size, finetune
from .images import ImageEncoder
from .labelled import Labelled, read_labelled
from .pretrain import MATCHES, Adapted, further_pretrain, self_distill
from .reading import but_test, has_columns, is_one, problem_of, training_part
from .recipe import BATCHES, RATES
from .rows import Rows
from .text import TextEncoder
from .tuning import TuneRecipe


@dataclass
class Opened:
    """Model and data, read."""

    encoder: Encoder
    corpus: Corpus
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
    check_idle(asked, opened.encoder)
    if device is not None:
        opened.encoder.to(device)
    if out is not None:
        io.sweep(out)
        # As long as nothing is trained, a command that was refused can be put right.
        io.write_json(out / "plan.json", plan)
    return opened


def check_out(asked: Asked, out: Path) -> None:
    """Raise for a folder that is another command's, or that is read from."""
    here = out.expanduser().resolve()
    for given in (asked.model, asked.unlabelled, asked.labelled, asked.source):
        path = Path(given or "").expanduser()
        if given is None or given in NAMED or not path.exists():
            continue
        data = given != asked.model
        there = (training_part(path) if data else path).resolve()
        if here in (there, path.resolve()) or (data and there in here.parents):
            raise ValueError(f"--out {out} is where {given} is read from: choose another folder")
    check_ours(out)
    if (out / "pretraining" / "plan.json").exists():
        settle(out, dataclasses.asdict(asked))


def check_ours(out: Path) -> None:
    """Raise for a folder in which another program has files of the names that are written here."""
    plan = out / "plan.json"
    known = io.read_json(plan) if plan.exists() else {}
    if not (isinstance(known, dict) and ("unlabelled" in known or not plan.exists())):
        raise ValueError(f"{plan} is not of `moiety adapt`: choose another --out")
    if (out / "result.json").exists() and not known:
        raise ValueError(f"{out / 'result.json'} is not of `moiety adapt`: choose another --out")


def check_tuning(asked: Asked, opened: Opened) -> None:
    """Raise now, not after the pre-training, for what fine-tuning would refuse."""
    if opened.labelled is None:
        return
    Classifier.build(opened.encoder, opened.labelled.classes)
    lr = TUNE_RATES[opened.encoder.kind] if asked.tune_lr is None else asked.tune_lr
    try:
        TuneRecipe(steps=1, batch=1, lr=lr, method=asked.tune)
    except ValueError as error:
        raise ValueError(f"--tune-{error}") from None
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
    if asked.labelled_text is not None and encoder.kind == "image":
        raise ValueError("--labelled-text goes with texts, and the model reads images")
    tables = encoder.kind == "text" and asked.labelled is not None and asked.labelled_text is None
    if asked.text is None or tables:
        return  # labelled texts are a table
    sources = [asked.unlabelled, *([] if asked.source is None else [asked.source])]
    if not any(has_columns(source, encoder.kind) for source in sources):
        named = "a table" if encoder.kind == "text" else "an .npz of images"
        raise ValueError(f"--text goes with {named}, and there is none")


def open_all(asked: Asked, folder: Path | None) -> Opened:
    """The model, and the data as it reads them."""
    encoder = Encoder.load(asked.model, seed=asked.seed)
    if asked.fit and isinstance(encoder, ImageEncoder):
        encoder.processor.do_convert_rgb = encoder.shape[0] == 3  # of grey images, as we do here
    shape: dict[str, Any] = {"length": asked.length, "fit": asked.fit, "seed": asked.seed}
    shape["data_dir"] = asked.data_dir

    def corpus(source: Any, name: str) -> Corpus:
        at = None if folder is None else folder / name
        return read_corpus(source, encoder, column=asked.text, folder=at, **shape)

    unlabelled: Any = asked.unlabelled
    given: Any = asked.labelled
    labelled, note = None, ""
    if given is not None:
        text = asked.labelled_text or asked.text
        words = {"targets": asked.target, "text": text, "seed": asked.seed}
        if is_one(unlabelled, given):
            if asked.labelled_text is not None:
                raise ValueError(
                    "--labelled-text goes with a labelled table of its own: --text names the "
                    "column of one that is both"
                )
            path, given = Path(given).expanduser(), problem_of(given, asked.data_dir, **words)
            unlabelled, note = but_test(given, path)
        labelled = read_labelled(given, encoder, **{**words, **shape})
    found = corpus(unlabelled, "corpus")
    if note:
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
    first = [int((train.labels[order] == c).nonzero()[0]) for c in train.labels.unique()]
    rest = [place for place in range(len(order)) if place not in set(first)]
    return train.part(order[sorted([*first, *rest[: count - classes]])])


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
    encoder.save(out / "adapted")
    if tuned is not None:
        tuned.save(out / "classifier")
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
        "used": used(asked, opened),
        "model": about_model(opened.encoder),
        "data": about_data(opened),
        "stages": stages,
        "flops": adapted.flops,
    }


def used(asked: Asked, opened: Opened) -> dict[str, Any]:
    """What was taken where nothing was asked for."""
    encoder = opened.encoder
    found: dict[str, Any] = {"batch": BATCHES[encoder.kind], "lr": RATES[encoder.kind]}
    found["batch"] = min(found["batch"], len(opened.corpus.train))
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
            "notes": labelled.notes,
            "test": labelled.read_test is not None,
        },
    }
