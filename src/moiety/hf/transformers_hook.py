"""Let `from_pretrained` build the mixtures that a config describes.

transformers has one hook by which a config changes a model before its weights are loaded: that of
quantisation methods. Ours is registered as one, by importing `moiety.hf`. After loading,
nothing of it is left on the model, which trains and saves like any other.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .place import describe_mixtures, mixtures, moved, rebuild
from .weights import headers, numbers

# The method is named in the log line of a program that does not know it: so it says what to do.
METHOD, VERSION = "moiety (import moiety.hf)", 1


class MixtureConfig(QuantizationConfigMixin):
    """What a config says of a model's mixtures; read off the model for as long as there is one.

    So that what is saved is what is there: a layer may have grown since it was made.
    """

    def __init__(
        self,
        mixtures: list[dict[str, Any]],
        receipt: dict[str, Any] | None = None,
        version: int = VERSION,
        **others: Any,
    ) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.mixtures, self.receipt, self.version = mixtures, receipt, version
        self._model: weakref.ref[nn.Module] | None = None

    @classmethod
    def of(cls, model: nn.Module) -> MixtureConfig:
        config = cls(describe_mixtures(model))
        config._model = weakref.ref(model)
        return config

    def model(self) -> nn.Module | None:
        """The model it belongs to, if that is still there."""
        return None if self._model is None else self._model()

    def to_dict(self) -> dict[str, Any]:
        model = self.model()
        if model is not None:
            self.mixtures = describe_mixtures(model)
            self.receipt = receipt_words(getattr(model, "_moiety_receipt", None))
        words = {"mixtures": self.mixtures, "receipt": self.receipt, "version": self.version}
        return {"quant_method": METHOD, **copy.deepcopy(words)}

    def get(self, word: str, default: Any = None) -> Any:  # transformers asks it like a dict
        return getattr(self, word, default)

    def __deepcopy__(self, memo: dict[int, Any]) -> MixtureConfig:
        """With a copied model, that of the copy; a config that is copied alone has no model."""
        model = self.model()
        again = MixtureConfig(**self.to_dict())
        if model is not None and id(model) in memo:
            again._model = weakref.ref(memo[id(model)])
        return again

    def __reduce__(self) -> tuple:
        return _unpickle, (self.to_dict(),)


def _unpickle(words: dict[str, Any]) -> MixtureConfig:
    return MixtureConfig(**words)


def mark(model: PreTrainedModel) -> None:
    """Let the model's config say which mixtures it holds, now and when it is saved.

    Not that of a model with a quantised base: there the place is taken, and `save` refuses.
    """
    said: Any = getattr(model.config, "quantization_config", None)
    read = isinstance(said, dict) and said.get("quant_method") == METHOD  # by AutoConfig
    if said is None or read or isinstance(said, MixtureConfig):
        model.config.quantization_config = MixtureConfig.of(model)


class MixtureBuilder(HfQuantizer):
    """Puts mixtures into a model before its weights are loaded, and checks them afterwards."""

    is_trainable = True

    def is_serializable(self) -> bool:
        return True

    def preprocess_model(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype | None = None,
        checkpoint_files: list[str] | None = None,
        **others: Any,
    ) -> None:
        config: Any = self.quantization_config
        described = here(model, config.mixtures, config.version)
        if checkpoint_files and all(str(f).endswith(".safetensors") for f in checkpoint_files):
            check_sizes(described, numbers(headers(map(Path, checkpoint_files))))
        self.unsaved = build(model, described)
        self.expected = model.state_dict(keep_vars=True)

    def postprocess_model(self, model: PreTrainedModel, **others: Any) -> None:
        del model.hf_quantizer
        self._check(model)
        for name, value in self.unsaved.items():
            put_buffer(model, name, value)
        finish(model, self.quantization_config.receipt)  # type: ignore[attr-defined]

    def _check(self, model: PreTrainedModel) -> None:
        """transformers leaves the shapes, and what is missing, to the quantisation method."""
        inside = {id(t) for _, m in mixtures(model) for t in m.state_dict(keep_vars=True).values()}
        for name, tensor in model.state_dict(keep_vars=True).items():
            like = self.expected[name]
            if tensor.shape != like.shape or tensor.is_floating_point() != like.is_floating_point():
                raise ValueError(
                    f"{name} should be {list(like.shape)} of {like.dtype}, but the file holds "
                    f"{list(tensor.shape)} of {tensor.dtype}"
                )
            tensor.requires_grad_(like.requires_grad)  # frozen bases, fixed positions
            # What transformers has loaded carries this mark.
            if id(tensor) in inside and not getattr(tensor, "_is_hf_initialized", False):
                raise ValueError(f"the weights of a mixture are missing: {name}")


def here(model: nn.Module, described: Any, version: Any) -> list[dict[str, Any]]:
    """The descriptions by the names they have in this model.

    A bare model may be read from one with a head, and the other way round; and a part (an encoder)
    from a model that has another part as well, whose mixtures are then left out.
    """
    if version != VERSION:
        raise ValueError(
            f"the model was saved in format {version!r}, this Moiety reads {VERSION}: update it"
        )
    try:
        names = [_name_here(model, words["block"]["outer"]) for words in described]
        found = [
            {**words, "block": moved(words["block"], words["block"]["outer"], name)}
            for words, name in zip(described, names, strict=True)
            if name is not None
        ]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the description of the mixtures cannot be read: {error!r}") from None
    if described and not found:
        raise ValueError(f"{type(model).__name__} has none of the modules that held the mixtures")
    return found


def _name_here(model: nn.Module, name: str) -> str | None:
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    names = (name, name.removeprefix(prefix), prefix + name)
    for new in names:
        with contextlib.suppress(AttributeError):
            model.get_submodule(new)
            return new
    # A part that is not in this model; or one that is, without the module: `rebuild` will say so.
    return name if any(hasattr(model, new.split(".")[0]) for new in names) else None


def check_sizes(described: list[dict[str, Any]], stored: int) -> None:
    """An expert holds at least `dim` numbers: more of them than the files have is no model."""
    for words in described:
        count, dim = words["experts"]["count"], words["block"]["dim"]
        if type(count) is not int or type(dim) is not int or not 0 < count * dim <= stored:
            raise ValueError(
                f"{words['block']['outer']}: the files do not hold {count!r} experts of {dim!r}"
            )


def build(model: nn.Module, described: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Rebuild mixtures in a dense model; returns what of them is not saved, by name."""
    unsaved = {}
    for words in described:
        try:
            mixed = rebuild(model, words)
        except (TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise ValueError(f"a mixture cannot be built as described: {error!r}") from error
        saved = mixed.state_dict()
        for name, buffer in mixed.named_buffers():
            if name not in saved and not buffer.is_meta:
                unsaved[f"{mixed.block.name}.{name}"] = buffer.clone()
    return unsaved


def put_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, last = name.rpartition(".")
    holder = model.get_submodule(path)
    like = next(holder.parameters(), value)
    holder._buffers[last] = value.to(like.device)


def finish(model: nn.Module, receipt: dict[str, Any] | None) -> None:
    """After loading: keep the receipt, wire the layers."""
    from .upcycle import wire  # it imports what is above

    if receipt is not None:
        model._moiety_receipt = receipt_of(receipt)
    wire(model)


def receipt_words(receipt: Any) -> dict[str, Any] | None:
    if receipt is None:
        return None
    words = dataclasses.asdict(receipt)
    return {**words, "gap": words["gap"] if math.isfinite(words["gap"]) else None}


def receipt_of(words: dict[str, Any]) -> Any:
    from .upcycle import Receipt

    try:
        return Receipt(**{**words, "gap": math.inf if words["gap"] is None else words["gap"]})
    except (TypeError, KeyError) as error:
        raise ValueError(f"the receipt cannot be read: {error}") from None


def register() -> None:
    """Tell transformers, once."""
    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantization_config(METHOD)(MixtureConfig)
        auto.register_quantizer(METHOD)(MixtureBuilder)
