"""What an adaptation is given, opened: the model, the data, the settings, and the folder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import nn

from .. import io
from .corpus import read_corpus
from .course import Course, Tick
from .encoders import Encoder
from .follow import Follow
from .labelled import Labelled, read_labelled
from .loading import open_encoder
from .lora import check_adaptable
from .recipe import BATCHES, RATES, WARM_STEPS, Recipe
from .rows import are_rows
from .together import Member

Source = str | os.PathLike[str] | nn.Module | Encoder


class Options(TypedDict, total=False):
    """What further pre-training and self-distillation have in common, besides their arguments."""

    held: Any  # held-out rows whose masked loss is followed; None: those of the corpus
    source: Any  # the domain before, given as the data are: what is forgotten
    labelled: Any  # labelled rows, `Labelled` or its source: its training split is probed on
    checks: int  # looks at the model on the way (8), besides the one before the first step
    stop: Literal["probe"] | None  # every stage keeps the check with the best probe
    patience: int  # and end after so many worse ones (3)
    precision: Literal["float32", "bfloat16"]  # of products
    lora: int | None  # rank of adapters (peft) that are trained instead of the trunk's weights
    processor: Any  # tokenizer or image processor of a model in memory
    device: str | torch.device  # None: where the model is
    warm_steps: int  # of a head or decoder that the model lacks (500)
    save_every: float  # seconds between states on the disk (30)
    capture: bool  # on a GPU, repeat a step as one CUDA graph; it rounds a little differently
    crew: Member  # its place among trainings that take their steps together (see `together`)
    tick: Tick  # hears the name of the stage and the share that is done


@contextlib.contextmanager
def holding(out: str | os.PathLike[str] | None) -> Iterator[None]:
    """Be the only one who works in a folder, if there is one."""
    if out is None:
        yield
        return
    with io.lease(out):
        io.sweep(out)
        yield


def open_course(
    model: Source, data: Any, seed: int, out: str | os.PathLike[str] | None, options: Options
) -> Course:
    """The model and the data, opened."""
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        known = ", ".join(Options.__annotations__)
        raise TypeError(f"there is no option {', '.join(unknown)}; there are {known}")
    encoder = open_encoder(model, options.get("processor"), seed)
    if isinstance(model, Encoder | nn.Module):
        encoder = encoder.copy()
    if options.get("device") is not None:
        encoder = encoder.to(options["device"])
    folder = None if out is None else Path(out)
    rows, held = _rows(data, encoder, seed, folder and folder / "corpus")
    if not len(rows):
        raise ValueError("the data hold no example to train on")
    held = held if options.get("held") is None else options["held"]
    source = labelled = None
    if options.get("source") is not None:
        before, part = _rows(options["source"], encoder, seed, folder and folder / "source")
        source = before if part is None else part
    if options.get("labelled") is not None:
        labelled = _labelled(options["labelled"], encoder, seed)
    return Course(
        encoder=encoder,
        rows=rows,
        seed=seed,
        follow=Follow(held, source, labelled, seed=seed),
        out=folder,
        warm_steps=options.get("warm_steps", WARM_STEPS),
        save_every=options.get("save_every", 30.0),
        tick=options.get("tick"),
        capture=options.get("capture", False),
        crew=options.get("crew"),
    )


def _rows(data: Any, encoder: Encoder, seed: int, folder: Path | None) -> tuple[Any, Any]:
    """Rows to train on and rows held out; plain rows have no such part."""
    if are_rows(data):
        encoder.check_reads(data)
        return data, None
    corpus = read_corpus(data, encoder, seed=seed, folder=folder)
    encoder.check_reads(corpus.train)
    return corpus.train, corpus.held


def _labelled(data: Any, encoder: Encoder, seed: int) -> Any:
    """The labelled training split."""
    if not are_rows(data):
        data = data if isinstance(data, Labelled) else read_labelled(data, encoder, seed=seed)
        data = data.train
    encoder.check_reads(data)
    return data


def open_recipe(encoder: Encoder, words: dict[str, Any], options: Options) -> Recipe:
    """The recipe, with the paper's numbers where none are given."""
    named = {field.name for field in dataclasses.fields(Recipe)} & set(options)
    words = {**words, **{name: options[name] for name in named}}  # type: ignore[literal-required]
    if words["batch"] is None:
        words["batch"] = BATCHES[encoder.kind]
    if words["lr"] is None:
        words["lr"] = RATES[encoder.kind]
    recipe = Recipe(**words)
    if recipe.stop == "probe" and options.get("labelled") is None:
        raise ValueError('stop="probe" needs labelled training examples to probe on')
    if recipe.lora is not None:
        check_adaptable(encoder)
    return recipe
