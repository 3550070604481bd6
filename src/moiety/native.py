"""The MoE layers that come with `transformers`, seen as `Routing`s.

They are known by structure, not by name: experts that are called with (states, index, weights), and
beside them, in the same block, a router with a row for each expert. The choice is caught on its way
into the experts, the logits on their way out of the router:

    with listen(model, blocks(model), lambda name, routing, terms: print(name, routing.load())):
        model(input_ids)

Which gate makes the weights of the logits is found out at the first call (see `gates`).
Native layers route padding like text: `active` says what was computed, `mask` who is padding.
A compiled model runs uncompiled meanwhile.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from .gates import GATES, Rule, find_rule, tells
from .moe import MoE, Replayed
from .routing import Routing
from .routing.base import recomputing
from .tokens import Reader, Tokens


class Native:
    """One native MoE block: what its router said last, and the gate once it is found."""

    def __init__(self, path: str, experts: nn.Module, router: nn.Module, count: int) -> None:
        self.path = path  # of the experts
        self.experts, self.router, self.count = experts, router, count
        self.names = tuple(inspect.signature(experts.forward).parameters)[:3]
        self.scores_TE: Tensor | None = None
        self.rule: Rule | None = None
        self._settled = self._ids = False

    @property
    def speakers(self) -> list[nn.Module]:
        """Who may give out the scores: the router last, as some keep their logits to themselves."""
        return [*(m for m in self.router.children() if _has_rows(m, self.count)), self.router]

    def hear(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Hook of a speaker: keep its scores for the call of the experts that follows."""
        parts = output if isinstance(output, (tuple, list)) else (output,)
        scores = (t for t in parts if isinstance(t, Tensor) and t.is_floating_point())
        found = next((t for t in scores if t.dim() and t.shape[-1] == self.count), None)
        if found is not None:
            self.scores_TE = _at_least_fp32(found)

    def routing(self, args: tuple, kwargs: dict[str, Any], tokens: Tokens) -> Routing:
        """The decision in a call of the experts."""
        _, choice, given = self._inputs(args, kwargs)
        weight = _at_least_fp32(given)
        index, active, dropped = self._read(choice, weight)
        scores, self.scores_TE = self.scores_TE, None
        if scores is not None and scores.shape[0] != index.shape[0]:
            scores = None
        routing = Routing(
            index=index,
            weight=weight,
            experts=self.count,
            tokens=index.shape[0],
            active=active,
            dropped=dropped,
            scores=scores,
            mask=None if tokens.mask is None else tokens.mask.reshape(-1).bool(),
        )
        return self._gated(routing, exact=torch.finfo(given.dtype).eps < 1e-6)

    def states(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        return self._inputs(args, kwargs)[0]

    def _inputs(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        given = {**dict(zip(self.names, args)), **kwargs}
        states, choice, weight = (given.get(name) for name in self.names)
        if not all(isinstance(t, Tensor) for t in (states, choice, weight)):
            raise ValueError(
                f"{self.path} was called without {' and '.join(self.names[1:])}: it cannot be "
                "watched"
            )
        return states, choice, weight  # type: ignore[return-value]

    def _read(self, choice: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`[T, K]`: expert ids, which of them work, and which a capacity limit dropped."""
        if choice.dim() == 3 and choice.shape[-1] == self.count:  # one-hot, no one where dropped
            active = choice.bool().any(-1)
            index = choice.long().argmax(-1)
            if self.scores_TE is not None and index.shape[1] == 1:
                wanted = self.scores_TE.detach().argmax(-1, keepdim=True)
                index = torch.where(active, index, wanted)
            return index, active, ~active
        index = choice.reshape(-1, choice.shape[-1]).long()
        if not self._ids and index.shape == weight.shape:
            self._ids = _are_ids(index, self.count)  # once: a GPU has to be waited for
        if index.shape != weight.shape or not self._ids:
            raise ValueError(
                f"{self.path} takes a choice of shape {list(choice.shape)} that is neither "
                f"[tokens, k] ids of {self.count} experts nor one-hot: it cannot be watched"
            )
        return index, None, None

    def _gated(self, routing: Routing, exact: bool) -> Routing:
        scores = routing.scores
        if scores is None or not routing.tokens:
            return routing
        if not self._settled:
            self.rule, self._settled = find_rule(routing, exact), tells(routing)
        if self.rule is None:
            return routing
        gate, rule = GATES[self.rule.gate](scores), self.rule
        return routing.replace(
            gate=gate, probs=gate, renormalise=rule.renormalise, scale=rule.scale
        )

    def call_with(
        self, routing: Routing, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """The arguments that make the experts carry out another decision."""
        states, choice, weight = self._inputs(args, kwargs)
        new = routing.index
        if choice.dim() == 3:
            new = F.one_hot(new, self.count)
            if routing.active is not None:
                new = new * routing.active[..., None]
        new = new.view(choice.shape).to(choice.dtype)
        three = (states, new, routing.weight.view(weight.shape).to(weight.dtype))
        # By position or by name, as it was: kernels have other names for the same arguments.
        at = min(len(args), 3)
        named = dict(zip(self.names[at:], three[at:]))
        return (*three[:at], *args[3:]), {**kwargs, **named}


# -- finding them ----------------------------------------------------------------------------------


def blocks(model: nn.Module) -> dict[str, Native]:
    """The native MoE blocks of a model, by the path of what holds router and experts."""
    found: dict[str, Native] = {}
    ours = {id(part) for m in model.modules() if isinstance(m, MoE) for part in m.modules()}
    for path, block in model.named_modules():
        if id(block) in ours:
            continue
        for name, experts in block.named_children():
            count = _count(experts)
            router = _router(block, experts, count) if count else None
            if count and router is not None:
                whole = f"{path}.{name}" if path else name
                found[path] = Native(whole, experts, router, count)
    return found


def _count(experts: nn.Module) -> int | None:
    """The number of experts, where a module is called like experts."""
    # A watch asks this of every module, so it looks at what is cheap first.
    count = vars(experts).get("num_experts")
    if not isinstance(count, int):
        own = experts._parameters.values()
        count = max((p.shape[0] for p in own if p is not None and p.dim() == 3), default=0)
    if not count:
        return None
    parameters = inspect.signature(experts.forward).parameters.values()
    named = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    called = len(named) >= 3 and all(p.default is not p.empty for p in named[3:])
    return count if called else None


def _router(block: nn.Module, experts: nn.Module, count: int) -> nn.Module | None:
    """The sibling with a row for each expert; of several the smallest (a shared expert is not)."""
    fitting = []
    for module in block.children():
        near = [module, *module.children()]
        if module is not experts and any(_has_rows(m, count) for m in near):
            fitting.append(module)
    return min(fitting, key=lambda m: sum(p.numel() for p in m.parameters()), default=None)


def _has_rows(module: nn.Module, count: int) -> bool:
    own = module.parameters(recurse=False)
    return any(p.dim() == 2 and p.shape[0] == count for p in own)


# -- reading tensors -------------------------------------------------------------------------------


def _at_least_fp32(t: Tensor) -> Tensor:
    t = t.reshape(-1, t.shape[-1])
    return t if t.dtype == torch.float64 else t.float()


def _are_ids(index: Tensor, count: int) -> bool:
    """Whether each row holds different experts (a row of a multi-hot table does not)."""
    ordered = index.sort(-1).values
    repeats = (ordered[:, 1:] == ordered[:, :-1]).any()
    return not bool(repeats | (ordered >= count).any())


# -- seeing and replaying --------------------------------------------------------------------------


@contextlib.contextmanager
def _hooked(handles: list[RemovableHandle]) -> Iterator[None]:
    """Take the hooks off at the end. Compiled code does not see them, so it runs uncompiled."""
    try:
        with torch.compiler.set_stance("force_eager") if handles else contextlib.nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()


def listen(
    model: nn.Module,
    natives: Mapping[str, Native],
    add: Callable[[str, Routing, dict[str, Tensor]], None],
) -> contextlib.AbstractContextManager[None]:
    """Tell `add` every decision of these blocks."""
    if not natives:
        return contextlib.nullcontext()
    reader = Reader()
    handles = reader.listen(model, [block.path for block in natives.values()])
    for name, block in natives.items():
        record = partial(_record, block, name, reader, add)
        handles += [m.register_forward_hook(block.hear) for m in block.speakers]
        handles.append(block.experts.register_forward_pre_hook(record, with_kwargs=True))
    return _hooked(handles)


def _record(
    block: Native,
    name: str,
    reader: Reader,
    add: Callable,
    module: nn.Module,
    args: tuple,
    kw: dict,
) -> None:
    if recomputing():
        block.scores_TE = None
        return
    tokens = reader.read(block.states(args, kw), name)
    # Gradient checkpointing counts what a forward saves, and the repeated one saves nothing here.
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        add(name, block.routing(args, kw, tokens), {})


def substitute(
    natives: Mapping[str, Native], recorded: Mapping[str, Replayed]
) -> contextlib.AbstractContextManager[None]:
    """Make blocks repeat recorded decisions, in order."""
    handles: list[RemovableHandle] = []
    for name in natives.keys() & recorded.keys():
        block = natives[name]
        hook = partial(_repeat, block, recorded[name])
        handles += [m.register_forward_hook(block.hear) for m in block.speakers]
        # Before all others, so that a watch sees what is carried out.
        pre = block.experts.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        handles.append(pre)
    return _hooked(handles)


def _repeat(
    block: Native, replayed: Replayed, module: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict[str, Any]]:
    if recomputing():
        raise ValueError("gradient checkpointing repeats calls: switch it off while you replay")
    live, recorded = block.routing(args, kwargs, Tokens()), replayed.next()
    if recorded.index.shape != live.index.shape:
        raise ValueError(
            f"a choice of shape {list(recorded.index.shape)} cannot be taken in {block.path}, "
            f"which chooses {list(live.index.shape)}"
        )
    chosen = replayed.take(recorded, live)
    if recorded.mask is not None:  # what padding did was not kept
        real = recorded.mask[:, None]
        active = torch.where(real, chosen.used(), live.used())
        chosen = chosen.replace(
            index=torch.where(real, chosen.index, live.index),
            weight=torch.where(real, chosen.weight, live.weight),
            active=active,
        )
    return block.call_with(chosen, args, kwargs)
