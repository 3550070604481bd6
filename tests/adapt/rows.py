"""Rows of tiny data, and encoders that read them."""

import tiny
import torch

import moiety
from moiety.adapt.encoders import Encoder


class Rows:
    """Examples by number, with labels or without."""

    def __init__(self, items, labels=None):
        self.items, self.labels = items, labels

    def __len__(self):
        return len(self.items)

    def take(self, rows):
        if torch.is_tensor(self.items):
            return self.items[rows]
        return [self.items[i] for i in rows.tolist()]


def encoder(kind, **more):
    """A tiny ViT-MAE or RoBERTa; RoBERTa has dropout."""
    if kind == "image":
        return Encoder.load(tiny.vit_mae(**more))
    return Encoder.load(tiny.FAMILIES["roberta"](), processor=tiny.tokenizer())


def upcycled(kind, balance=0.1):
    """The same with experts."""
    made = encoder(kind)
    words = {"experts": 3, "router": "top-k", "k": 2, "balance": {"switch": balance}}
    made.model = moiety.upcycle(made.model, **words)
    return made


def rows(kind, count=24, seed=0):
    """Unlabelled rows."""
    return Rows(
        tiny.pictures(count, seed=seed) if kind == "image" else tiny.texts(count, seed=seed)
    )


def labelled(kind, count=16, seed=1):
    """Rows of two classes."""
    return Rows(rows(kind, count, seed).items, torch.arange(count) % 2)


def drawn(encoder, data, count=6):
    """A batch and masks for it."""
    batch = encoder.batch(data.take(torch.arange(count)))
    return batch, encoder.mask(batch, torch.Generator().manual_seed(0))


def same(one, two):
    """Whether two states are equal to the bit."""
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def moved(encoder, by=0.05, seed=3):
    """A copy with other weights."""
    other, draw = encoder.copy(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.model.parameters():
            if parameter.requires_grad:
                parameter += by * torch.randn(parameter.shape, generator=draw)
    return other
