"""Several trainings of equal structure as one program.

    made = together([lambda crew, s=s: further_pretrain(model, data[s], seed=s, crew=crew, **words)
                     for s in range(8)])

A step of a small model is hundreds of kernels that leave a GPU idle, and eight of them together are
about as many. So each call runs as if it were alone, but where it would change its weights it waits
for the others; then the losses of all are one vmapped call on stacked weights, and every training
goes on with its own gradients and its own optimizer. The weights of its model are views of the
stack from its first step on, so that all else it does (checks, scores, saves) needs no copy.

Calls take turns: one runs at a time and in fixed order, so that what they draw does not depend on
threads. Some may end before others, or have another loss for a while; only those with one loss are
together then. A training tells the crew by `Part` what to do. Dropout is drawn for all at once, so
that it depends on who is there, as it does on when each was killed and went on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode

from ..moe import MoE
from ..train.layers import HAVE_TRITON
from .repeated import Repeated, Tensors

T = TypeVar("T")
WIDEST = 4096  # numbers that a layer norm is over, so that they fit into registers
# What may stand between queries, keys and values: it changes no number.
VIEWS = (Tensor.view, Tensor.reshape, Tensor.transpose, Tensor.permute, Tensor.shape.__get__)  # type: ignore[attr-defined]


class Part(Protocol):
    """A training that takes its steps with others."""

    captures: bool

    @property
    def trained_model(self) -> nn.Module: ...

    @property
    def alike(self) -> Hashable:
        """Equal for those that have one loss."""

    def loss(self, tensors: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """Its loss with the weights that its model has now, and what it tells."""

    def fit(self, tensors: Tensors, length: int) -> Tensors:
        """The same, padded to so many tokens."""

    def apply(self) -> None:
        """Change the weights by their gradients."""


class Member:
    """The place of one call in a crew."""

    def __init__(self) -> None:
        self.turn, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.part: Part | None = None  # that waits for a step
        self.tensors: Tensors = {}
        self.told: dict[str, Tensor] = {}
        self.found: Any = None
        self.error: BaseException | None = None
        self.over = self.stopped = False

    def step(self, part: Part, tensors: Tensors) -> dict[str, Tensor]:
        """Take a step with the others; what it tells are numbers, not yet read."""
        self.part, self.tensors = part, tensors
        self._rest()
        return self.told

    def _rest(self) -> None:
        """Let the others have their turns."""
        self.done.release()
        self.turn.acquire()
        if self.stopped:
            raise Stopped

    def _work(self, call: Callable[[Member], Any]) -> None:
        self.turn.acquire()
        try:
            if not self.stopped:
                self.found = call(self)
        except Stopped:
            pass
        except BaseException as error:  # raised again where the crew is
            self.error = error
        self.over = True
        self.done.release()


class Stopped(Exception):
    """Another member failed."""


def together(calls: Sequence[Callable[[Member], T]]) -> list[T]:
    """What the calls return, each of which is given its place in the crew."""
    crew, members = Crew(), [Member() for _ in calls]
    threads = [
        threading.Thread(target=member._work, args=(call,), daemon=True)
        for member, call in zip(members, calls)
    ]
    for thread in threads:
        thread.start()
    try:
        with torch.random.fork_rng():  # members seed the numbers of all
            _take_turns(crew, members)
    finally:
        for member in members:
            member.stopped = True
            member.turn.release()
        for thread in threads:
            thread.join()
        for member in members:  # graphs hold memory
            member.part, member.tensors, member.told, member.error = None, {}, {}, None
        crew.close()
    return [member.found for member in members]


def _take_turns(crew: Crew, members: Sequence[Member]) -> None:
    while live := [member for member in members if not member.over]:
        for member in live:
            member.part = None
            member.turn.release()
            member.done.acquire()
            if member.error is not None:
                raise member.error
        if waiting := [member for member in live if member.part is not None]:
            crew.step(waiting)


class Crew:
    """The steps of all that wait for one: those of one loss together."""

    def __init__(self) -> None:
        self.stacks: dict[Hashable, Stack] = {}

    def step(self, members: Sequence[Member]) -> None:
        groups: dict[Hashable, list[Member]] = {}
        for member in members:
            assert member.part is not None
            groups.setdefault(member.part.alike, []).append(member)
        for alike in [alike for alike in self.stacks if alike not in groups]:
            self.stacks.pop(alike).close()  # all of them have ended
        for alike, own in groups.items():
            self.stacks.setdefault(alike, Stack()).step(own)

    def close(self) -> None:
        for stack in self.stacks.values():
            stack.close()


class Stack:
    """The stacked weights of some trainings, and their steps."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.weights: dict[str, Tensor] = {}
        self.steps: dict[tuple[int, ...], Callable[[Tensors], dict[str, Tensor]]] = {}

    def step(self, members: Sequence[Member]) -> None:
        parts = [member.part for member in members if member.part is not None]
        if any(part not in self.parts for part in parts):
            self._begin(parts)
        here = {self.parts.index(part) for part in parts}
        self.steps = {
            places: step for places, step in self.steps.items() if here.issuperset(places)
        }
        kinds: dict[tuple[str, ...], list[Member]] = {}  # some steps may have no teacher
        for member in members:
            kinds.setdefault(tuple(member.tensors), []).append(member)
        for own in kinds.values():
            self._step(own)

    def _step(self, members: Sequence[Member]) -> None:
        parts = [member.part for member in members if member.part is not None]
        places = tuple(self.parts.index(part) for part in parts)
        if places not in self.steps:
            update = lambda tensors: self._update(places, tensors)  # noqa: E731
            self.steps[places] = Repeated("a crew", update) if parts[0].captures else update
        told = self.steps[places](_stacked(parts, [member.tensors for member in members]))
        for number, member in enumerate(members):
            member.told = {name: each[number] for name, each in told.items()}

    def close(self) -> None:
        """Let go of all memory: steps and stack hold each other."""
        self.parts, self.steps, self.weights = [], {}, {}

    def _begin(self, parts: list[Part]) -> None:
        """Lay the weights of all side by side, those of each model a view."""
        self.parts, self.steps, self.weights = parts, {}, {}
        weights = [dict(part.trained_model.named_parameters()) for part in parts]
        shapes = [{name: p.shape for name, p in own.items()} for own in weights]
        if any(own != shapes[0] for own in shapes):
            raise ValueError("only models of equal structure can be trained together")
        for name, module in parts[0].trained_model.named_modules():
            if isinstance(module, MoE | _BatchNorm) and not all(
                map(_is_constant, module.buffers())
            ):
                raise ValueError(
                    f"{name} counts in a state of its own: it cannot be trained with others"
                )
        for name, first in weights[0].items():
            stacked = torch.stack([own[name].detach() for own in weights])
            for own, mine in zip(weights, stacked):
                own[name].data = mine
            self.weights[name] = stacked.requires_grad_(first.requires_grad)
        buffers = [dict(part.trained_model.named_buffers()) for part in parts]
        for name, buffer in buffers[0].items():
            if _is_constant(buffer):
                self.weights[name] = torch.stack([own[name] for own in buffers])

    def _update(self, places: tuple[int, ...], tensors: Tensors) -> dict[str, Tensor]:
        """One step of those at these places."""
        parts = [self.parts[place] for place in places]
        weights = self.weights
        if len(places) < len(self.parts):  # the others have ended, or do something else
            weights = {
                name: torch.stack([own.detach()[place] for place in places])
                for name, own in weights.items()
            }
            for name, own in weights.items():
                own.requires_grad_(self.weights[name].requires_grad)
        model = parts[0].trained_model

        def one(weights: Mapping[str, Tensor], tensors: Tensors) -> Any:
            with _reparametrize_module(model, dict(weights), tie_weights=True), Stacked():
                return parts[0].loss(tensors)

        with _no_questions():
            losses_S, told = torch.func.vmap(one, randomness="different")(weights, dict(tensors))
        learned = {name: own for name, own in weights.items() if own.requires_grad}
        slopes = torch.autograd.grad(losses_S.sum(), [*learned.values()], allow_unused=True)
        # A fused optimizer wants gradients to lie in memory as weights do.
        by_name = {name: g.contiguous() for name, g in zip(learned, slopes) if g is not None}
        for number, part in enumerate(parts):
            for name, p in part.trained_model.named_parameters():
                p.grad = by_name[name][number] if name in by_name else None
            part.apply()
        return told


def _is_constant(buffer: Tensor) -> bool:
    """Whether training leaves it: what is counted is of whole numbers."""
    return buffer.is_floating_point()


def _stacked(parts: Sequence[Part], each: Sequence[Tensors]) -> Tensors:
    """The tensors of all, texts padded to the longest."""
    if "input_ids" in each[0]:
        longest = max(tensors["input_ids"].shape[1] for tensors in each)
        each = [part.fit(tensors, longest) for part, tensors in zip(parts, each)]
    return {name: torch.stack([tensors[name] for tensors in each]) for name in each[0]}


@contextmanager
def _no_questions() -> Iterator[None]:
    """transformers asks whether a batch has padding at all, which has no one answer here."""
    from transformers import masking_utils

    usual, masking_utils.is_tracing = masking_utils.is_tracing, lambda *_: True
    try:
        yield
    finally:
        masking_utils.is_tracing = usual


class Stacked(TorchFunctionMode):
    """Inside a vmapped function: linear layers, attention, dropout and norms of all copies as one.

    vmap has its own ways for them. The one for linear layers adds the bias in a kernel of its own,
    and in float32 even where products are in bfloat16; those for dropout and, on a GPU, for layer
    norm take several passes where one will do.
    """

    def __init__(self) -> None:
        super().__init__()
        # By the last linear layer: what it read, whether with gradients, and its cast.
        self.read: tuple[Tensor, bool, Tensor] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        own = {
            F.linear: self.linear,
            F.scaled_dot_product_attention: self.attend,
            F.dropout: self.drop,
            F.layer_norm: self.norm,
        }
        if func is not F.linear and func not in VIEWS:
            self.read = None  # it may be something else now
        return own.get(func, func)(*args, **(kwargs or {}))

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.dim() != 2 or not _is_stacked(input, weight, bias):
            return F.linear(input, weight, bias)
        return _Linear.apply(self.cast(input), weight, bias)

    def cast(self, input: Tensor) -> Tensor:
        """As products want it, once where several layers read the same: queries, keys, values."""
        if not torch.is_autocast_enabled(input.device.type) or input.dtype == torch.float64:
            return input
        known = self.read is not None and self.read[0] is input
        if self.read is None or not known or self.read[1] != torch.is_grad_enabled():
            half = input.to(torch.get_autocast_dtype(input.device.type))
            self.read = input, torch.is_grad_enabled(), half
        return self.read[2]

    def drop(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if inplace or not training or not p or not _is_stacked(input):
            return F.dropout(input, p, training, inplace)
        return _Drop.apply(input, p)

    def norm(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        plain = weight is None or bias is None or len(normalized_shape) > 1
        if plain or not _runs_here(input) or not _is_stacked(input, weight, bias):
            return F.layer_norm(input, normalized_shape, weight, bias, eps)
        half = torch.is_autocast_enabled(input.device.type)
        return _Norm.apply(input, weight, bias, eps, torch.float32 if half else input.dtype)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        parts = query, key, value, attn_mask
        if not _is_stacked(*parts):
            return F.scaled_dot_product_attention(*parts, dropout_p, is_causal, **more)
        return _Attend.apply(*parts, dropout_p, is_causal, more)


class _Vmapped(Function):
    """What vmap sees; the plain operation in its rule is what runs."""

    @staticmethod
    def forward(*_: Any) -> Tensor:
        raise NotImplementedError("the layers of many copies exist under vmap only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        raise NotImplementedError("the layers of many copies exist under vmap only")


def _is_stacked(*parts: Tensor | None) -> bool:
    """Whether copies differ in any of them: vmap asks no rule where all share all."""
    return any(part is not None and torch._C._functorch.is_batchedtensor(part) for part in parts)


def _runs_here(x: Tensor) -> bool:
    """Whether there are kernels for it."""
    wide = x.shape[-1] > WIDEST or x.dtype not in (torch.float32, torch.bfloat16, torch.float16)
    return x.is_cuda and HAVE_TRITON and not wide


def _copies(t: Tensor, dim: int | None, size: int) -> Tensor:
    """With all copies in front."""
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


class _Linear(_Vmapped):
    @staticmethod
    def vmap(
        info: Any, dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        x, weight = (_copies(t, dim, info.batch_size) for t, dim in zip((x, weight), dims))
        rows, turned = x.reshape(len(x), -1, x.shape[-1]), weight.transpose(1, 2)
        if bias is None:
            y = torch.bmm(rows, turned)
        else:
            y = torch.baddbmm(_copies(bias, dims[2], info.batch_size)[:, None], rows, turned)
        return y.view(*x.shape[:-1], y.shape[-1]), 0


class _Attend(_Vmapped):
    @staticmethod
    def vmap(
        info: Any,
        dims: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        causal: bool,
        more: Mapping[str, Any],
    ) -> tuple[Tensor, int]:
        size = info.batch_size
        q, k, v = (_copies(t, d, size).flatten(0, 1) for t, d in zip((query, key, value), dims))
        if mask is not None and (dims[3] is not None or len(mask) > 1):
            mask = _copies(mask, dims[3], size).flatten(0, 1)
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, **more)
        return y.unflatten(0, (size, -1)), 0


class _Drop(_Vmapped):
    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, p: float) -> tuple[Tensor, int]:
        return torch.native_dropout(_copies(x, dims[0], info.batch_size), p, True)[0], 0


class _Norm(_Vmapped):
    @staticmethod
    def vmap(
        info: Any,
        dims: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, int]:
        from ..train.layer_norm import layer_norm

        x, weight, bias = (_copies(t, d, info.batch_size) for t, d in zip((x, weight, bias), dims))
        return layer_norm(x, weight, bias, eps, dtype), 0
