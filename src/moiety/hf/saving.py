"""Save an upcycled model as what it is, and load it back.

moiety.save(model, "dir")
model = moiety.load("dir")
model = moiety.load("dir", into=module)         # what transformers has no class for

The folder holds config.json and safetensors, as `save_pretrained` writes them. With `moiety.hf`
imported, `from_pretrained` loads it too; without, it raises.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import extract_model_from_parallel
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..io import publish, read_json, write_json
from ..moe import MoE
from .place import describe_mixtures, mixtures, shape_of
from .transformers_hook import (
    METHOD,
    VERSION,
    MixtureConfig,
    build,
    check_sizes,
    finish,
    here,
    mark,
    put_buffer,
    receipt_words,
)
from .weights import (
    WRITTEN,
    Stored,
    check_digests,
    digests,
    numbers,
    stored,
    tensors_of,
    weight_files,
)

FORMAT = "moiety"  # of a plain module's config.json; a PreTrainedModel has its own

CONFIG = "config.json"


# -- save ------------------------------------------------------------------------------------------


def save(model: nn.Module, dir: str | os.PathLike[str], max_shard_size: str = "5GB") -> None:
    """Write config.json and weights to a folder; the config last, so that half a save never loads.

    What else lies in the folder (a tokenizer) stays.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"save takes a module, got {type(model).__name__}")
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    folder = Path(dir)
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as made:
        new = Path(made)
        config = _write(model, new, max_shard_size)
        said = config if config.get("format") == FORMAT else config["quantization_config"]
        said["files"] = digests(weight_files(new))
        write_json(new / CONFIG, config)
        publish(new, folder, last=CONFIG, old=WRITTEN)


def _write(model: nn.Module, folder: Path, max_shard_size: str) -> dict[str, Any]:
    """Write the weights, and return what config.json is to say."""
    described = describe_mixtures(model)
    layers = [m for m in model.modules() if isinstance(m, MoE)]
    if not layers:
        raise ValueError(f"this {type(model).__name__} has no MoE layer of Moiety to save")
    if isinstance(model, PreTrainedModel) and len(described) == len(layers):
        return _write_pretrained(model, folder, max_shard_size)
    state = {}
    for name, tensor in _once(model).items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is no tensor, and only tensors can be saved")
        state[name] = tensor.detach().contiguous()
    save_torch_state_dict(state, folder, max_shard_size=max_shard_size)
    return {
        "format": FORMAT,
        "version": VERSION,
        "class": type(model).__name__,
        "mixtures": described,
        "receipt": receipt_words(getattr(model, "_moiety_receipt", None)),
    }


def _write_pretrained(model: PreTrainedModel, folder: Path, max_shard_size: str) -> dict[str, Any]:
    before = getattr(model.config, "quantization_config", None)
    mark(model)
    if not isinstance(model.config.quantization_config, MixtureConfig):
        raise ValueError("a mixture on a quantised base cannot be saved: save its trained weights")
    try:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    finally:  # a part of a model shares its config with the whole, which it goes on to describe
        if isinstance(before, MixtureConfig) and before.model() is not None:
            model.config.quantization_config = before
    return read_json(folder / CONFIG)


def _once(module: nn.Module) -> dict[str, Tensor]:
    """The state dict with every tied tensor under its first name only."""
    state = module.state_dict(keep_vars=True)
    first = {id(t): name for name, t in reversed(state.items())}
    return {name: t for name, t in state.items() if first[id(t)] == name}


# -- load ------------------------------------------------------------------------------------------


def load(
    dir: str | os.PathLike[str],
    into: nn.Module | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Read a folder that `save`, or `save_pretrained` of an upcycled model, wrote; in eval mode.

    into    the module to fill, in place: the dense one, which then gets the mixtures, or one that
            has the same already. Only a model that transformers has a class for needs none.
    dtype   of the floating tensors; None: as saved, or with `into` that of the module

    Anything missing, left over, damaged or of another shape raises a ValueError that names it.
    """
    folder = Path(dir)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is no model folder: there is no {CONFIG} in it")
    config = read_json(folder / CONFIG)
    said = _said(config, folder)
    files = weight_files(folder)
    if isinstance(said.get("files"), dict):
        check_digests(folder, files, said["files"])
    found = stored(folder)
    if into is not None:
        model = _fill(into, said, found, folder).to(dtype=dtype)
    elif said is config:
        raise ValueError(
            f"{folder} holds the weights of a {config.get('class', 'module')}, which you have to "
            "make: load(dir, into=module)"
        )
    else:
        model = _pretrained(folder, config, dtype)
    return model.to(device=device).eval()


def _said(config: Any, folder: Path) -> dict[str, Any]:
    """The part of the config that is about mixtures."""
    if not isinstance(config, dict):
        raise ValueError(f"{folder / CONFIG} does not hold a config")
    if config.get("format") == FORMAT:
        return config
    said = config.get("quantization_config")
    if not isinstance(said, dict) or said.get("quant_method") != METHOD:
        raise ValueError(f"{folder} holds no mixtures: load it with from_pretrained")
    return said


def _pretrained(folder: Path, config: dict[str, Any], dtype: torch.dtype | None) -> nn.Module:
    kind: Any = _model_class(folder, config)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if (folder / name).exists():
            raise ValueError(f"{folder} holds an adapter ({name}), not a whole model")
    try:
        model, info = kind.from_pretrained(
            folder,
            dtype="auto" if dtype is None else dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # whatever a broken config makes transformers stumble over
        why = str(error).strip().partition("\n")[0]
        raise ValueError(f"{folder} cannot be loaded: {why or type(error).__name__}") from error
    for word in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[word]:
            what = word.removesuffix("_keys")
            raise ValueError(f"{folder}: {what} in the weights: {sorted(map(str, info[word]))[0]}")
    return model


def _model_class(folder: Path, config: dict[str, Any]) -> type[PreTrainedModel]:
    """Only what transformers itself has, by its own mapping: a folder brings no code."""
    for holder, word, value in _words(config):
        foreign = word.endswith(("_implementation", "_internal")) and "/" in str(value)
        if word in ("auto_map", "transformers_weights", "custom_generate") or foreign:
            raise ValueError(
                f"{folder / CONFIG} names code or files of its own ({holder}{word}), which are "
                "never used: build the model and give it, load(dir, into=model)"
            )
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    kind: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    model_type: Any = config.get("model_type")
    known = isinstance(kind, type) and issubclass(kind, PreTrainedModel)
    if not known or model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"{folder / CONFIG}: transformers has no {name!r} of type {model_type!r}; build the "
            "model and give it, load(dir, into=model)"
        )
    if kind.config_class is not CONFIG_MAPPING[model_type]:
        raise ValueError(f"{folder / CONFIG}: {name} is no model of type {model_type!r}")
    return kind


def _words(config: dict[str, Any], holder: str = "") -> list[tuple[str, str, Any]]:
    """(where, key, value) of all entries, nested ones too."""
    out = []
    for word, value in config.items():
        out.append((holder, word, value))
        if isinstance(value, dict):
            out += _words(value, f"{holder}{word}.")
    return out


# -- into a module ---------------------------------------------------------------------------------


def _fill(
    module: nn.Module, said: dict[str, Any], found: dict[str, Stored], folder: Path
) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise ValueError(f"into= takes a module, got {type(module).__name__}")
    described = here(module, said.get("mixtures"), said.get("version"))
    check_sizes(described, numbers(found))
    present = describe_mixtures(module)
    if present and present != described:
        raise ValueError(f"the module has other mixtures than {folder / CONFIG} describes")
    missing = [] if present else described
    trial = shape_of(module)  # first without memory: what fails must leave the module as it was
    build(trial, missing)
    _check(trial, found, folder)
    unsaved = build(module, missing)
    _materialise(module)
    _copy(module, found)
    for name, value in unsaved.items():
        put_buffer(module, name, value)
    if missing or said.get("receipt"):
        finish(module, said.get("receipt"))
    return module


def _check(module: nn.Module, found: dict[str, Stored], folder: Path) -> None:
    state = module.state_dict(keep_vars=True)
    for key, at in found.items():
        if key not in state:
            raise ValueError(f"{at.file} holds {key}, which {type(module).__name__} has not")
        if tuple(state[key].shape) != at.shape:
            raise ValueError(
                f"{at.file}: {key} is {list(at.shape)}, in the module {list(state[key].shape)}"
            )
        if state[key].is_floating_point() != at.floating:
            raise ValueError(f"{at.file}: {key} is not of type {state[key].dtype}")
    there = {id(state[key]) for key in found}
    for key, tensor in state.items():
        if id(tensor) not in there:  # tied ones are stored once
            raise ValueError(f"{folder}: {key} is missing in the weights")


def _materialise(module: nn.Module) -> None:
    """Give what was rebuilt memory, on the device of the rest."""
    rest = next((p.device for p in module.parameters() if not p.is_meta), torch.device("cpu"))
    for _, mixed in mixtures(module):
        mixed._apply(lambda t: torch.empty_like(t, device=rest) if t.is_meta else t.to(rest))


@torch.no_grad()
def _copy(module: nn.Module, found: dict[str, Stored]) -> None:
    state = module.state_dict()
    for key, tensor in tensors_of(found):
        state[key].copy_(tensor)
