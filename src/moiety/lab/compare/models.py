"""The model of an arm: a preset built for the data, or one of Hugging Face that is upcycled.

maker = find_maker(None, problem)                  # the preset for this kind of data
model = maker.build({"router": "top-k", "k": 2}, seed=0)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...data.problem import Kind, Problem
from ...models import ImageTransformer, TableNet, TextTransformer, feedforward, make_tokenizer
from ...train import seeded
from .task import Reader

LONGEST = 128  # tokens of a text
VOCABULARY = 100_000  # texts that a vocabulary is learned from, at most


@dataclass(frozen=True)
class Preset:
    """A small model for one kind of data, and what trains it well."""

    kind: Kind
    hidden: int  # width of the dense part; experts at work × their width is the same
    lr: float
    batch: int


PRESETS = {
    "vit-tiny": Preset("image", hidden=128, lr=3e-3, batch=64),
    "text-tiny": Preset("text", hidden=128, lr=3e-3, batch=32),
    "mlp": Preset("table", hidden=128, lr=2e-3, batch=256),
}


@dataclass(frozen=True)
class Maker:
    """Makes the model of any arm."""

    name: str
    build: Callable[[Mapping[str, Any], int], nn.Module]  # (settings of a trial, seed)
    lr: float
    batch: int
    reader: Reader | None  # of texts
    upcycled: bool
    about: str  # for the page


def find_maker(name: str | None, problem: Problem) -> Maker:
    """The maker of a preset, of the model in a folder or of a hub id."""
    name = name or next(n for n, preset in PRESETS.items() if preset.kind == problem.kind)
    if name in PRESETS:
        return _preset(name, PRESETS[name], problem)
    from .pretrained import pretrained_maker

    return pretrained_maker(name, problem)


def widths(problem: Problem) -> int:
    """The columns of an answer to all targets."""
    return sum(len(t.classes) if t.kind == "classes" else 1 for t in problem.targets)


def _preset(name: str, preset: Preset, problem: Problem) -> Maker:
    if preset.kind != problem.kind:
        fits = next(n for n, other in PRESETS.items() if other.kind == problem.kind)
        raise ValueError(
            f"{name} is for {preset.kind}s, and {problem.name} is {problem.kind} data: take the "
            f"model {fits}"
        )
    texts = problem.train.texts[:VOCABULARY]
    tokenizer = make_tokenizer(texts) if problem.kind == "text" else None
    outputs = widths(problem)

    def build(settings: Mapping[str, Any], seed: int) -> nn.Module:
        make = feedforward(
            settings["router"],
            hidden=preset.hidden,
            experts=settings["experts"],
            per_example=preset.kind != "table",
            **{"k": settings["k"], **settings.get("options", {})},
        )
        with seeded(seed):
            if problem.kind == "image":
                assert problem.shape is not None
                words: dict[str, Any] = {"mean": problem.mean, "std": problem.std}
                shape = problem.shape
                return ImageTransformer(shape=shape, outputs=outputs, feedforward=make, **words)
            if tokenizer is not None:
                size = tokenizer.get_vocab_size()
                words = {"length": LONGEST, "feedforward": make}
                return TextTransformer(vocabulary=size, outputs=outputs, **words)
            sizes = problem.cardinalities
            numbers = len(problem.numbers)
            return TableNet(numbers=numbers, cardinalities=sizes, outputs=outputs, feedforward=make)

    reader = None if tokenizer is None else read_with(tokenizer)
    about = (
        f"{name}, built for the data; experts at work × their width = {preset.hidden}, the width "
        "of the dense part"
    )
    return Maker(name, build, preset.lr, preset.batch, reader, upcycled=False, about=about)


def read_with(tokenizer: Any) -> Reader:
    """A reader by a tokenizer of the library `tokenizers`."""

    def read(texts: Sequence[str]) -> dict[str, Tensor]:
        tokenizer.enable_truncation(LONGEST)
        ids = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
        return padded(ids, 0)

    return read


def padded(ids: Sequence[Sequence[int]], pad: int) -> dict[str, Tensor]:
    """Token ids and mask as tables, filled up on the right."""
    longest = max((len(row) for row in ids), default=1)
    table = np.full((len(ids), longest), pad, dtype=np.int64)
    for row, own in enumerate(ids):
        table[row, : len(own)] = own
    lengths = torch.tensor([len(row) for row in ids])
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return {"input_ids": torch.from_numpy(table), "attention_mask": mask}
