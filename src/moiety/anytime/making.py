"""Learners from plain words, as `moiety anytime` makes them; and again from those of a version.

made = make_learner("ensemble", {"members": 3}, model="mlp", width=64, shape=(12,), classes=4)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import nn

from . import backbones
from .base import Learner
from .environment import ASKED
from .fitting import Training
from .learners import learner

Model = Literal["mlp", "vgg19"]
CODE = ("options", "augment", "save_every")  # of a training: not kept in its words, or not as given


def make_learner(
    name: str,
    options: Mapping[str, Any],
    *,
    model: Model,
    width: int,
    shape: tuple[int, ...],
    classes: int,
) -> Learner:
    """A learner of MLPs or VGG19s, with gates where it grows them."""
    if model == "vgg19" and len(shape) != 3:
        raise ValueError(f"vgg19 takes images, not rows of the shape {list(shape)}; take mlp")
    tree = name == "growing-moe"

    def make(_: int) -> nn.Module:
        if model == "vgg19":
            kind = backbones.TreeVGG19 if tree else backbones.VGG19
            return kind(width, shape=shape, classes=classes)  # type: ignore[arg-type]
        inputs = torch.Size(shape).numel()
        return (backbones.TreeMLP if tree else backbones.MLP)(width, inputs=inputs, classes=classes)

    return learner(name, make, **options)


def make_again(
    run: Mapping[str, Any],
    own: Mapping[str, Any],
    shape: tuple[int, ...],
    classes: int,
    device: torch.device | str = "cpu",
) -> Learner:
    """The learner of a version that `moiety anytime` wrote, from the words of run and learner."""
    training = Training(**{f.name: own[f.name] for f in fields(Training) if f.name not in CODE})
    common = {"seed": own["seed"], "training": training, "device": device}
    options = {**run[ASKED], **common}
    return make_learner(
        own["learner"],
        options,
        model=run["model"],
        width=run["width"],
        shape=shape,
        classes=classes,
    )
