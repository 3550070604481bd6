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

    config = load_config(path_or_id)
    if _quant_method(config) == "moiety":
        from .saving import load

        return load(path_or_id)
    names = getattr(config, "architectures", None) or [""]
    kind = getattr(transformers, names[0], None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        kind = transformers.AutoModel
    words = {"config": config, "use_safetensors": True, "trust_remote_code": False}
    if kind is not transformers.AutoModel:
        del words["trust_remote_code"]  # a class of transformers itself has nothing remote
    try:
        return kind.from_pretrained(path_or_id, **words)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path_or_id} cannot be loaded: {_first_line(error)}") from None


def load_config(path_or_id: str) -> Any:
    """The config of a model; a folder or id without one raises."""
    import transformers

    folder = Path(path_or_id)
    if folder.exists() and not (folder / "config.json").is_file():
        raise ValueError(f"{path_or_id} is no model folder: there is no config.json in it")
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
    import transformers

    try:
        return transformers.AutoImageProcessor.from_pretrained(path_or_id, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return None


def _quant_method(config: Any) -> str | None:
    given = getattr(config, "quantization_config", None) or {}
    return given.get("quant_method") if isinstance(given, dict) else given.quant_method


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
