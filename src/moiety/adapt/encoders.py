"""One masked model, of images or of text, as adaptation sees it.

    encoder = Encoder.load("roberta/")                  # or a model in memory, with processor=
    batch = encoder.batch(texts)                        # tensors on the model's device
    mask = encoder.mask(batch, generator)               # what to hide, all its lots drawn
    encoder.masked_loss(batch, mask)                    # eq. (2) of digest 3
    encoder.masked(batch, mask)                         # the same, with all predictions
    encoder.represent(batch).features                   # [B, L, D] of the unmasked input

The encoder is what transformers calls `base_model` (the trunk); head or decoder is all the rest.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from ..moe import MoE
from .cache import digest_of
from .rows import Images, Tokens

Batch = dict[str, Tensor]
NO_FUNCTION = {"architectures", "transformers_version", "dtype", "torch_dtype"}  # of a config
FEW = 2  # examples whose FLOPs are counted
MASK = "mask"  # the name of a mask among the tensors of its batch
PLACES = "places"  # and of the places of text that it hides, flat, where they are there: `rounded`


@dataclass(frozen=True)
class Masked:
    """What a masked pass gave; the places are tokens or patches.

    `loss` is the mean over the masked places of each example, then over the examples.
    """

    loss: Tensor
    predictions: Tensor  # [B, L, V] logits, or [B, patches, pixels of a patch]
    targets: Tensor  # [B, L] token ids, or as the predictions
    where: Tensor  # [B, L] bool, the masked places


@dataclass(frozen=True)
class Represented:
    """What the trunk says of the unmasked input, after its last norm, each token in its place."""

    features: Tensor  # [B, L, D]
    real: Tensor  # [B, L] bool, false where there is padding

    @property
    def cls(self) -> Tensor:
        """[B, D], of the class token."""
        return self.features[:, 0]


@dataclass(frozen=True)
class Groups:
    """Parameters by their names in the model; what head and trunk share belongs to the trunk."""

    trunk: dict[str, nn.Parameter]
    rest: dict[str, nn.Parameter]


@dataclass(frozen=True)
class Distance:
    """l2 distance of the trunk from other weights, in all and of every layer."""

    total: float
    layers: dict[str, float] = field(default_factory=dict)


class Encoder(ABC):
    """A model with its masked pre-training head, and what prepares its input."""

    kind: Literal["image", "text"]
    # Whether what is beside an example in its batch changes its representation; if it does, none
    # can be kept for another batch.
    sees_padding = False

    def __init__(self, model: Any, processor: Any = None, made: Sequence[str] = ()) -> None:
        self.model = model
        self.processor = processor  # the tokenizer, or the image processor
        self.made = list(made)  # parameters that were missing, and are random until `warm_up`

    @staticmethod
    def load(source: str | Path | nn.Module, *, processor: Any = None, seed: int = 0) -> Encoder:
        """The model of a folder, or one in memory; `seed` decides a head that has to be made."""
        from .loading import load_encoder

        return load_encoder(source, processor=processor, seed=seed)

    # -- what a kind says for itself --------------------------------------------------------------

    @abstractmethod
    def batch(self, rows: Any) -> Batch:
        """Tensors on the device from raw examples, as `Rows.take` gives them."""

    @abstractmethod
    def mask(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Draw what to hide: opaque, [B, L], on the model's device.

        Text: int64, -1 where nothing is predicted, else the token to show there.
        Images: float32 noise, whose largest patches are hidden.
        """

    @abstractmethod
    def masked(self, batch: Batch, mask: Tensor) -> Masked:
        """Predict what is hidden."""

    def masked_loss(self, batch: Batch, mask: Tensor) -> Tensor:
        """The loss of `masked`, with no more predicted than it asks for."""
        return self.masked(batch, mask).loss

    @abstractmethod
    def represent(self, batch: Batch) -> Represented:
        """Run the trunk alone on the unmasked input."""

    @abstractmethod
    def input_key(self) -> str:
        """Say all that decides how raw examples become tensors: a part of a cache's key."""

    def check_reads(self, rows: Any) -> None:
        """Raise for rows that were read for another kind of model, or with another tokenizer."""
        other, reads = (Tokens, "images") if self.kind == "image" else (Images, "texts")
        if isinstance(getattr(rows, "store", None), other):
            raise ValueError(f"the model reads {reads}, and these rows hold none")

    def rounded(self, batch: Batch, length: int | None = None) -> Batch:
        """The batch, which may hold a mask, with so much padding that few shapes occur; or padded
        to a length. With a mask it also holds the places that are hidden, and room for more."""
        return batch

    # -- what all share ---------------------------------------------------------------------------

    @property
    def trunk(self) -> nn.Module:
        return self.model.base_model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def to(self, device: torch.device | str) -> Encoder:
        """Move the model, and return self."""
        self.model.to(device)
        return self

    def copy(self) -> Self:
        """A model of its own, with the same weights, modes and processor."""
        other = copy.copy(self)
        other.model, other.made = copy.deepcopy(self.model), list(self.made)
        return other

    def groups(self) -> Groups:
        """The parameters of the trunk, and those of head or decoder."""
        inside = {id(p) for p in self.trunk.parameters()}
        groups = Groups({}, {})
        for name, parameter in self.model.named_parameters():
            (groups.trunk if id(parameter) in inside else groups.rest)[name] = parameter
        return groups

    @torch.no_grad()
    def distance(self, initial: Mapping[str, Tensor]) -> Distance:
        """How far the trunk is from `initial`, a state dict of the model, in float64."""
        squares: dict[str, Tensor] = {}
        for name, now in self.groups().trunk.items():
            if name not in initial:
                raise ValueError(f"the initial weights lack {name}; give those of the same model")
            gap = (now.double() - initial[name].to(now.device).double()).square().sum()
            layer = layer_of(name.removeprefix(f"{self.model.base_model_prefix}."))
            squares[layer] = squares.get(layer, torch.zeros_like(gap)) + gap
        layers = {layer: float(square.sqrt()) for layer, square in squares.items()}
        return Distance(float(sum(squares.values(), torch.zeros(())).sqrt()), layers)

    def weights_key(self, *, whole: bool = False) -> str:
        """A hash of the trunk's weights, buffers and configuration: the name of a teacher.

        With `whole` also of the weights of head or decoder: the name of a model.
        """
        state = sorted((self.model if whole else self.trunk).state_dict().items())
        config = self.model.config.to_dict()
        said = {name: config[name] for name in config.keys() - NO_FUNCTION if name[0] != "_"}
        with ThreadPoolExecutor(4) as pool:  # a hash of much lets others run
            digests = pool.map(lambda named: digest_of(*named), state)
            text = "".join([json.dumps(said, sort_keys=True, default=str), *digests])
        return hashlib.sha256(text.encode()).hexdigest()

    def few(self, batch: Batch) -> tuple[Batch, float]:
        """Some examples of a batch, which may hold a mask, padded as all are, and how many times as
        many the batch has.

        Its FLOPs are so many times theirs, except that experts leave out padding: with such, all.
        """
        size = len(next(iter(batch.values())))
        experts = any(isinstance(part, MoE) for part in self.model.modules())
        some = size if experts else min(size, FEW)
        return {name: value[:some] for name, value in batch.items()}, size / some

    def save(self, folder: str | Path) -> None:
        """Write model and processor, for `transformers` (an upcycled model: `moiety.load`)."""
        from .loading import save_encoder

        save_encoder(self, folder)


def layer_of(name: str) -> str:
    """The layer of a parameter of the trunk: "encoder.layer.3" or, outside a list, "embeddings"."""
    listed = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return listed.group() if listed else name.split(".")[0]
