"""What `moiety adapt` is given in tests: tiny saved models, texts, labelled tables, images."""

import random

import numpy as np
import tiny
import torch
from PIL import Image

from moiety import cli


def run(*arguments):
    """Run `moiety adapt …` and return its exit code."""
    try:
        cli.main(["adapt", *map(str, arguments)])
    except SystemExit as ended:
        return ended.code


def roberta(folder, trunk=False, words=tiny.WORDS):
    """Save a tiny RoBERTa with its tokenizer; with `trunk` its head is missing."""
    torch.manual_seed(0)
    model = tiny.FAMILIES["roberta"]()
    (model.base_model if trunk else model).save_pretrained(folder)
    tiny.tokenizer(words).save_pretrained(folder)
    return folder


def vit_mae(folder, **more):
    torch.manual_seed(0)
    tiny.vit_mae(**more).save_pretrained(folder)
    return folder


def line(draw, kind):
    """Some words, most of them of one half of the vocabulary."""
    return " ".join(tiny.WORDS[draw.randrange(20) + 20 * kind] for _ in range(draw.randint(5, 9)))


def texts(path, count=60):
    draw = random.Random(0)
    path.write_text("\n".join(line(draw, draw.randrange(2)) for _ in range(count)) + "\n")
    return path


def tables(folder, **sizes):
    """train.csv, dev.csv and test.csv of two classes, or others with their sizes."""
    folder.mkdir()
    draw = random.Random(1)
    for split, count in (sizes or {"train": 16, "dev": 8, "test": 12}).items():
        rows = [f"{line(draw, i % 2)},{['cat', 'dog'][i % 2]}\n" for i in range(count)]
        (folder / f"{split}.csv").write_text("text,label\n" + "".join(rows))
    return folder


def images(folder, size=12, channels=3, count=20, seed=0):
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    shape = (size, size, channels) if channels == 3 else (size, size)
    for i in range(count):
        pixels = draw.integers(0, 256, shape).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return folder
