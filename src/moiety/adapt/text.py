"""Masked language models: every class behind `AutoModelForMaskedLM` that reads tokens."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ..train import seeded
from .encoders import MASK, PLACES, Batch, Encoder, Masked, Represented
from .masks import RATE, mean_over_masked, token_mask

LENGTH = 128  # tokens of a row where nothing else is said
ENDLESS = 10**6  # tokens
SPARE = 128  # embeddings without a token, in the smallest of vocabularies
ROUND = 32  # tokens
NONE = -100  # the target that cross_entropy leaves out


class TextEncoder(Encoder):
    """A masked language model with its tokenizer. Padding is on the right."""

    kind = "text"

    def __init__(self, model: Any, processor: Any, made: Sequence[str] = ()) -> None:
        super().__init__(model, processor, made)
        check_tokenizer(model, processor)
        self.longest = longest_input(model, processor)
        self.special = sorted(set(processor.all_special_ids))
        words = sorted(set(processor.get_vocab().values()) - set(self.special))
        self.words = torch.tensor(words)  # that may be shown in the place of another
        known = (processor.pad_token_id, getattr(model.config, "pad_token_id", None), 0)
        self.pad = next(id for id in known if id is not None)
        aside = self._aside()
        self.sees_padding, self.by_place = aside._sees_padding(), aside._predicts_by_place()

    def row_length(self, length: int | None = None) -> int:
        """The tokens of a row: what was asked for, if the model reads so many and one fits in."""
        if length is None:
            return min(LENGTH, self.longest)
        least = sum(map(len, self.frame())) + 1
        if not least <= length <= self.longest:
            raise ValueError(f"length must be from {least} to {self.longest}, got {length}")
        return length

    def tokenise(self, texts: Sequence[str], length: int | None = None) -> list[list[int]]:
        """Token ids with the special ones, cut to `length`."""
        most = min(length or self.longest, self.longest)
        with unchanged(self.processor):
            return self.processor(list(texts), truncation=True, max_length=most)["input_ids"]

    def pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of whole texts, without the special ones."""
        with unchanged(self.processor):
            return self.processor(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    def frame(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        with unchanged(self.processor):
            ids = self.processor(self.processor.mask_token)["input_ids"]
        place = ids.index(self.processor.mask_token_id)
        special = set(self.special)
        return [i for i in ids[:place] if i in special], [
            i for i in ids[place + 1 :] if i in special
        ]

    def tokenizer_key(self) -> str:
        """A hash of what decides the ids of a text."""
        backend = getattr(self.processor, "backend_tokenizer", None)
        said = json.loads(backend.to_str()) if backend is not None else {}
        said |= {"truncation": None, "padding": None}  # which do not matter here
        said |= {"vocabulary": self.processor.get_vocab(), "frame": self.frame()}
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    def vocabulary_key(self) -> str:
        """A hash of the tokens by their ids."""
        said = json.dumps(self.processor.get_vocab(), sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()

    def check_reads(self, rows: Any) -> None:
        super().check_reads(rows)
        other = getattr(getattr(rows, "store", None), "vocabulary", None)
        if other not in (None, self.vocabulary_key()):
            raise ValueError(
                "these rows were read with another tokenizer: read the data again with this model"
            )

    def batch(self, rows: Any) -> Batch:
        """From texts, or from rows of token ids with the special ones."""
        if len(rows) and isinstance(rows[0], str):
            rows = self.tokenise(rows)
        rows = [_long(row) for row in rows]
        if not rows or not all(map(len, rows)):
            raise ValueError("a batch needs at least one text, and no text may be empty")
        if max(map(len, rows)) > self.longest:
            raise ValueError(
                f"a text has {max(map(len, rows))} tokens, and the model reads at most "
                f"{self.longest}; cut it"
            )
        ids = pad_sequence(rows, batch_first=True, padding_value=self.pad)
        lengths = torch.tensor([len(row) for row in rows])
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        special = torch.isin(ids, torch.tensor(self.special)) | ~real
        tensors = {"input_ids": ids, "attention_mask": real.long(), "special_tokens_mask": special}
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def rounded(self, batch: Batch, length: int | None = None) -> Batch:
        """To a multiple of 32 tokens, or to the most that the model reads; or to a length."""
        present = batch["input_ids"].shape[1]
        more = (length or min(-(-present // ROUND) * ROUND, self.longest)) - present
        values = {"input_ids": self.pad, "special_tokens_mask": True, MASK: -1}
        padded = {
            name: F.pad(t, (0, 0) * (t.dim() - 2) + (0, more), value=values.get(name, 0))
            if t.dim() > 1
            else t
            for name, t in batch.items()
        }
        if MASK in padded:
            padded[PLACES] = hidden_first(padded[MASK])[: room(*padded[MASK].shape)]
        return padded

    def few(self, batch: Batch) -> tuple[Batch, float]:
        some, times = super().few(batch)
        if MASK in batch:  # as many places of each text as of all of them
            hidden = int((batch[MASK] >= 0).sum())
            some[PLACES] = hidden_first(some[MASK])[: round(hidden / times)]
        return some, times

    def mask(self, batch: Batch, generator: torch.Generator) -> Tensor:
        ids = batch["input_ids"]
        maskable = ~batch["special_tokens_mask"].bool()
        return token_mask(ids, maskable, self.words, self.processor.mask_token_id, generator)

    def masked(self, batch: Batch, mask: Tensor) -> Masked:
        ids, where = batch["input_ids"], mask >= 0
        shown = torch.where(where, mask, ids)
        logits = self.model(input_ids=shown, attention_mask=batch["attention_mask"]).logits
        exact = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        wanted = ids.masked_fill(~where, NONE)
        losses = F.cross_entropy(exact.flatten(0, 1), wanted.flatten(), reduction="none")
        return Masked(mean_over_masked(losses.view_as(ids), where), logits, ids, where)

    def masked_loss(self, batch: Batch, mask: Tensor) -> Tensor:
        """Only hidden places go through the head: most of what a small model of many words does,
        and of the memory that it takes, is to predict the others.
        """
        if not self.by_place:
            return super().masked_loss(batch, mask)
        ids, where = batch["input_ids"], mask >= 0
        places = batch.get(PLACES)
        if places is None:
            places = where.flatten().nonzero().squeeze(1)
        with only_at(places, self.trunk):
            shown = torch.where(where, mask, ids)
            logits = self.model(input_ids=shown, attention_mask=batch["attention_mask"]).logits[0]
        exact = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        losses = F.cross_entropy(exact, ids.flatten()[places], reduction="none")
        spread = losses.new_zeros(ids.numel()).scatter(0, places, losses)
        return mean_over_masked(spread.view_as(ids), where)

    def represent(self, batch: Batch) -> Represented:
        real = batch["attention_mask"]
        features = self.trunk(input_ids=batch["input_ids"], attention_mask=real)[0]
        return Represented(features, real.bool())

    @torch.no_grad()
    def _sees_padding(self) -> bool:
        """Measured: whether a text is represented otherwise beside a longer one.

        Models that do not mask (FNet), or convolve over tokens (ConvBERT), do.
        """
        long, short = self._drawn()
        with seeded(0, self.device):
            alone = self.represent(self.batch([short])).features[0]
            beside = self.represent(self.batch([short, long])).features[0, : len(short)]
        return not _alike(alone, beside)

    @torch.no_grad()
    def _predicts_by_place(self) -> bool:
        """Measured: whether the head reads each place by itself, and so may be given some alone."""
        batch = self.batch(self._drawn())
        words = {name: batch[name] for name in ("input_ids", "attention_mask")}
        length = words["input_ids"].shape[1]
        places = torch.tensor([length - 1, length], device=self.device)  # of both texts
        try:
            with seeded(0, self.device):
                every = self.model(**words).logits
                with only_at(places, self.trunk):
                    some = self.model(**words).logits
        except Exception:  # whatever a head says that wants rows of its own form
            return False
        if every.shape[:2] != words["input_ids"].shape or some.shape[:2] != (1, len(places)):
            return False
        return _alike(every.flatten(0, 1)[places], some[0])

    def _aside(self) -> Self:
        """A copy to try things with: some models change by what they read (BigBird, by lengths)."""
        other = self.copy()
        other.model.eval()
        return other

    def _drawn(self) -> tuple[Tensor, Tensor]:
        """Tokens of a long text and of a short one, always the same."""
        length = min(self.longest, 12)
        lots = torch.Generator().manual_seed(0)
        drawn = torch.randint(len(self.words), (2, length), generator=lots)
        return self.words[drawn[0]], self.words[drawn[1, : length // 2]]

    def input_key(self) -> str:
        return json.dumps({"kind": "text", "pad": self.pad})


def _alike(one: Tensor, other: Tensor) -> bool:
    spread = float(one.std())
    return math.isfinite(spread) and torch.allclose(one, other, rtol=1e-3, atol=1e-3 * spread)


def hidden_first(mask: Tensor) -> Tensor:
    """All places, flat, those that a mask hides before the others."""
    return (mask < 0).flatten().to(torch.uint8).argsort(stable=True)


def room(rows: int, length: int) -> int:
    """Hidden places that there are at most in such a batch: one a row, which has at least one, and
    ten deviations more than the mean of the others.
    """
    count = rows * length
    return min(count, rows + math.ceil(count * RATE + 10 * math.sqrt(count * RATE * (1 - RATE))))


@contextmanager
def only_at(places: Tensor, trunk: nn.Module) -> Iterator[None]:
    """Inside, what comes after the trunk sees these places alone, as one row: `[1, K, D]`."""

    def pick(_: nn.Module, __: Any, output: Any) -> Any:
        states = output[0].flatten(0, 1)[places][None]
        if isinstance(output, tuple):
            return (states, *output[1:])
        output[next(iter(output))] = states
        return output

    handle = trunk.register_forward_hook(pick)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def unchanged(tokenizer: Any) -> Iterator[None]:
    """Call a tokenizer, which keeps how the last call cut and padded, and would save it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        yield
        return
    cut, filled = backend.truncation, backend.padding
    try:
        yield
    finally:
        backend.no_truncation() if cut is None else backend.enable_truncation(**cut)
        backend.no_padding() if filled is None else backend.enable_padding(**filled)


def _long(row: Any) -> Tensor:
    """Token ids as a tensor."""
    if isinstance(row, Tensor):
        return row.long()
    # A copy: what is mapped into memory cannot be written, and torch would warn of it.
    return torch.from_numpy(np.array(row, dtype=np.int64))


def check_tokenizer(model: Any, tokenizer: Any) -> None:
    """Raise if the tokenizer cannot mask, or is of another vocabulary by its size."""
    if tokenizer is None:
        raise ValueError(
            "the model brings no tokenizer; save one into its folder (in Python, processor=…)"
        )
    if getattr(tokenizer, "mask_token_id", None) is None:
        raise ValueError("the tokenizer has no mask token; take that of a masked language model")
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values())
    size = f"its largest token id is {largest}, and the model embeds {rows} tokens"
    here, there = getattr(model.config, "pad_token_id", None), tokenizer.pad_token_id
    pads = f"it pads with token {there}, and the model takes {here} for padding"
    apart = None not in (here, there) and here != there
    wrong = "" if rows <= 2 * (largest + 1) <= 2 * rows else size
    if apart and counted_from(model) is not None:
        wrong = pads
    if wrong:
        raise ValueError(
            f"the tokenizer does not match: {wrong}; give the tokenizer that the model was trained "
            "with"
        )
    # Some models of the hub are like that, with their own tokenizers. Embeddings may be a little
    # larger than a vocabulary, for the sake of round numbers.
    odd = pads if apart else size if rows - largest - 1 > max(SPARE, rows // 32) else ""
    if odd:
        warnings.warn(f"is this the model's own tokenizer? {odd}", stacklevel=2)


def counted_from(model: Any) -> int | None:
    """The padding's token, where places are counted from behind it, as RoBERTa does."""
    places = getattr(model.config, "max_position_embeddings", None)
    parts = [part for part in model.base_model.modules() if isinstance(part, nn.Embedding)]
    found = [part.padding_idx for part in parts if part.num_embeddings == places]
    return next((first for first in found if first is not None), None)


def longest_input(model: Any, tokenizer: Any) -> int:
    """The most tokens that the model reads, special ones included."""
    places = getattr(model.config, "max_position_embeddings", None)
    limits = [places, getattr(tokenizer, "model_max_length", None)]
    if places and (first := counted_from(model)) is not None:
        limits += [places - first - 1]
    # Some tokenizers have a huge number for "no limit".
    return min((limit for limit in limits if limit and 0 < limit < ENDLESS), default=LENGTH)
