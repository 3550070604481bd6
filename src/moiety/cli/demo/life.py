"""The life of one model in the demo: it gets experts, meets a stream, and moves to a new domain.

    lived = run(train, test, epochs=10, seed=0, device=device)
    lived.model, lived.test                  # what the audit attacks

A tiny ViT-MAE learns what digits look like, without labels; `moiety.upcycle` gives it experts; it
learns the labels from a stream (`stream.py`); then the digits arrive turned by a quarter, with few
labels, and `moiety.adapt` carries it there. What it is then is attacked (`attacked.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ...report import Column, TablePart
from . import stream

CLASSES = [str(digit) for digit in range(10)]
SHAPE: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 1,
    "mask_ratio": 0.5,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "decoder_hidden_size": 32,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 4,
    "intermediate_size": 64,
    "decoder_intermediate_size": 64,
    "initializer_range": 0.1,
}
EXPERTS, K, LABELS = 4, 2, 100
LR, ADAPT_LR, BATCH, TUNE_BATCH = 3e-3, 1e-3, 64, 20
FIRST, ADAPT, TUNE = 30, 15, 10  # steps for one pass of the routers' demo

UPCYCLED = TablePart(
    title="The life of one model: experts",
    summary=f"A small ViT-MAE has learnt, without labels, to fill in hidden patches of the digits. "
    f"moiety.upcycle gives each of its blocks {EXPERTS} experts, copies of what was there, and "
    f"{K} of them work for a patch. Nothing that it says has changed:",
    columns=[
        Column("arm", "Model"),
        Column("parameters", "Parameters", ",d"),
        Column("active", "Active for a patch", ",d"),
        Column("gap", "Change of its output", ".1g"),
    ],
    notes={"Change of its output": "relative, the largest one, measured: rounding"},
)
ADAPTED = TablePart(
    title="The same model in a new domain",
    summary=f"Now the digits come turned by a quarter: many without labels, {LABELS} with. Three "
    "ways to the new domain start from the model that the stream has left.",
    columns=[
        Column("arm", "Way"),
        Column("new", "Turned digits", ".1%"),
        Column("old", "Upright digits", ".1%"),
        Column("distance", "Distance", ".2f"),
    ],
    notes={
        "Turned digits": "accuracy on turned test images; one seed, and settings that were tried "
        "out on them: no verdict (moiety adapt --method compare gives one)",
        "Upright digits": "accuracy on the test images of before: what is forgotten",
        "Distance": "l2, of the encoder's weights from those that the stream has left",
    },
)


class Reader(nn.Module):
    """A classifier of transformers that reads pixels in 0…1, as rows or as images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(pixel_values=scaled(x.view(-1, 1, 8, 8))).logits


@dataclass
class Lived:
    """What came of it: parts of the page, the last model, and images to attack it with."""

    upcycled: TablePart
    arrived: stream.Found
    adapted: TablePart
    model: nn.Module
    test: TensorDataset


def run(
    train: TensorDataset,
    test: TensorDataset,
    epochs: int,
    seed: int,
    device: torch.device,
    console: Console | None = None,
) -> Lived:
    """One life, from its first weights to a classifier in a new domain."""
    train, test, console = upright(train), upright(test), console or Console()
    with console.status("a ViT-MAE, which gets experts"):
        encoder, upcycled = begin(train, epochs, seed, device)
    from ...adapt.classifier import Classifier

    def start(_: int) -> nn.Module:
        return Reader(Classifier.build(encoder, CLASSES, seed=seed).model)

    arrived = stream.run(start, train, test, epochs, seed, device, console)
    assert isinstance(arrived.model, Reader)
    learnt: Any = arrived.model.model
    encoder.trunk.load_state_dict(learnt.base_model.state_dict())
    with console.status("the same model, adapted to turned digits"):
        rows, last = adapt(encoder, learnt, train, test, epochs, seed)
    return Lived(upcycled, arrived, ADAPTED.with_rows(rows), Reader(last), turned(test))


def begin(train: TensorDataset, epochs: int, seed: int, device: torch.device) -> tuple[Any, Any]:
    """A masked model with experts, and what giving them changed."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    from ...adapt import Encoder, further_pretrain, place_patches
    from ...hf import receipt, upcycle
    from ...train import seeded

    with seeded(seed):
        model = ViTMAEForPreTraining(ViTMAEConfig(**SHAPE))
        place_patches(model)
        encoder = Encoder.load(model).to(device)
        how: dict[str, Any] = {"batch": BATCH, "lr": LR, "checks": 1, "seed": seed}
        encoder = further_pretrain(encoder, rows(train), steps=FIRST * epochs, **how).encoder
        encoder.model = upcycle(
            encoder.model, experts=EXPERTS, router="top-k", k=K, balance={"switch": 0.01}
        )
    found = receipt(encoder.model)
    table: list[dict[str, Any]] = [
        {"arm": "dense", "parameters": found.parameters_before, "active": found.active_before},
        {"arm": "upcycled", "parameters": found.parameters_after, "active": found.active_after},
    ]
    table[1]["gap"] = found.gap
    return encoder, UPCYCLED.with_rows(table)


def adapt(
    encoder: Any,
    learnt: nn.Module,
    train: TensorDataset,
    test: TensorDataset,
    epochs: int,
    seed: int,
) -> tuple[list[dict[str, Any]], nn.Module]:
    """A row for the model as it is and for each way, and the classifier of the last way."""
    from ...adapt import finetune, self_distill

    new, steps = turned(train), ADAPT * epochs
    adapted = self_distill(
        encoder, rows(new), steps=steps, batch=BATCH, lr=ADAPT_LR, checks=1, seed=seed
    )
    first = adapted.encoder.copy()
    first.model.load_state_dict(adapted.stages[0].state)
    ways = {
        "fine-tuned": encoder,
        "further pre-trained, fine-tuned": first,
        "self-distilled, fine-tuned": adapted.encoder,
    }
    few = TensorDataset(*(t[:LABELS] for t in new.tensors))
    table = [{"arm": "after the stream", **scores(learnt, test), "distance": 0.0}]
    for name, start in ways.items():
        how: dict[str, Any] = {"steps": TUNE * epochs, "batch": TUNE_BATCH, "lr": LR, "seed": seed}
        tuned = finetune(start, rows(few), classes=CLASSES, **how)
        away = tuned.classifier.distance(encoder)
        table.append({"arm": name, **scores(tuned.classifier.model, test), "distance": away})
    return table, tuned.classifier.model


@torch.no_grad()
def scores(model: nn.Module, test: TensorDataset) -> dict[str, float]:
    """Accuracy on turned and on upright test images."""
    reader = Reader(model).eval()
    device = next(model.parameters()).device
    found = {}
    for name, data in (("new", turned(test)), ("old", test)):
        x, y = (t.to(device) for t in data.tensors)
        found[name] = float((reader(x).argmax(1) == y).double().mean())
    return found


# -- images ----------------------------------------------------------------------------------------


def upright(data: TensorDataset) -> TensorDataset:
    """Sequences of 4 × 4 patches as images [N, 1, 8, 8]."""
    x, y = data.tensors
    return TensorDataset(x.view(-1, 4, 4, 2, 2).transpose(2, 3).reshape(-1, 1, 8, 8), y)


def turned(data: TensorDataset) -> TensorDataset:
    """The same by a quarter."""
    x, y = data.tensors
    return TensorDataset(x.rot90(1, (-2, -1)), y)


def scaled(x: Tensor) -> Tensor:
    """Pixels around 0, as models like them."""
    return 2 * x - 1


def rows(data: TensorDataset) -> Any:
    """As `moiety.adapt` takes them."""
    from ...adapt.rows import Images, Rows

    x, y = data.tensors
    return Rows(Images(scaled(x)), None, y, CLASSES)
