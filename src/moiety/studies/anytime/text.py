"""The text of the language studies: mega-batches of film reviews in tokens, and one to test on.

    corpus = corpus_of(settings, device)
    corpus.batches[0].train.x                    # [sequences, length], of the first mega-batch
    corpus.test                                  # of the mega-batch that nobody trains on

Whole reviews in a seeded order are cut into equal mega-batches, the last of which is the test; of
each of the others the last tenth is for validation. Byte pairs are learned from the first one only,
since a learner knows no other when it begins. A mega-batch is cut short after so many sequences, to
fit the time, and measuring takes the first ones of validation and test.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

import torch

from ...anytime.data import Batch, Examples, shuffled, token_blocks
from ...lab.study import Settings
from ..cosine.language import made_up, reviews

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

SEED = 432  # of the order of the reviews, as the paper's of its images
HELD = 0.1  # of a mega-batch, for validation
END = "[END]"  # of a review
CHUNK = 500  # reviews that are encoded at a time


@dataclass(frozen=True, eq=False)
class Corpus:
    """What a learner of language meets; every seed the same."""

    batches: tuple[Batch, ...]
    test: Examples
    vocabulary: int

    def joined(self, count: int, number: int = 1) -> Batch:
        """The first mega-batches as one, of some number: what i.i.d. training sees."""
        parts = self.batches[:count]
        train = Examples.join([part.train for part in parts])
        validation = Examples.join([part.validation for part in parts])
        return Batch(number, f"the first {count}", train, validation)


def corpus_of(settings: Settings, device: torch.device) -> Corpus:
    """The corpus of a scale, on a device."""
    words = ("text", "batches", "vocabulary", "length", "sequences", "validation", "test")
    return _corpus(*(settings[word] for word in words), device)


@lru_cache(maxsize=1)  # a worker runs trial after trial of one scale
def _corpus(
    source: str,
    count: int,
    vocabulary: int,
    length: int,
    sequences: int,
    validation: int,
    test: int,
    device: torch.device,
) -> Corpus:
    lines = made_up() if source == "made up" else reviews()
    texts = [line.decode().rstrip("\n") for line in lines]
    order = shuffled(len(texts), SEED, 0).tensor_split(count + 1)
    parts = [[texts[row] for row in rows.tolist()] for rows in order]
    tokenizer = byte_pairs(parts[0], vocabulary)

    def cut(part: Sequence[str], most: int) -> Examples:
        return blocks(tokenizer, part, length, most).to(device)

    batches = []
    for number, part in enumerate(parts[:-1], start=1):
        held = len(part) - round(HELD * len(part))
        train, checked = cut(part[:held], sequences), cut(part[held:], validation)
        batches.append(Batch(number, f"part {number} of {count}", train, checked))
    return Corpus(tuple(batches), cut(parts[-1], test), tokenizer.get_vocab_size())


def byte_pairs(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Learn byte pairs from these texts; every other text can be spelled with them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def blocks(tokenizer: Tokenizer, texts: Sequence[str], length: int, most: int) -> Examples:
    """So many sequences of the texts, one text after the other, each with a token at its end."""
    end, wanted = tokenizer.get_vocab()[END], most * length + 1
    tokens: list[int] = []
    for start in range(0, len(texts), CHUNK):  # what is not wanted need not be encoded
        encoded = tokenizer.encode_batch_fast(texts[start : start + CHUNK])
        tokens += chain.from_iterable([*one.ids, end] for one in encoded)
        if len(tokens) >= wanted:
            return token_blocks(tokens[:wanted], length)
    raise ValueError(
        f"{len(texts)} texts have {len(tokens)} tokens, too few for {most} sequences of {length}: "
        "ask for fewer"
    )
