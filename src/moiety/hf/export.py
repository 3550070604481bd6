"""`export`: an upcycled decoder as a checkpoint of a mixture that `transformers` itself knows.

moiety.export(model, "mixtral", "dir")
AutoModelForCausalLM.from_pretrained("dir")           # without Moiety

Nothing is decided by the name of the model's class. The target is built from the model's config,
every weight must find its place there by name and shape, and the written checkpoint is loaded
again and must compute the same before the folder gets its name.
"""

from __future__ import annotations

import copy
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..experts import FeedForward
from .place import Mixed, mixtures
from .probe import Probe, gap, make_probe

TOLERANCE = 1e-4  # of the outputs, in fp32
NAMES = {  # of a layer of ours, and of the mixtures that transformers writes
    "moe.router.weight": "gate.weight",
    "moe.experts.w_in": "experts.gate_up_proj",
    "moe.experts.w_out": "experts.down_proj",
}


@dataclass(frozen=True)
class Kind:
    """How a kind of mixture is told what its layers are like."""

    experts: str  # the word in its config for the number of experts
    hidden: str  # ... for the hidden width of an expert
    dense: str | None = None  # ... for the list of layers that have no experts
    plain: str | None = None  # ... for weights that are renormalised or not


KINDS = {
    "mixtral": Kind("num_local_experts", "intermediate_size"),
    "qwen3_moe": Kind("num_experts", "moe_intermediate_size", "mlp_only_layers", "norm_topk_prob"),
}
NEEDED = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "rope_parameters",
)


def export(
    model: nn.Module,
    kind: str,
    folder: str | os.PathLike[str],
    *,
    probe: Any = None,
    overwrite: bool = False,
) -> Path:
    """Write an upcycled decoder as a "mixtral" or "qwen3_moe" checkpoint; return its folder.

    Both take gated silu experts without biases behind a linear top-k router without capacity.
    "mixtral" (Llama, Mistral and kin) has experts in every layer; "qwen3_moe" (Qwen3) also takes
    models with dense layers between. A part that does not fit is named. Balance losses are not
    carried over: the written model has one of its own, which `output_router_logits` turns on.

    probe      inputs to compare with, as for `upcycle`; None: made from the config
    overwrite  allow a folder that holds something; it is replaced when all has gone well
    """
    if kind not in KINDS:
        raise ValueError(f"export knows {' and '.join(KINDS)}, not {kind!r}")
    folder = Path(folder)
    if folder.exists() and not overwrite and (folder.is_file() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty: choose another, or overwrite=True")
    layers = dict(mixtures(model)) if isinstance(model, PreTrainedModel) else {}
    if not isinstance(model, PreTrainedModel) or not layers:
        raise ValueError(f"this {type(model).__name__} is no transformers model made by upcycle")
    for name, mixed in layers.items():
        _check_layer(name, mixed, kind)
    target = _target(model, layers, kind)
    _hand_over(model, target, layers, kind)
    target.generation_config = getattr(model, "generation_config", None)
    beside = folder.resolve().with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    try:
        target.save_pretrained(beside)
        _check_written(model, beside, make_probe(model, probe), kind)
        _rename(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


# -- does it fit -----------------------------------------------------------------------------------


def _check_layer(name: str, mixed: Mixed, kind: str) -> None:
    """Raise, naming it, for the first thing that the kind has no place for."""
    moe, router, experts = mixed.moe, mixed.moe.router, mixed.moe.experts
    misfits = [
        (not isinstance(experts, FeedForward), f"its experts are {type(experts).__name__}"),
        (not mixed.block.gated, "its experts are not gated"),
        (
            mixed.block.activation not in ("silu", "swish"),
            f"its experts use {mixed.block.activation}, not silu",
        ),
        (getattr(experts, "b_in", None) is not None, "its experts have biases"),
        (moe.shared is not None, "it has a shared expert"),
        (router.name != "top-k", f"router {router.name!r} is not a linear top-k router"),
        (router.families is not None, "its router has grown by families"),
        (moe.capacity_factor is not None, "it has a capacity"),
        (
            KINDS[kind].plain is None and router.weights_sum != "one",
            "the weights of a token do not sum to one (renormalise=False)",
        ),
    ]
    for wrong, what in misfits:
        if wrong:
            raise ValueError(f"{name} does not fit into {kind}: {what}")


def _target(model: PreTrainedModel, layers: dict[str, Mixed], kind: str) -> Any:
    """The model of that kind with this one's sizes; its weights are on the meta device."""
    words = {**_words(model.config, kind), **_sizes(model, layers, kind)}
    config = AutoConfig.for_model(kind, **words)
    config.dtype = model.dtype
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config)


def _words(config: Any, kind: str) -> dict[str, Any]:
    """What the model's config says and the target's understands, and what both must agree on."""
    for word in NEEDED:
        if getattr(config, word, None) is None:
            raise ValueError(f"{type(config).__name__} has no {word}, which {kind} needs")
    known = set(AutoConfig.for_model(kind).to_dict())
    own = {"architectures", "model_type", "transformers_version", "_name_or_path", "dtype"}
    words = {w: v for w, v in config.to_dict().items() if w in known - own}
    heads = config.num_attention_heads
    kinds = set(getattr(config, "layer_types", None) or [])
    if len(kinds) > 1 or kinds - {"full_attention", "sliding_attention"}:
        # A short probe would not see it.
        raise ValueError(
            f"the layers attend by {', '.join(sorted(kinds))}; those of {kind} do so all alike, "
            "with or without a window"
        )
    window = None if kinds == {"full_attention"} else getattr(config, "sliding_window", None)
    return {
        **words,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "sliding_window": window,
        **({"use_sliding_window": window is not None} if "use_sliding_window" in known else {}),
    }


def _sizes(model: PreTrainedModel, layers: dict[str, Mixed], kind: str) -> dict[str, Any]:
    """The target's words for what the mixtures are like; all must be alike."""
    words = KINDS[kind]
    sizes: dict[str, Any] = {}
    for name, mixed in layers.items():
        router, experts = mixed.moe.router, mixed.moe.experts
        mine: dict[str, Any] = {
            words.experts: experts.experts,
            words.hidden: getattr(experts, "hidden", None),
            "num_experts_per_tok": getattr(router, "k", None),
        }
        if words.plain is not None:
            mine[words.plain] = router.weights_sum == "one"
        for word, value in mine.items():
            if sizes.setdefault(word, value) != value:
                raise ValueError(
                    f"{name} has {word} = {value} and another layer {sizes[word]}, and those of "
                    f"{kind} are all alike"
                )
    places = [_layer(i) for i in range(model.config.num_hidden_layers)]
    for name in layers:
        if name not in places:
            raise ValueError(
                f"{name} has no place in {kind}, whose experts are at {places[0]} etc."
            )
    dense = [i for i, name in enumerate(places) if name not in layers]
    if words.dense is not None:
        sizes[words.dense] = dense
    elif dense:
        raise ValueError(f"layer {dense[0]} is dense, and {kind} has experts in every layer")
    return sizes


def _layer(number: int) -> str:
    """Where both kinds have their feed-forward blocks."""
    return f"model.layers.{number}.mlp"


# -- hand over, write, prove -----------------------------------------------------------------------


def _hand_over(model: nn.Module, target: nn.Module, layers: dict[str, Mixed], kind: str) -> None:
    """Give the target this model's very weights; nothing is copied."""
    mine = dict(_renamed(model, layers))
    theirs = dict(target.named_parameters(remove_duplicate=False))
    for name, weight in mine.items():
        if name not in theirs:
            raise ValueError(f"{name} has no place in {kind}")
        if weight.shape != theirs[name].shape:
            shapes = f"{list(weight.shape)}, and {kind} wants {list(theirs[name].shape)}"
            raise ValueError(f"{name} has the shape {shapes}")
    for name in theirs:
        if name not in mine:
            raise ValueError(f"{kind} needs {name}, which this model does not have")
    target.load_state_dict(mine, strict=False, assign=True)
    target.tie_weights()  # type: ignore[operator]


def _renamed(model: nn.Module, layers: dict[str, Mixed]) -> Iterator[tuple[str, Tensor]]:
    names = {f"{at}.{ours}": f"{at}.{theirs}" for at in layers for ours, theirs in NAMES.items()}
    for name, weight in model.named_parameters(remove_duplicate=False):
        yield names.get(name, name), weight


def _check_written(model: PreTrainedModel, folder: Path, inputs: Probe, kind: str) -> None:
    """Load what was written, and raise unless it computes what the model does, in fp32."""
    same = {"dtype": torch.float32, "attn_implementation": model.config._attn_implementation}
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, **same)
    loaded.to(model.device)
    # Rounding may swap two nearly equal experts, which says nothing about the checkpoint.
    exact = model if model.dtype == torch.float32 else copy.deepcopy(model).float()
    moved = gap(inputs.outputs(exact)[:1], inputs.outputs(loaded)[:1])
    # A half-precision model has rounded what is not saved, too (rotary frequencies).
    if not moved <= (TOLERANCE if exact is model else 100 * TOLERANCE):
        raise ValueError(
            f"as {kind} the outputs would differ by {moved:.1e}, though all weights find a place: "
            "this model computes something between them that its config does not tell"
        )


def _rename(beside: Path, folder: Path) -> None:
    """Let the new folder take the place of whatever is there."""
    folder = folder.resolve()
    old = beside.with_suffix(".old")
    if folder.exists():
        folder.rename(old)
    beside.rename(folder)
    if old.is_dir():
        shutil.rmtree(old)
    elif old.exists():
        old.unlink()
