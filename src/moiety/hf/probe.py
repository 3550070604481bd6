"""A small batch that a model can run, made from its config, or given.

Text, images, sound, encoder-decoders. Models that draw noise to mask patches (MAE) get a fixed one.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..modes import at_rest

BATCH, LENGTH = 2, 16


@dataclass(frozen=True)
class Probe:
    """Inputs of one forward pass: positional and by name."""

    args: tuple = ()
    kwargs: Mapping[str, Any] = ()  # type: ignore[assignment]

    def run(self, model: nn.Module) -> Any:
        # Models may draw (masked patches, stochastic depth left on): always the same draw.
        with torch.random.fork_rng(devices=_cuda(model)):
            torch.manual_seed(0)
            return model(*self.args, **dict(self.kwargs))

    def outputs(self, model: nn.Module) -> list[Tensor]:
        """The floating tensors that a model answers in eval mode, at real places, caches left out.

        With the states after every layer, where a model gives them: a fresh head that answers zero
        would hide a broken body.
        """
        more = {"output_hidden_states": True} if _tells_states(model) else {}
        with torch.no_grad(), evaluating(model), _leaving_no_hooks(model):
            answer = Probe(self.args, {**dict(self.kwargs), **more}).run(model)
        return [self._real(name, t.detach()) for name, t in _floating(answer)]

    def _real(self, name: str, t: Tensor) -> Tensor:
        """Without the places of padding; an encoder and a decoder have their own."""
        words = dict(self.kwargs)
        decodes = "decoder_input_ids" in words and not name.startswith("encoder")
        mask = words.get("decoder_attention_mask" if decodes else "attention_mask")
        if not isinstance(mask, Tensor) or mask.dim() != 2 or t.shape[:2] != mask.shape:
            return t
        return t[mask.bool().to(t.device)]

    def padded(self, model: nn.Module) -> Probe | None:
        """The same with the last example a quarter shorter; None where no mask says so.

        Ids become the padding id as well: classifiers look for the last token by it.
        """
        words = dict(self.kwargs)
        pad = getattr(getattr(model, "config", None), "pad_token_id", None)
        for stack in ("", "decoder_"):
            mask, ids = words.get(f"{stack}attention_mask"), words.get(f"{stack}input_ids")
            if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] < 2:
                continue
            cut = max(mask.shape[1] // 4, 1)
            words[f"{stack}attention_mask"] = mask = mask.clone()
            mask[-1, -cut:] = 0
            if isinstance(ids, Tensor) and isinstance(pad, int):
                words[f"{stack}input_ids"] = torch.where(mask.bool(), ids, pad)
        changed = any(words[word] is not value for word, value in dict(self.kwargs).items())
        return Probe(self.args, words) if changed else None


def make_probe(model: nn.Module, given: Any = None) -> Probe:
    """The probe that is given (a dict, a tensor, a tuple), or one made from the config."""
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model has no weights (it is on the meta device): load them first")
    if isinstance(given, Probe):
        return given
    if given is not None:
        return _probe(model, given)
    made = _from_config(model) if hasattr(model, "config") else [_plain(model)]
    return _first_that_runs(model, [_probe(model, inputs) for inputs in made])


def _probe(model: nn.Module, given: Any) -> Probe:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if isinstance(given, Tensor):
        return Probe(args=(given.to(device),))
    if isinstance(given, Mapping):
        words = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
        return Probe(kwargs=_with_noise(model, words))
    if isinstance(given, (tuple, list)):
        return Probe(args=tuple(v.to(device) if isinstance(v, Tensor) else v for v in given))
    raise ValueError(
        f"probe must be a tensor, a tuple, or a dict of model inputs, got {type(given).__name__}"
    )


def _first_that_runs(model: nn.Module, probes: list[Probe]) -> Probe:
    problem = ""
    for probe in probes:
        try:
            probe.outputs(model)
            return probe
        except Exception as error:  # another shape may fit
            problem = problem or f"{type(error).__name__}: {error}".split("\n")[0]
    raise ValueError(
        f"no input could be made up that {type(model).__name__} runs on: give one, probe={{...}} "
        f"({problem})"
    )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while, in full precision (TF32 would drown a gap), and without torch's fused
    encoder layer, which calls no module.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with at_rest(model), _full_precision():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """fp32 products without TF32, by the one of torch's two switches that is in use."""
    try:
        old = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        restore = partial(torch.set_float32_matmul_precision, old)
    except RuntimeError:  # the newer switch was used, and then torch refuses the older one
        matmul = torch.backends.cuda.matmul
        restore = partial(setattr, matmul, "fp32_precision", matmul.fp32_precision)
        matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def _leaving_no_hooks(model: nn.Module) -> Iterator[None]:
    """transformers hooks every layer, for good, when it is first asked for their states."""
    mark = "_output_capturing_hooks_installed"
    before = {m: (set(m._forward_hooks), mark in vars(m)) for m in model.modules()}
    try:
        yield
    finally:
        for module, (hooks, marked) in before.items():
            for new in set(module._forward_hooks) - hooks:
                del module._forward_hooks[new]
            if not marked:
                vars(module).pop(mark, None)


def gap(before: list[Tensor], after: list[Tensor]) -> float:
    """The largest change of any number, relative to the root mean square of its output."""
    if [a.shape for a in before] != [b.shape for b in after]:
        return math.inf
    worst = 0.0
    for a, b in zip(before, after, strict=True):
        finite = torch.isfinite(a)  # some models fill masked scores with -inf
        if not torch.equal(finite, torch.isfinite(b)):
            return math.inf
        a, b = a[finite].double(), b[finite].double()
        if a.numel():
            scale = a.square().mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
            worst = max(worst, float((b - a).abs().max() / scale))
    return worst


def _from_config(model: nn.Module) -> list[dict[str, Any]]:
    """Inputs that the model may run on, the likeliest first."""
    config: Any = model.config
    main = getattr(model, "main_input_name", "input_ids")
    accepted = inspect.signature(model.forward).parameters
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rest: dict[str, Any] = {}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        rest["decoder_input_ids"] = _ids(text, seed=1)
        rest["decoder_attention_mask"] = torch.ones_like(rest["decoder_input_ids"])
    if main == "input_ids":
        ids = _ids(text)
        words = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **rest}
        both = [dict(words, pixel_values=p) for p in _pictures(config, accepted)]
        # Text and image must both be given where the model compares them (CLIP and kin).
        return [*both, words] if "return_loss" in accepted else [words, *both]
    if main == "pixel_values":
        made = _images(config)
    else:
        made = _sounds(config)
    return [{main: value, **rest} for value in made]


def _pictures(config: Any, accepted: Mapping[str, Any]) -> list[Tensor]:
    if "pixel_values" not in accepted:
        return []
    return _images(getattr(config, "vision_config", config))


def _ids(config: Any, seed: int = 0) -> Tensor:
    special = {getattr(config, f"{w}_token_id", None) for w in ("pad", "eos", "bos", "mask")}
    listed = {i for s in special for i in (s if isinstance(s, list) else [s])}
    size = getattr(config, "vocab_size", None) or 4096  # models of bytes and characters name none
    plain = [i for i in range(min(size, 4096)) if i not in listed] or [0]
    length = min(LENGTH, _positions(config))
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(len(plain), (BATCH, length), generator=generator)
    return torch.tensor(plain)[pick]


def _positions(config: Any) -> int:
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return max(int(limit) - 4, 2) if isinstance(limit, int) and limit > 0 else LENGTH


def _images(config: Any) -> list[Tensor]:
    """An image for each example, or a film where the config counts frames."""
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    shape = getattr(config, "num_channels", None) or 3, height, width
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
    made = [_normal(BATCH, *shape)]
    return made if frames is None else [_normal(BATCH, frames, *shape), *made]


def _sounds(config: Any) -> list[Tensor]:
    """A wave, a spectrogram or a series: what fits is found by trying."""

    def read(*words: str) -> list[int]:
        values = (getattr(config, word, None) for word in words)
        return [v for v in values if isinstance(v, int) and v > 0]

    bands = read(
        "num_mel_bins",
        "input_feat_per_channel",
        "feature_projection_input_dim",
        "num_input_channels",
        "input_dim",
    )
    # Short ones first: attention over a model's full length may not fit in memory.
    lengths = sorted({64, *read("max_length", "context_length")})
    lengths += [2 * n for n in read("max_source_positions")]
    made = [_normal(BATCH, 2000)]
    for band in bands:
        for length in lengths:
            made += [_normal(BATCH, band, length), _normal(BATCH, length, band)]
    return made


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _with_noise(model: nn.Module, words: dict[str, Any]) -> dict[str, Any]:
    """Models that mask patches by random noise take it as an argument: a fixed one."""
    takes = "noise" in inspect.signature(model.forward).parameters
    pixels = words.get("pixel_values")
    patch = getattr(getattr(model, "config", None), "patch_size", None)
    if takes and "noise" not in words and isinstance(pixels, Tensor) and isinstance(patch, int):
        patches = (pixels.shape[-2] // patch) * (pixels.shape[-1] // patch)
        noise = torch.rand(pixels.shape[0], patches, generator=torch.Generator().manual_seed(0))
        words["noise"] = noise.to(pixels.device)
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    if like is not None:
        for word, value in words.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                words[word] = value.to(like.dtype)
    return words


def _plain(model: nn.Module) -> Tensor:
    """For a module without a config: tokens of the width that its first matrix reads."""
    like = next((p for p in model.parameters() if p.dim() == 2), None)
    if like is None:
        raise ValueError("no probe can be made for this module: give one, probe=x")
    return _normal(BATCH, LENGTH, like.shape[1]).to(like.dtype)


def _tells_states(model: nn.Module) -> bool:
    words = inspect.signature(model.forward).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in words.values())
    return hasattr(model, "config") and (open_ended or "output_hidden_states" in words)


def _floating(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in ("past_key_values", "loss"):
                yield from _floating(item, name or key)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _floating(item, name)


def _cuda(model: nn.Module) -> list[torch.device]:
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return list(devices)
