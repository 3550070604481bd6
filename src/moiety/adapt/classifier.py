"""A classifier on the trunk of a masked encoder: a class of transformers with a fresh head.

    classifier = Classifier.build(encoder, classes=4, seed=0)
    classifier.logits(encoder.batch(texts))                  # [B, 4]
    classifier.save("classifier/")                           # for transformers alone to load, or,
                                                             # with experts, for `moiety.load`

The head reads the class token. The trunk's weights are copies of the encoder's, bit for bit; what
the encoder has not (the head, and a pooler where the class has one) is fresh, by the seed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..moe import MoE
from ..train import seeded
from .encoders import Batch, Encoder
from .loading import save_encoder

READ = ("pixel_values", "input_ids", "attention_mask")  # what classifiers take of a batch
DROPOUT = ("hidden_dropout_prob", "dropout")  # how configs call that of hidden states


@dataclass(frozen=True)
class Classifier:
    """A model of transformers, what prepares its input, and which of its parameters are fresh."""

    model: Any
    encoder: Encoder  # reads raw examples; its own weights are not touched
    fresh: list[str]

    @classmethod
    def build(
        cls,
        encoder: Encoder,
        classes: int | Sequence[str],
        *,
        seed: int = 0,
        dropout: float | None = None,
    ) -> Classifier:
        """A classifier of so many classes, or of these; `dropout` of hidden states, if not None."""
        names = None if isinstance(classes, int) else list(classes)
        count = classes if isinstance(classes, int) else len(classes)
        if count < 2:
            raise ValueError(f"a classifier needs at least two classes, got {count}")
        config = _config(encoder, count, names, dropout)
        with seeded(seed):
            model = (
                _door(encoder).from_config(config)
                if encoder.kind == "text"
                else (_door(encoder)(config))
            )
        unsaved = _mix(model, encoder)
        state = {
            name: tensor.detach().clone() for name, tensor in encoder.trunk.state_dict().items()
        }
        # Assigned, because the experts of a new mixture have no memory yet.
        missing, unknown = model.base_model.load_state_dict(state, strict=False, assign=True)
        if unknown:
            raise ValueError(
                f"{type(model).__name__} has no place for {unknown[0]} of the encoder; save the "
                "model with the installed version of transformers first"
            )
        inside = {id(p) for p in model.base_model.parameters()}
        lacking = {f"{model.base_model_prefix}.{name}" for name in missing}
        fresh = [n for n, p in model.named_parameters() if n in lacking or id(p) not in inside]
        dtype = next(encoder.trunk.parameters()).dtype
        model.to(device=encoder.device, dtype=dtype)
        _wire(model, unsaved)
        return cls(model, encoder, fresh)

    @property
    def processor(self) -> Any:
        return self.encoder.processor

    @property
    def classes(self) -> int:
        return int(self.model.config.num_labels)

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """What the model takes of a batch."""
        return {name: batch[name] for name in READ if name in batch}

    def logits(self, batch: Batch) -> Tensor:
        """`[B, C]` in the mode the model is in."""
        return self.model(**self.inputs(batch)).logits

    def trunk(self) -> dict[str, nn.Parameter]:
        """The parameters that came from the encoder, by name."""
        return {n: p for n, p in self.model.named_parameters() if n not in self.fresh}

    @torch.no_grad()
    def distance(self, encoder: Encoder) -> float:
        """l2 distance of the trunk from that of an encoder, in float64."""
        prefix, theirs = f"{self.model.base_model_prefix}.", encoder.trunk.state_dict()
        squares = [
            (p.double() - theirs[name.removeprefix(prefix)].to(p.device).double()).square().sum()
            for name, p in self.trunk().items()
        ]
        return float(torch.stack(squares).sum().sqrt())

    def save(self, folder: str | Path) -> None:
        """Write model and processor; half a save never loads."""
        whole: Any = self  # has a model and a processor, as an encoder has
        save_encoder(whole, folder)


def _door(encoder: Encoder) -> Any:
    from transformers import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as known,
    )
    from transformers import AutoModelForSequenceClassification, ViTForImageClassification

    if encoder.kind == "image":
        return ViTForImageClassification
    if type(encoder.model.config) not in known:
        raise ValueError(
            f"transformers has no classifier for {type(encoder.model).__name__}; fine-tune a model "
            "of another family"
        )
    return AutoModelForSequenceClassification


def _config(encoder: Encoder, count: int, names: list[str] | None, dropout: float | None) -> Any:
    """The encoder's config, as that of the classifier's class."""
    config = copy.copy(encoder.model.config)
    config.__dict__.pop("quantization_config", None)  # where mixtures of the encoder are described
    config = copy.deepcopy(config)
    if encoder.kind == "image":
        wanted: Any = _door(encoder).config_class
        known = wanted().to_dict().keys() - {"model_type", "architectures", "transformers_version"}
        config = wanted(**{k: v for k, v in config.to_dict().items() if k in known})
    config.num_labels = count
    if names:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
    if hasattr(config, "classifier_pooling"):
        config.classifier_pooling = "cls"  # where there is a choice, as for all others
    if dropout is not None:
        places = [name for name in DROPOUT if hasattr(config, name)]
        if not places:
            raise ValueError(f"{type(encoder.model).__name__} has no dropout to set; leave it out")
        setattr(config, places[0], dropout)
    return config


def _mix(model: Any, encoder: Encoder) -> dict[str, Tensor]:
    """Put mixtures where the trunk of an upcycled encoder has them; what its state lacks."""
    if not any(isinstance(part, MoE) for part in encoder.trunk.modules()):
        return {}
    # Here, for they load transformers.
    from ..hf.place import describe_mixtures
    from ..hf.transformers_hook import VERSION, build, here

    return build(model, here(model, describe_mixtures(encoder.trunk), VERSION))


def _wire(model: Any, unsaved: Mapping[str, Tensor]) -> None:
    """Make the mixtures of a classifier work: padding, balance losses."""
    if not any(isinstance(part, MoE) for part in model.modules()):
        return
    from ..hf.transformers_hook import put_buffer
    from ..hf.upcycle import wire

    for name, value in unsaved.items():
        put_buffer(model, name, value)
    wire(model)


def parameter_groups(classifier: Classifier, weight_decay: float) -> Iterator[dict[str, Any]]:
    """Groups of parameters for an optimizer: trunk and fresh, decaying and not.

    Biases and norms do not decay, nor do class tokens and position tables of images, which have a
    leading axis of one.
    """
    for fresh in (False, True):
        for decays in (True, False):
            found = [
                p
                for name, p in classifier.model.named_parameters()
                if p.requires_grad
                and (name in classifier.fresh) == fresh
                and (p.dim() > 1 and p.shape[0] > 1) == decays
            ]
            if found:
                decay = weight_decay if decays else 0.0
                yield {"params": found, "weight_decay": decay, "recall": not fresh}
