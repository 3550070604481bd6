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
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.stateless import _reparametrize_module

from ..moe import MoE
from ..train.transformer import Stacked
from .repeated import Repeated, Tensors

T = TypeVar("T")


class Part(Protocol):
    """A training that takes its steps with others."""

    captures: bool

    @property
    def trained_model(self) -> nn.Module: ...

    @property
    def half(self) -> bool:
        """Whether its products are in bfloat16."""

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
        halves = _halves(weights) if parts[0].half else {}

        def one(weights: Mapping[str, Tensor], halves: Tensors, tensors: Tensors) -> Any:
            known = Stacked({id(weights[name]): half for name, half in halves.items()})
            with _reparametrize_module(model, dict(weights), tie_weights=True), known:
                return parts[0].loss(tensors)

        all_copies = torch.func.vmap(one, randomness="different")
        with _no_questions():
            losses_S, told = all_copies(weights, halves, dict(tensors))
        learned = {name: own for name, own in weights.items() if own.requires_grad}
        slopes = torch.autograd.grad(losses_S.sum(), [*learned.values()], allow_unused=True)
        # A fused optimizer wants gradients to lie in memory as weights do.
        by_name = {name: g.contiguous() for name, g in zip(learned, slopes) if g is not None}
        for number, part in enumerate(parts):
            for name, p in part.trained_model.named_parameters():
                p.grad = by_name[name][number] if name in by_name else None
            part.apply()
        return told


@torch.no_grad()
def _halves(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All weights in bfloat16, on a GPU by a few kernels."""
    halves = {name: torch.empty_like(own, dtype=torch.bfloat16) for name, own in weights.items()}
    torch._foreach_copy_([*halves.values()], [*weights.values()])
    return halves


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
    """transformers asks whether a batch has padding at all, which has no one answer here.

    Where there is no mask to ask, as for images, it shall not make one: attention is slow with it.
    """
    from transformers import masking_utils

    usual = masking_utils.is_tracing
    masking_utils.is_tracing = lambda tensor=None: tensor is not None
    try:
        yield
    finally:
        masking_utils.is_tracing = usual
