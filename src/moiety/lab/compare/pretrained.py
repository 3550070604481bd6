"""A model of Hugging Face for a comparison: loaded, given a head for the targets, upcycled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.problem import Problem
from ...models.mixture import DENSE
from ...models.mixture import settings as layer_settings
from ...train import seeded
from .models import LONGEST, Maker, padded, widths
from .task import Reader

LR, BATCH = 1e-4, 16


def pretrained_maker(name: str, problem: Problem) -> Maker:
    """The maker of a saved model, or one of the hub; what does not fit the data raises."""
    from ...hf.loading import load_config, load_image_processor, load_tokenizer

    config = load_config(name)
    if problem.kind == "table":
        raise ValueError(f"{name} reads no tables, and {problem.name} is one: take the model mlp")
    reader: Reader | None = None
    dress: Callable[[Any], nn.Module] = lambda model: model  # noqa: E731
    pad = None
    if problem.kind == "text":
        tokenizer = load_tokenizer(name)
        if tokenizer is None:
            raise ValueError(f"{name} has no tokenizer: save one into its folder")
        pad = _pad_id(tokenizer)
        reader = _read_with(tokenizer, pad, config)
    else:
        view = _View(config, load_image_processor(name))
        dress = lambda model: Seeing(model, view)  # noqa: E731

    def build(settings: Mapping[str, Any], seed: int) -> nn.Module:
        with seeded(seed):
            model = _load(name, problem, pad)
            if settings["router"] != DENSE:
                _upcycle(model, settings)
            return dress(model)

    about = f"{name}, fine-tuned; routers on a copy whose blocks became experts"
    return Maker(name, build, LR, BATCH, reader, upcycled=True, about=about)


def _load(name: str, problem: Problem, pad: int | None) -> Any:
    """The model with a fresh head, one output for each class of each target."""
    import transformers

    kinds = {
        "text": transformers.AutoModelForSequenceClassification,
        "image": transformers.AutoModelForImageClassification,
    }
    quiet = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # that the head is new is the point
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = kinds[problem.kind].from_pretrained(
            name,
            num_labels=widths(problem),
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{name} cannot be made a classifier of {problem.kind}s: {reason}"
        ) from None
    finally:
        transformers.logging.set_verbosity(quiet)
        if bars:
            transformers.utils.logging.enable_progress_bar()
    if pad is not None:
        model.config.pad_token_id = pad  # by which some classifiers find the last token
    return model


def _upcycle(model: Any, settings: Mapping[str, Any]) -> None:
    from ...hf.upcycle import upcycle

    options = dict(settings.get("options", {}))
    k = options.pop("k", settings["k"])
    words, _ = layer_settings(settings["router"], settings["experts"], k, True, options)
    # Routers that start elsewhere are compared too; what that costs them is part of the result.
    upcycle(
        model,
        experts=settings["experts"],
        router=settings["router"],
        init=settings["init"],
        inplace=True,
        exact=False,
        allow_noncausal=True,
        **words,
    )


# -- texts -----------------------------------------------------------------------------------------


def _pad_id(tokenizer: Any) -> int:
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def _read_with(tokenizer: Any, pad: int, config: Any) -> Reader:
    positions = getattr(config, "max_position_embeddings", None) or LONGEST
    # Some count positions from behind the padding id, so that they have two fewer than they say.
    longest = min(LONGEST, tokenizer.model_max_length, max(positions - 2, 1))

    def read(texts: Sequence[str]) -> dict[str, Tensor]:
        found = tokenizer(list(texts), truncation=True, max_length=longest)["input_ids"]
        return padded([ids or [pad] for ids in found], pad)

    return read


# -- images ----------------------------------------------------------------------------------------


class _View:
    """Size, channels and normalisation that a model wants its images in."""

    def __init__(self, config: Any, processor: Any) -> None:
        size: Any = getattr(processor, "size", None) or getattr(config, "image_size", 224)
        crop: Any = getattr(processor, "crop_size", None)
        if getattr(processor, "do_center_crop", False) and crop:
            size = crop  # the whole image is shown at the size of the part they would cut out
        if not isinstance(size, int | list | tuple):
            sides = [size.get("height"), size.get("width")]
            size = sides if all(sides) else size.get("shortest_edge") or size.get("longest_edge")
        self.size = (size, size) if isinstance(size, int) else tuple(size)
        self.channels = getattr(config, "num_channels", 3)
        self.mean = list(getattr(processor, "image_mean", None) or [0.5])
        self.std = list(getattr(processor, "image_std", None) or [0.5])


class Seeing(nn.Module):
    """A model of images that takes bytes of any size."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, view: _View) -> None:
        super().__init__()
        self.model, self.size, self.channels = model, view.size, view.channels
        self.register_buffer("mean", torch.tensor(view.mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(view.std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images `[B, C, H, W]` of bytes."""
        x = images.float() / 255
        if x.shape[1] != self.channels:  # grey as colour, colour as grey
            x = x.mean(1, keepdim=True).expand(-1, self.channels, -1, -1)
        if tuple(x.shape[-2:]) != self.size:
            x = F.interpolate(x, self.size, mode="bilinear", antialias=True, align_corners=False)
        return self.model(pixel_values=(x - self.mean) / self.std).logits
