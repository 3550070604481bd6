"""Who is padding, and which token is it: what a model was given reaches its MoE layers.

A transformer gets `attention_mask` and `input_ids`, but hands only hidden states to the layers that
hold the experts. `follow` listens to the calls of everything around those layers and fills in what
they lack:

    model.block.mlp = moiety.MoE("top-k", dim=64, hidden=256, experts=8, k=2)
    follow(model, {"block.mlp": model.block.mlp})
    model(input_ids=ids, attention_mask=mask)      # padding takes no slot

Calls nest, so one stack is enough: its top says what holds for the layer that runs now.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from .moe import MoE
from .routing.base import recomputing


@dataclass(frozen=True, eq=False)
class Tokens:
    """What is known of the tokens of a call: `[B, L]` each, or None."""

    mask: Tensor | None = None  # True (or not zero) = real
    ids: Tensor | None = None

    def within(self, given: Mapping[str, Any]) -> Tokens:
        """What holds inside a module that was called with these arguments.

        An expanded mask (4-D or additive) says nothing more; the 2-D one of the model around it
        stays. The mask of an encoder-decoder belongs to its encoder, which is given it as well, so
        that neither stack inherits anything. Nor has a picture the tokens of the text beside it.
        """
        if "decoder_input_ids" in given or "decoder_attention_mask" in given:
            return Tokens()
        outer = Tokens() if "pixel_values" in given and "input_ids" not in given else self
        mask, ids = given.get("attention_mask"), given.get("input_ids")
        mask = _present(mask, given) if _is_table(mask) else outer.mask
        return Tokens(mask, ids if _is_table(ids) else outer.ids)


class Reader:
    """Listens to the modules around some layers; `read` says which tokens a layer has now.

    Its stack lives on the object, not on a thread (compiled code cannot follow that), so that one
    model runs in one thread at a time.
    """

    def __init__(self) -> None:
        self.stack: tuple[Tokens | None, ...] = ()
        self.seen = self.warned = False
        self._first = WeakTensorKeyDictionary()
        self._model: weakref.ref[nn.Module] | None = None

    def __reduce__(self) -> tuple:
        return Reader, ()  # a copy starts with nothing: what is remembered belongs to one call

    def __deepcopy__(self, memo: dict) -> Reader:
        """A copied model has a reader of its own; a layer copied alone still has that of its model
        (peft puts such copies into the model).
        """
        model = None if self._model is None else self._model()
        if model is not None and id(model) not in memo:
            return self
        copied = memo[id(self)] = Reader()
        copied._model = None if model is None else weakref.ref(memo[id(model)])
        return copied

    def listen(self, model: nn.Module, layers: Iterable[str]) -> list[RemovableHandle]:
        """Hook the model and everything between it and the layers."""
        self._model = weakref.ref(model)
        parts = [name.split(".") for name in layers]
        paths = {".".join(p[:n]) for p in parts for n in range(len(p))}
        handles = []
        for path in sorted(paths):
            module = model.get_submodule(path)
            level = _Level(self, tuple(inspect.signature(module.forward).parameters), path == "")
            handles += [
                module.register_forward_pre_hook(level.enter, with_kwargs=True),
                module.register_forward_hook(level.leave, always_call=True),
            ]
        return handles

    def read(self, x: Tensor, name: str) -> Tokens:
        """Mask and ids in the shape of x's tokens, `[B, L]` or flat, where they fit."""
        top = self.stack[-1] if self.stack else Tokens()
        if recomputing() and (top is None or not self.stack):
            top = self.recall(x)  # the layer itself may be what is checkpointed
            if top is None and self.seen:
                raise RuntimeError(
                    f"what {name} knew of its tokens (padding, ids) is lost when gradient "
                    "checkpointing repeats its forward: checkpoint with use_reentrant=False and "
                    "without saved-tensor hooks"
                )
        top = top or Tokens()
        self.remember(x, top)
        mask, ids = _fit(top.mask, x), _fit(top.ids, x)
        if top.mask is not None and mask is None:
            self.warn(
                f"an attention mask of shape {list(top.mask.shape)} does not fit the input "
                f"{list(x.shape)} of {name}, so padding counts as real there (chunked "
                "feed-forward does this: set chunk_size_feed_forward=0)"
            )
        return Tokens(mask, ids)

    # Gradient checkpointing repeats a forward inside the backward, when the model has long returned
    # and may have run on another batch. What it repeats gets the very tensor that it got the first
    # time, so the tokens are remembered by that.

    def remember(self, states: Tensor | None, tokens: Tokens) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or recomputing():
            return
        self.seen = self.seen or tokens.mask is not None or tokens.ids is not None
        if states is not None:
            self._first[states] = tokens

    def recall(self, states: Tensor | None) -> Tokens | None:
        return None if states is None else self._first.get(states)

    def warn(self, problem: str) -> None:
        if not self.warned and not torch.compiler.is_compiling():
            self.warned = True
            warnings.warn(problem, stacklevel=4)


@dataclass(eq=False)
class _Level:
    """The hooks of one module. Bound methods, not closures: they are copied and pickled with it."""

    reader: Reader
    names: tuple[str, ...]  # parameters of its forward
    root: bool = False

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if getattr(module, "_is_replica", False):
            raise RuntimeError(
                "nn.DataParallel runs copies of a model in threads, where masks cannot be told "
                "apart: launch with torchrun or accelerate, or show the process one GPU"
            )
        if self.root:  # an interrupted forward may have left something behind
            self.reader.stack = ()
        given = {**dict.fromkeys(self.names), **dict(zip(self.names, args)), **kwargs}
        stack = self.reader.stack
        outer = stack[-1] if stack else Tokens()
        states = _states(args, kwargs)
        if recomputing() and not stack and not self.root:
            outer = self.reader.recall(states)
        tokens = (outer or Tokens()).within(given)
        # None: a repeated forward whose tokens are not known.
        lost = outer is None and tokens.mask is None
        self.reader.stack = (*stack, None if lost else tokens)
        if not lost:
            self.reader.remember(states, tokens)
        self._check(given, tokens)

    def _check(self, given: dict[str, Any], tokens: Tokens) -> None:
        mask = given.get("attention_mask")
        model = given.get("input_ids") is not None or given.get("inputs_embeds") is not None
        if model and isinstance(mask, Tensor) and not _is_table(mask) and tokens.mask is None:
            self.reader.warn(
                f"padding cannot be read from an attention mask of shape {list(mask.shape)} and "
                f"type {mask.dtype}: MoE layers want one of shape [batch, length] and type long "
                "or bool, and take all tokens for real"
            )

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.reader.stack = self.reader.stack[:-1]


@dataclass(eq=False)
class _Filler:
    """The hook of an MoE layer: what its caller did not say."""

    reader: Reader
    name: str

    def fill(self, module: MoE, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        given = {**dict(zip(("x", "mask", "ids"), args)), **kwargs}
        x = given.pop("x")
        tokens = self.reader.read(x, self.name)
        for word in ("mask", "ids"):
            if given.get(word) is None:
                given[word] = getattr(tokens, word)
        return (x,), given


def follow(model: nn.Module, layers: Mapping[str, MoE]) -> list[RemovableHandle]:
    """Let the padding mask and token ids that a model is given reach these layers of it.

    layers: full name -> layer. The hooks stay, also in copies, until their handles are removed.
    """
    reader = Reader()
    handles = reader.listen(model, layers)
    for name, layer in layers.items():
        filler = _Filler(reader, name)
        handles.append(layer.register_forward_pre_hook(filler.fill, with_kwargs=True))
    return handles


def _is_table(t: Any) -> TypeGuard[Tensor]:
    return isinstance(t, Tensor) and t.dim() == 2 and not t.is_floating_point()


def _present(mask: Tensor, given: Mapping[str, Any]) -> Tensor:
    """With a cache the mask covers the past too: its last columns are for what is given now."""
    for name, dims in (("input_ids", 2), ("inputs_embeds", 3), ("hidden_states", 3)):
        t = given.get(name)
        if isinstance(t, Tensor) and t.dim() == dims:
            return mask[:, -t.shape[1] :] if mask.shape[1] > t.shape[1] else mask
    return mask


def _fit(table: Tensor | None, x: Tensor) -> Tensor | None:
    if table is None:
        return None
    lead = x.shape[:-1]
    if lead == table.shape:
        return table.to(x.device)
    if len(lead) == 1 and lead[0] == table.shape[0] * table.shape[1]:
        return table.reshape(-1).to(x.device)
    return None


def _states(args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    for t in (*args, kwargs.get("hidden_states")):
        if isinstance(t, Tensor) and t.is_floating_point():
            return t
    return None
