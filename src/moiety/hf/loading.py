"""A model, and what reads its input, from a folder or from the hub: safetensors, no remote code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn


def load_any(path_or_id: str) -> nn.Module:
    """The model in a folder that `save_pretrained` or `moiety.save` wrote, or of a hub id.

    Its class is the one its config names, if transformers has it, and the bare model otherwise.
    """
    import transformers

    from .saving import load
    from .transformers_hook import METHOD

    config = load_config(path_or_id)
    if _quant_method(config) == METHOD:
        return load(path_or_id)
    kind, words = named_class(config), {"config": config, "use_safetensors": True}
    if kind is None:  # a class of transformers itself has nothing remote
        kind, words = transformers.AutoModel, {**words, "trust_remote_code": False}
    try:
        return kind.from_pretrained(path_or_id, **words)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path_or_id} cannot be loaded: {_first_line(error)}") from None


def named_class(config: Any) -> Any:
    """The class of transformers that a config names, or None."""
    import transformers

    kind = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    known = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    return kind if known else None


def load_config(path_or_id: str) -> Any:
    """The config of a model; a folder or id without one raises."""
    import transformers

    folder = Path(path_or_id)
    if folder.exists() and not (folder / "config.json").is_file():
        raise ValueError(f"{path_or_id} is no model folder: there is no config.json in it")
    # No name of the hub.
    path = path_or_id.startswith((".", "/", "~")) or path_or_id.endswith("/")
    if not folder.exists() and (path or path_or_id.count("/") > 1):
        raise ValueError(f"there is no folder {path_or_id}")
    try:
        return transformers.AutoConfig.from_pretrained(path_or_id, trust_remote_code=False)
    except (OSError, ValueError) as error:
        where = "" if folder.exists() else "there is no such folder here, and from the hub: "
        raise ValueError(f"{path_or_id}: {where}{_first_line(error)}") from None


def load_tokenizer(path_or_id: str) -> Any:
    """The tokenizer of a model, or None if it has none."""
    import transformers

    folder = Path(path_or_id)
    if folder.is_dir() and not any(folder.glob("*token*")) and not any(folder.glob("vocab*")):
        return None  # transformers would make up an empty one
    try:
        return transformers.AutoTokenizer.from_pretrained(path_or_id, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return None


def load_image_processor(path_or_id: str) -> Any:
    """The image processor of a model, or None if it has none."""
    # By its module: transformers 5.17 hides the name where there is no torchvision.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(path_or_id, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return None


def _quant_method(config: Any) -> str | None:
    given = getattr(config, "quantization_config", None) or {}
    return given.get("quant_method") if isinstance(given, dict) else given.quant_method


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
