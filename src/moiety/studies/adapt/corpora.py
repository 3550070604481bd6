"""What the source models read: photographs, and film reviews in byte pairs learned from them.

    corpus = corpus_of("image", {"data": "cifar10", "side": 32, "train": None})
    corpus.train                    # uint8 [N, 3, side, side], or token ids [N, length]
    corpus.held                     # what no source was trained on, to measure forgetting by
    corpus.processor                # what is saved with a model: image processor or tokenizer

Byte pairs are learned once for all sources of a scale, from the reviews that are trained on, and
kept with the tokens:

    folder()/tokens-<key>/tokenizer.json, train.npy, held.npy, about.json (last)
"""

from __future__ import annotations

import hashlib
import io as streams
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ... import io
from ...data.load import load_problem
from ...data.named import NAMED, cache, find, load_texts
from .targets import made_up_texts, resized

Kind = Literal["image", "text"]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]  # RoBERTa's, ids 0 to 4
HELD, LEAST = 0.02, 16  # share and number of the texts that are held out
PICTURES = 2000  # test images that a source is checked on
CHUNK = 1000  # texts that are encoded at a time
TOKENS = 1  # the recipe of tokens; a change of the code that makes other ones adds one


@dataclass(frozen=True, eq=False)
class Corpus:
    """What sources are trained on, and what is held out, as they were before any model."""

    train: Tensor
    held: Tensor
    processor: Any


def folder() -> Path:
    """Where sources and their tokens lie: $MOIETY_MODELS, or the user's cache."""
    return Path(os.environ.get("MOIETY_MODELS") or cache() / "adapt-sources").expanduser()


def named_by(words: str, asked: Mapping[str, Any]) -> Path:
    """A folder by some words to read, and a hash of all that its content depends on."""
    text = json.dumps(asked, sort_keys=True)
    return folder() / f"{words}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def checksums(data: str) -> list[str]:
    """Which files of a set are here, since some sets may be here in part."""
    found = find(data) if data in NAMED else None
    return [] if found is None else [sum for file in found.layout.files for sum in file.sums]


def corpus_of(kind: Kind, settings: Mapping[str, Any]) -> Corpus:
    """The corpus of the sources of a scale."""
    if kind == "image":
        return _images(settings["data"], settings["side"], settings["train"])
    return _texts(settings["data"], settings["vocabulary"], settings["length"], settings["train"])


@lru_cache(maxsize=1)  # all sources of a kind read the same
def _images(data: str, side: int, train: int | None) -> Corpus:
    """Images without their classes; the held out ones are of the test split."""
    from transformers import ViTImageProcessor

    problem = load_problem(data)
    both = [split.inputs["images"] for split in (problem.train, problem.validation)]
    images = resized(torch.cat(both)[:train], 3, side)
    pixels = images.float() / 255
    mean, std = (
        [round(float(v), 4) for v in f(pixels, (0, 2, 3))] for f in (torch.mean, torch.std)
    )
    size = {"height": side, "width": side}
    processor = ViTImageProcessor(size=size, image_mean=mean, image_std=std)
    return Corpus(images, resized(problem.test.inputs["images"][:PICTURES], 3, side), processor)


# -- texts ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _texts(data: str, vocabulary: int, length: int, train: int | None) -> Corpus:
    """Rows of tokens, made now or found; who wants them at the same time waits."""
    asked = {"data": data, "files": checksums(data), "vocabulary": vocabulary, "length": length}
    home = named_by("tokens", {**asked, "train": train, "recipe": TOKENS})
    if not (home / "about.json").exists():
        with io.lease(home, wait=math.inf):
            if not (home / "about.json").exists():
                _make_tokens(home, asked, train)
    tokenizer = wrapped((home / "tokenizer.json").read_text(), length)
    train_rows, held = (torch.from_numpy(np.load(home / f"{n}.npy")) for n in ("train", "held"))
    return Corpus(train_rows, held, tokenizer)


def _make_tokens(home: Path, asked: Mapping[str, Any], train: int | None) -> None:
    data, length = asked["data"], asked["length"]
    texts = made_up_texts() if data == "made up" else load_texts(data)
    held = max(round(HELD * len(texts)), LEAST)
    parts = {"train": texts[:-held][:train], "held": texts[-held:]}
    plain = learned(parts["train"], asked["vocabulary"])
    io.write_atomic(home / "tokenizer.json", plain.to_str())
    for name, part in parts.items():
        stream = streams.BytesIO()
        np.save(stream, packed(plain, part, length), allow_pickle=False)
        io.write_atomic(home / f"{name}.npy", stream.getvalue())
    io.write_json(home / "about.json", asked)


def learned(texts: Sequence[str], vocabulary: int) -> Any:
    """Byte pairs of these texts, as a tokenizer that puts a text between <s> and </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    frame = [(word, SPECIAL.index(word)) for word in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=frame
    )
    return made


def wrapped(text: str, length: int) -> Any:
    """The tokenizer of a tokenizer.json, as transformers saves and loads it."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    names = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), SPECIAL))
    names |= {"bos_token": names["cls_token"], "eos_token": names["sep_token"]}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text), model_max_length=length, **names
    )


def packed(tokenizer: Any, texts: Sequence[str], length: int) -> np.ndarray:
    """Whole rows of tokens, int16 [N, length]: one text after the other, </s> between, cut."""
    if tokenizer.get_vocab_size() > np.iinfo(np.int16).max:
        raise ValueError(f"a vocabulary of {tokenizer.get_vocab_size()} does not fit into int16")
    first, last = SPECIAL.index("<s>"), SPECIAL.index("</s>")
    parts: list[np.ndarray] = []
    for start in range(0, len(texts), CHUNK):
        chunk = texts[start : start + CHUNK]
        encoded = tokenizer.encode_batch_fast(chunk, add_special_tokens=False)
        parts += [np.array([*one.ids, last], dtype=np.int16) for one in encoded]
    line = np.concatenate(parts)
    count = len(line) // (length - 2)
    inside = line[: count * (length - 2)].reshape(count, length - 2)
    return np.pad(inside, ((0, 0), (1, 1)), constant_values=((0, 0), (first, last)))
