"""Encoders from folders and from memory, and back to folders; what does not fit is refused."""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from .. import io
from ..moe import MoE
from ..train import seeded
from .encoders import Encoder

WANTED = "adaptation takes masked encoders, such as BERT, RoBERTa and ViT-MAE"

NOWHERE = (
    "the position table of this ViT-MAE is zero, so that it reads its patches in no order: call "
    "moiety.adapt.place_patches(model) before it is trained, and save it"
)


def load_encoder(
    source: str | os.PathLike[str] | nn.Module, *, processor: Any = None, seed: int = 0
) -> Encoder:
    """The model of a folder or one in memory, as an `Encoder`."""
    model: Any
    made: list[str] = []
    if isinstance(source, nn.Module):
        model = _exact(source)
        door = _door(getattr(source, "config", None), type(source).__name__)
        if not isinstance(source, door):
            raise ValueError(
                f"{type(source).__name__} has no masked head; give a {door.__name__}, or the "
                "folder it is saved in"
            )
    else:
        model, made = _from_folder(str(source), seed)
    _freeze_fixed(model)
    if _is_image(model.config):
        from .images import ImageEncoder

        if not model.vit.embeddings.position_embeddings.any():
            warnings.warn(NOWHERE, stacklevel=3)
        found = processor or _image_processor(source) or _usual_processor(model.config)
        return ImageEncoder(model, found, made)
    from .text import TextEncoder

    return TextEncoder(model, processor or _tokenizer(source), made)


def open_encoder(
    source: str | os.PathLike[str] | nn.Module | Encoder, processor: Any = None, seed: int = 0
) -> Encoder:
    """An encoder as it is, or loaded with a processor where it has none of its own."""
    if not isinstance(source, Encoder):
        return load_encoder(source, processor=processor, seed=seed)
    if processor is not None:
        raise ValueError("an Encoder has its processor: leave processor out")
    return source


def _exact(model: nn.Module) -> nn.Module:
    """The model, or where it is in half precision a copy in float32, as one of a folder is.

    What a step changes would be lost in half precision; `precision` is for products alone.
    """
    half = (torch.float16, torch.bfloat16)
    halved = any(p.dtype in half for p in model.parameters())
    return copy.deepcopy(model).float() if halved else model


def _door(config: Any, name: str) -> Any:
    """The class that pre-trains models of this config; what cannot be adapted raises."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING as known
    from transformers import ViTMAEForPreTraining

    if _is_image(config):
        return ViTMAEForPreTraining
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder–decoder; {WANTED}")
    if type(config) not in known:
        raise ValueError(f"{name} is no masked language model and no ViT-MAE; {WANTED}")
    if getattr(config, "is_decoder", False):
        raise ValueError(f"{name} is a causal model (is_decoder is set); {WANTED}")
    return known[type(config)]


def _is_image(config: Any) -> bool:
    from transformers import ViTMAEConfig

    return isinstance(config, ViTMAEConfig)


def _from_folder(name: str, seed: int) -> tuple[Any, list[str]]:
    """The model in float32, and the names of the parameters that the folder lacked."""
    from ..hf.loading import load_config  # `hf` also teaches transformers to load upcycled models

    config = load_config(name)
    door = _door(config, name)
    try:
        with seeded(seed), _quiet():  # the seed of what is missing and is made now
            model, report = door.from_pretrained(
                name,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # which are told below
            )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        first = str(error).strip().split("\n")[0]
        raise ValueError(f"{name} cannot be loaded: {first}") from None
    for key, stored, wanted in report["mismatched_keys"]:
        raise ValueError(
            f"{name}: {key} has the shape {list(stored)} in the weights and {list(wanted)} by "
            "config.json; one of them is of another model"
        )
    made = _made(model, set(report["missing_keys"]), name)
    with seeded(seed), _quiet():
        if made:
            _fill(model, made, door, seed)
        if "decoder.decoder_pos_embed" in made:
            place_patches(model, decoder_only=True)
    return model, made


@contextmanager
def _quiet() -> Iterator[None]:
    """Hush transformers, which calls an encoder that was saved alone corrupted."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def _made(model: Any, missing: set[str], name: str) -> list[str]:
    """Which parameters of head or decoder were missing; the trunk must be whole."""
    aliases: dict[int, list[str]] = {}
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(alias)
    trunk = {id(p) for p in model.base_model.parameters()}
    made = []
    for at, names in aliases.items():
        if at in trunk and missing.issuperset(names):
            raise ValueError(f"{name} lacks weights of its encoder, such as {names[0]}; save all")
        if at not in trunk and not missing.isdisjoint(names):
            made.append(names[0])
    return made


@torch.no_grad()
def _fill(model: Any, made: list[str], door: Any, seed: int) -> None:
    """Give what was missing the values of a new model.

    `from_pretrained` calls the class's own initialisation, which leaves what only a constructor
    sets, such as the bias of some heads, as memory happens to be.
    """
    with seeded(seed):
        fresh = door(model.config)
    values = dict(fresh.named_parameters(remove_duplicate=False))
    for name in made:
        model.get_parameter(name).copy_(values[name])


def place_patches(model: Any, *, decoder_only: bool = False) -> None:
    """Write the sines and cosines of MAE into the position tables of a new ViT-MAE.

    transformers leaves those of a model made from a config at zero, and they are never trained:
    such a model reads its patches in no order.
    """
    decoder, embeddings = model.decoder, model.vit.embeddings
    projection = embeddings.patch_embeddings.projection
    drawn = [decoder.mask_token, projection.weight, embeddings.cls_token]  # as well, and anew
    kept = [parameter.detach().clone() for parameter in drawn]
    marked = [projection, decoder.decoder_pos_embed, embeddings.position_embeddings]
    for each in marked:  # as done, or nothing would be written
        each._is_hf_initialized = False
    decoder.initialize_weights(embeddings.patch_embeddings.num_patches)
    if not decoder_only:
        embeddings.initialize_weights()
    for each in marked:
        each._is_hf_initialized = True
    with torch.no_grad():
        for parameter, value in zip(drawn, kept):
            parameter.copy_(value)


def _freeze_fixed(model: Any) -> None:
    """Freeze what the class declares fixed (position tables); `from_pretrained` forgets it."""
    with torch.device("meta"):
        declared = type(model)(model.config)
    fixed = {name for name, p in declared.named_parameters() if not p.requires_grad}
    for name, parameter in model.named_parameters():
        if name in fixed:
            parameter.requires_grad_(False)


def _tokenizer(source: Any) -> Any:
    from ..hf.loading import load_tokenizer

    return None if isinstance(source, nn.Module) else load_tokenizer(str(source))


def _image_processor(source: Any) -> Any:
    from ..hf.loading import load_image_processor

    return None if isinstance(source, nn.Module) else load_image_processor(str(source))


def _usual_processor(config: Any) -> Any:
    """What prepares images for a model that brings nothing: pixels become −1…1."""
    size = {"height": config.image_size, "width": config.image_size}
    half = [0.5] * config.num_channels
    with _quiet():  # it would like torchvision
        from transformers import ViTImageProcessor

        return ViTImageProcessor(size=size, image_mean=half, image_std=half)


def save_encoder(encoder: Encoder, folder: str | Path) -> None:
    """Write model and processor into a folder; config.json last, so that half a save never loads.

    What else lies in the folder stays.
    """
    from .. import hf
    from ..hf.saving import CONFIG
    from ..hf.weights import WRITTEN

    folder = Path(folder)
    new = folder / ".saving"
    shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
    new.mkdir(parents=True)
    with _quiet():
        encoder.processor.save_pretrained(new)
        if any(isinstance(part, MoE) for part in encoder.model.modules()):
            hf.save(encoder.model, new)
        else:
            encoder.model.save_pretrained(new)
    io.publish(new, folder, last=CONFIG, old=WRITTEN)
    shutil.rmtree(new)
