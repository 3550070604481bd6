"""Find the feed-forward blocks of a model by what they compute, not by what they are called.

One forward pass on a probe is recorded, call by call. A block is a linear map D → F (or two, or one
to 2F), an activation, and a linear map F → D whose input equals, in numbers, what the formula of
`FeedForward` says. So it does not matter whether the code sits in a module of its own (most
decoders), in two (BERT) or in the middle of a layer (OPT, BART, `nn.TransformerEncoderLayer`).
What fits no formula but is a module that maps every token by itself is found too, as a "module".
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .linear import is_linear, widths
from .probe import Probe, evaluating
from .trace import Call, Trace, record

FEW = 8  # rows of a probe


@dataclass
class Block:
    """A feed-forward block: `outer(act(inner(x)))`, gated or not."""

    owner: str | None  # the module that is exactly this block, if there is one
    inner: list[str]  # the linear maps that read x; of two, the activated one first
    outer: str
    dim: int
    hidden: int
    activation: str | None  # a name of transformers' ACT2FN; None: a module that fits no formula
    gated: bool = False
    swapped: bool = False  # one inner map makes both halves, and the second is the activated one
    dropout: float = 0.0  # between activation and outer map
    after: float = 0.0  # dropout inside the owner, after the outer map
    x: Tensor | None = field(default=None, repr=False)  # what it read on the probe

    @property
    def name(self) -> str:
        """Where the mixture will sit."""
        return self.outer if self.owner is None else self.owner

    @property
    def modules(self) -> list[str]:
        return [*([] if self.owner is None else [self.owner]), *self.inner, self.outer]


def find_blocks(model: nn.Module, probe: Probe) -> list[Block]:
    """The feed-forward blocks of a model, in the order in which a probe passes them."""
    with evaluating(model):
        return _find(model, record(model, probe))


def _find(model: nn.Module, trace: Trace) -> list[Block]:
    linears = [c for c in trace.calls if is_linear(c.module)]
    blocks: dict[str, Block] = {}
    for place, outer in enumerate(linears):
        block = _match(model, trace, linears[max(place - 3, 0) : place], outer)
        if block is not None and block.outer not in blocks:
            blocks[block.outer] = block
    found = list(blocks.values())
    whole = _token_wise_modules(trace, {name for b in found for name in b.modules})
    order = {c.name: c.start for c in reversed(trace.calls)}
    return sorted([*found, *whole], key=lambda b: order[b.outer])


def _match(model: nn.Module, trace: Trace, before: list[Call], outer: Call) -> Block | None:
    """The block that ends in this linear call, if its input is what a formula says."""
    hidden, dim = widths(outer.module)
    inner = [c for c in before if widths(c.module)[0] == dim and _rows(c.x) == _rows(outer.x)]
    reads = [list(r) for n in (1, 2) for r in itertools.combinations(inner, n)][::-1]
    acts = _activations(model, trace, outer, inner[0].start if inner else outer.start)
    h = outer.x.reshape(-1, hidden)
    few, scale = h[:FEW], h.double().abs().max()  # a few rows tell most wrong formulas
    best: tuple[float, list[Call], bool, bool, Callable] | None = None
    for act, read in itertools.product(acts, reads):
        tried = (_distance(value, few, scale) for *_, value in _formulas(read, hidden, act, FEW))
        if not any(away <= _rounding(h) for away in tried):
            continue
        for gated, swapped, value in _formulas(read, hidden, act):
            away = _distance(value, h)
            if away <= _rounding(h) and (best is None or away < best[0]):
                best = away, read, gated, swapped, act
        if best is not None and best[0] == 0:
            break
    name = None if best is None else activation_name(best[-1])
    if best is None or name is None:
        return None
    _, read, gated, swapped, _ = best
    if swapped and len(read) == 2:
        read = read[::-1]
    start, x = min(c.start for c in read), read[0].x
    owner = _owner(trace, read, outer, x)
    after = 0.0 if owner is None else trace.between(outer.end, owner.end)
    return Block(
        owner=None if owner is None else owner.name,
        inner=[c.name for c in read],
        outer=outer.name,
        dim=dim,
        hidden=hidden,
        activation=name,
        gated=gated,
        swapped=swapped and len(read) == 1,
        dropout=trace.between(start, outer.start),
        after=after,
        x=x,
    )


def _formulas(
    read: list[Call], hidden: int, act: Callable, rows: int | None = None
) -> Iterator[tuple[bool, bool, Tensor]]:
    """(gated, swapped, value) of each way to make h from what the inner maps gave."""
    outs = [c.y.reshape(-1, c.y.shape[-1])[:rows] for c in read]
    if len(outs) == 1 and outs[0].shape[1] == hidden:
        yield False, False, _try(act, outs[0])
        return
    if len(outs) == 1 and outs[0].shape[1] == 2 * hidden:
        a, b = outs[0].chunk(2, -1)
    elif (
        len(outs) == 2 and all(o.shape[1] == hidden for o in outs) and _equal(read[0].x, read[1].x)
    ):
        a, b = outs
    else:
        return
    yield True, False, _try(act, a) * b
    yield True, True, a * _try(act, b)


def _try(act: Callable, t: Tensor) -> Tensor:
    """What a function that may be an activation answers; of others, NaN, which equals nothing."""
    try:
        value = act(t)
    except Exception:  # whatever a layer holds or calls may want another shape
        value = None
    fits = isinstance(value, Tensor) and value.shape == t.shape
    return value if fits else torch.full_like(t, torch.nan)


def _activations(model: nn.Module, trace: Trace, outer: Call, since: int) -> list[Callable]:
    """What may be the activation, the likeliest first.

    Modules without parameters that were called on the way; then functions that the layer holds as
    attributes; then all that transformers knows by name, for those written out in the code.
    """
    called = [
        c.module
        for c in trace.calls
        if since < c.start < outer.start and not any(True for _ in c.module.children())
        if not is_linear(c.module) and next(c.module.parameters(), None) is None
    ]
    path = outer.name.split(".")
    holders = [model.get_submodule(".".join(path[:n])) for n in range(len(path) - 1, 0, -1)]
    held = [v for m in [*holders[:2], model] for v in vars(m).values() if _is_function(v)]
    return [*called, *held, *known_activations().values()]


@functools.cache
def known_activations() -> dict[str, nn.Module]:
    """What transformers knows by name, bends and has nothing to learn.

    Without "linear": two maps with nothing between them are one map, such as an adapter's.
    """
    made = {name: ACT2FN[name] for name in ACT2FN if name not in (*LEARNED, "linear")}
    return {name: act for name, act in made.items() if next(act.parameters(), None) is None}


def _is_function(value: object) -> bool:
    return (
        callable(value) and not isinstance(value, (nn.Module, type)) and hasattr(value, "__name__")
    )


LEARNED = ("xielu",)  # an activation with parameters, which talks when it is made
_GRID = torch.cat([torch.linspace(-8, 8, 4001), torch.tensor([-50.0, 50.0])])


def activation_name(act: Callable) -> str | None:
    """The name in transformers' ACT2FN of what computes the same, to the bit if any does."""
    best, best_gap = None, 1e-6
    try:
        value = act(_GRID)
    except Exception:
        return None
    for name, known in known_activations().items():
        if isinstance(act, nn.Module) and type(known) is type(act) and _same_state(known, act):
            return name
        gap = float((known(_GRID) - value).abs().max())
        if gap < best_gap or (gap == 0 and best_gap > 0):
            best, best_gap = name, gap
    return best


def _same_state(a: nn.Module, b: nn.Module) -> bool:
    def plain(m: nn.Module) -> dict[str, object]:
        return {k: v for k, v in vars(m).items() if not k.startswith("_") and k != "training"}

    return plain(a) == plain(b)


def _owner(trace: Trace, read: list[Call], outer: Call, x: Tensor) -> Call | None:
    """The smallest module that reads x and answers what the outer map answers."""
    start = min(c.start for c in read)
    maps = {p for c in (*read, outer) for p in c.module.parameters()}
    around = [c for c in trace.calls if c.start < start and c.end > outer.end]
    for call in sorted(around, key=lambda c: c.end - c.start):
        if _replaceable(call) and _equal(call.x, x) and _equal(call.y, outer.y):
            # What else it may learn (a scale that starts at one) would be lost with it.
            inside = [c.module for c in trace.calls if call.start <= c.start and c.end <= call.end]
            own = {p for m in inside for p in m.parameters(recurse=False)}
            return call if own <= maps else None
    return None


def _replaceable(call: Call) -> bool:
    """Whether another module could stand in this one's place: it is not the model itself."""
    return call.plain and call.name != "" and call.x.shape == call.y.shape


def _token_wise_modules(trace: Trace, taken: set[str]) -> list[Block]:
    """Modules with a D → F and an F → D map that treat every token by itself."""
    blocks: dict[str, Block] = {}
    for call in sorted(trace.calls, key=lambda c: c.end - c.start):
        inside = [c for c in trace.calls if call.start < c.start and c.end < call.end]
        linears = [c for c in inside if is_linear(c.module)]
        if len(linears) < 2 or call.x.dim() < 3 or not _replaceable(call):
            continue
        dim, hidden = call.x.shape[-1], widths(linears[-1].module)[0]
        fits = widths(linears[0].module)[0] == dim == widths(linears[-1].module)[1]
        names = {call.name, *(c.name for c in inside)}
        known = taken | set(blocks) | {n for b in blocks.values() for n in b.modules}
        if fits and not names & known and _token_wise(call):
            first, last = linears[0].name, linears[-1].name
            blocks[call.name] = Block(
                call.name, [first], last, dim, hidden, activation=None, x=call.x
            )
    return list(blocks.values())


def _token_wise(call: Call) -> bool:
    """Whether the module maps [n, D] row by row, whatever order the rows come in."""
    rows, out = call.x.reshape(-1, call.x.shape[-1]), call.y.reshape(-1, call.y.shape[-1])
    order = torch.randperm(rows.shape[0], generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            again = call.module(rows[order])
    except Exception:
        return False
    changes = not _same(out, rows)  # a dropout or an identity is no block
    return changes and isinstance(again, Tensor) and _same(again, out[order])


def _rows(t: Tensor) -> int:
    return t.shape[:-1].numel()


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and bool((a.reshape(-1) == b.reshape(-1)).all())


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding."""
    return a.shape == b.shape and _distance(a, b) <= _rounding(b)


def _distance(a: Tensor, b: Tensor, scale: Tensor | None = None) -> float:
    """The largest difference, in units of the largest value; infinite where one is NaN."""
    scale = b.double().abs().max() if scale is None else scale
    away = (a.double() - b.double()).abs().max() / scale.clamp(min=1e-300)
    return float(away.nan_to_num(torch.inf))


def _rounding(t: Tensor) -> float:
    """What two orders of the same sums may differ by."""
    return max(8 * torch.finfo(t.dtype).eps, 4e-6)
