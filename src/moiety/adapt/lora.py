"""Train a student by low-rank adapters (LoRA, through `peft`), and merge them into its weights.

    student = with_adapters(encoder, rank=8, seed=0)    # a copy, whose dense layers are frozen
    …                                                   # train it
    merge(student, encoder)                             # W + 2·B A, in the plain encoder

Every dense layer of the trunk, those of attention included, gets an adapter; embeddings and norms
are frozen. Head or decoder train as ever. What is looked at and saved is the plain encoder.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..moe import MoE
from ..train.fit import seeded
from .encoders import Encoder

SCALE = 2  # lora_alpha / rank
NAME = "default"  # peft's own, of the only adapter


def with_adapters(encoder: Encoder, rank: int, seed: int) -> Encoder:
    """A copy that says the same, and of whose trunk only new adapters are trained."""
    peft = load_peft()
    check_adaptable(encoder)
    student = encoder.copy()
    dense = [name for name, part in student.trunk.named_modules() if isinstance(part, nn.Linear)]
    head = [p for p in student.groups().rest.values() if p.requires_grad]
    config = peft.LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules=dense)
    with seeded(seed, encoder.device):
        peft.inject_adapter_in_model(config, student.trunk)
    for parameter in head:
        parameter.requires_grad_(True)
    return student


def check_adaptable(encoder: Encoder) -> None:
    """Raise for a model that peft cannot adapt, and where peft is missing."""
    load_peft()
    if any(isinstance(part, MoE) for part in encoder.model.modules()):
        raise ValueError(
            "the model has experts, which LoRA would leave as they are: adapt it without lora"
        )


def load_peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ValueError(
            "lora needs peft, which is not there: pip install 'moiety[lora]'"
        ) from None
    return peft


@torch.no_grad()
def merge(student: Encoder, encoder: Encoder) -> None:
    """Write what the student has learnt into a plain encoder; the student stays as it is."""
    learnt = dict(student.model.state_dict())
    for name, part in student.model.named_modules():
        if hasattr(part, "get_delta_weight"):
            weight = part.base_layer.weight
            learnt[f"{name}.base_layer.weight"] = weight + part.get_delta_weight(NAME).to(weight)
    plain = {name.replace(".base_layer.", "."): value for name, value in learnt.items()}
    own = encoder.model.state_dict()
    encoder.model.load_state_dict({name: plain[name] for name in own})
