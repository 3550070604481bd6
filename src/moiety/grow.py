"""Let a layer grow: copy an expert, keep the function, carry the optimizer along.

    with moiety.watch(model, keep="choice") as routes:
        model(x)
    moiety.grow(model, optimizer=opt, routes=routes)

A copy joins its parent's family (see routing/families.py), so the output before and after is equal
to round-off for every sparse router; a dense gate shifts both logits by −log 2; a soft tree splits
its leaf. `how="rows"` copies the router's rows instead (as ALMA does in its language models), which
changes the function; the gap is reported. Under a capacity limit the members of a family share what
their first expert had. A limited dense gate has one more expert to limit, which shows as a gap.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .moe import MoE
from .routing import Routing
from .routing.families import Families
from .watch import Routes, moe_layers

Rows = Mapping[str, list[int] | str]


@dataclass(frozen=True)
class Growth:
    """What `grow` did to one layer."""

    layer: str
    parents: list[int]
    children: list[int]
    gap: float  # relative change of the layer's output on the probe


def grow(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    by: Literal["usage", "loss"] = "usage",
    *,
    routes: Routes | None = None,
    loss: Tensor | Sequence[Tensor] | None = None,
    parents: Sequence[int] | None = None,
    count: int = 1,
    how: Literal["family", "rows"] = "family",
    probe: Tensor | None = None,
) -> list[Growth]:
    """Copy the `count` experts of each MoE layer that do, or cost, the most.

    optimizer  the one that trains the model: growth replaces parameters, and it must hold the new
               ones, or these stay as they are
    by         "usage": the work of each expert (gate mass for a dense gate);
               "loss": the summed loss of the tokens it served
    routes     where that is read: what `watch(model, keep="choice")` recorded (for the usage of a
               sparse router, any watch will do)
    loss       for by="loss": the loss of every example (or token), one tensor a recorded call
    parents    the experts to copy, instead of `routes`
    count      how many experts of each layer to copy
    how        "family" keeps the function; "rows" copies the router's rows and does not
    probe      tokens [..., dim] on which the gap is measured; standard normal ones by default
    """
    _check(model, by, count, how)
    _check_sources(optimizer, routes, by, loss)
    layers = moe_layers(model)
    chosen = {}
    for name, layer in layers.items():  # everything is checked before anything changes
        picked = parents
        if picked is None:
            picked = _pick(_total(name, layer, routes, loss, by), count)
        _check_layer(name, layer, list(picked), how, optimizer)
        chosen[name] = list(picked)
    return [_grow_layer(n, m, chosen[n], how, optimizer, probe) for n, m in layers.items()]


def _check(model: nn.Module, by: str, count: int, how: str) -> None:
    if by not in ("usage", "loss"):
        raise ValueError(f'by must be "usage" or "loss", got {by!r}')
    if how not in ("family", "rows"):
        raise ValueError(f'how must be "family" or "rows", got {how!r}')
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("grow the module first and wrap it in DistributedDataParallel again")
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"count must be a whole number, at least 1, got {count!r}")


def _check_sources(optimizer: object, routes: object, by: str, loss: object) -> None:
    for word, value, kind in (("optimizer", optimizer, Optimizer), ("routes", routes, Routes)):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{word}= takes {kind.__name__}, got {type(value).__name__}")
    if loss is not None and by != "loss":
        raise ValueError('loss= has no effect without by="loss"')


def _check_layer(
    name: str, layer: MoE, parents: list[int], how: str, optimizer: Optimizer | None
) -> None:
    wrong = [p for p in parents if not 0 <= p < layer.experts.experts]
    if wrong or len(set(parents)) != len(parents):
        raise ValueError(
            f"parents must be distinct experts from 0 to {layer.experts.experts - 1}, got {parents}"
        )
    if how == "rows":
        layer.router.check_rows()
    if optimizer is not None and not any(id(p) in _groups(optimizer) for p in layer.parameters()):
        raise ValueError(f"the optimizer holds none of the parameters of layer {name!r}")


def contribution(routing: Routing, loss: Tensor | None, dense: bool) -> Tensor:
    """`[E]`: the loss (or, without one, the work) that went through each expert."""
    part_TE = routing.dense().double() if dense else routing.choice().double()
    if loss is None:
        return part_TE.sum(0)
    loss_T = loss.detach().flatten().double()
    if loss_T.numel() == 0 or routing.tokens % loss_T.numel():
        raise ValueError(
            f"{loss_T.numel()} losses do not fit a call of {routing.tokens} tokens: give one for "
            "each example or for each token"
        )
    return loss_T.repeat_interleave(routing.tokens // loss_T.numel()) @ part_TE


def _pick(total_E: Tensor, count: int) -> list[int]:
    """The experts that did, or cost, the most; of equal ones, the lower id."""
    if count > len(total_E):
        raise ValueError(f"count = {count}, but there are only {len(total_E)} experts")
    return torch.sort(total_E, descending=True, stable=True).indices[:count].tolist()


def _total(
    name: str, layer: MoE, routes: Routes | None, loss: Tensor | Sequence[Tensor] | None, by: str
) -> Tensor:
    """`[E]`: what each expert of a layer did, or cost, in all recorded calls."""
    if routes is None:
        raise ValueError(
            'grow needs to know what each expert did: pass routes of watch(model, keep="choice"), '
            "or name the experts with parents=[...]"
        )
    name = routes.find(name)
    if all(recorded != name for recorded, _ in routes.records):
        raise ValueError(f"the routes hold no call of layer {name!r}")
    if by == "usage" and not layer.router.dense:
        return routes.load()[name]
    calls = routes[name]
    losses: Sequence[Tensor | None] = [None] * len(calls)
    if by == "loss":
        if loss is None:
            raise ValueError('by="loss" needs loss=, the loss of every example of each call')
        losses = [loss] if isinstance(loss, Tensor) else list(loss)
        if len(losses) != len(calls):
            raise ValueError(f"{len(losses)} loss tensors for {len(calls)} recorded calls")
    pairs = zip(calls, losses, strict=True)
    return torch.stack([contribution(r, item, layer.router.dense) for r, item in pairs]).sum(0)


def _grow_layer(
    name: str,
    layer: MoE,
    parents: list[int],
    how: str,
    optimizer: Optimizer | None,
    probe: Tensor | None,
) -> Growth:
    probe = _probe(layer, probe)
    before = _output(layer, probe)
    first = layer.experts.experts
    params = dict(layer.named_parameters())
    rows = {
        **_prefixed("experts", layer.experts.copy(parents)),
        **_prefixed("router", _grow_router(layer, parents, how)),
    }
    layer._check()
    if optimizer is not None:
        _grow_optimizer(optimizer, params, dict(layer.named_parameters()), rows)
    elif any(p.grad is not None for p in params.values()):
        warnings.warn(
            "grow replaced parameters in training: pass optimizer=, or make a new one, or they "
            "stay as they are",
            stacklevel=4,
        )
    after = _output(layer, probe)
    gap = float((after - before).norm() / before.norm().clamp(min=1e-30))
    return Growth(name, list(parents), list(range(first, layer.experts.experts)), gap)


def _grow_router(layer: MoE, parents: list[int], how: str) -> Rows:
    router = layer.router
    if how == "rows":
        return router.copy_rows(parents)
    rows = router.split(parents) if router.families is None else None
    if rows is not None:
        return rows
    if router.families is None:
        like = next(layer.parameters(), torch.empty(0))  # experts of any kind may have none
        router.families = Families(router.dim, router.experts, like)
    return _prefixed("families", router.families.add(parents))


def _prefixed(prefix: str, rows: Rows) -> Rows:
    """Names seen from one level up; a string names the parameter that another is a copy of."""
    return {
        f"{prefix}.{name}": f"{prefix}.{row}" if isinstance(row, str) else row
        for name, row in rows.items()
    }


def _grow_optimizer(optimizer: Optimizer, old: dict, new: dict, rows: Rows) -> None:
    """Replace grown parameters in the optimizer, and let its state follow by the same rows."""
    where = _groups(optimizer)
    home = next(where[id(p)] for p in old.values() if id(p) in where)
    for name, p in new.items():
        if old.get(name) is p:
            continue
        source = rows.get(name, [])
        if isinstance(source, str):  # a copied module: its parameters are new ones
            if id(old[source]) in where:
                where[id(old[source])].append(p)
                if old[source] in optimizer.state:
                    optimizer.state[p] = copy.deepcopy(optimizer.state[old[source]])
        elif name not in old:  # the first split gate of a family
            _home_of(name, old, where, home).append(p)
        elif id(old[name]) in where:
            group = where[id(old[name])]
            group[next(i for i, q in enumerate(group) if q is old[name])] = p
            state = optimizer.state.pop(old[name], None)
            if state is not None:
                optimizer.state[p] = {k: _follow(v, old[name], source) for k, v in state.items()}


def _groups(optimizer: Optimizer) -> dict[int, list]:
    """The parameter list of the optimizer in which each parameter is."""
    return {id(p): g["params"] for g in optimizer.param_groups for p in g["params"]}


def _home_of(name: str, old: dict, where: dict, home: list) -> list:
    """The group of a parameter's siblings: a router's new gate learns like the router."""
    part = name.split(".")[0]
    return next(
        (where[id(p)] for n, p in old.items() if n.startswith(part) and id(p) in where), home
    )


def _follow(value: Any, old: Tensor, rows: list[int]) -> Any:
    """Optimizer state of a parameter, row by row; new rows start at zero."""
    # Factored state (Adafactor) has the rows, but not the shape, of its parameter.
    if not isinstance(value, Tensor) or value.dim() != old.dim() or len(value) != len(old):
        return value
    index = torch.tensor(rows, device=value.device)
    if value.shape[0] == 0:
        return value.new_zeros(len(rows), *value.shape[1:])
    kept = (index >= 0).view(-1, *[1] * (value.dim() - 1))
    return torch.where(kept, value[index.clamp(min=0)], 0)


def _probe(layer: MoE, probe: Tensor | None) -> Tensor:
    like = next(layer.experts.parameters(), torch.empty(0))
    if probe is None:
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(256, layer.router.dim, generator=generator)
    return probe.to(like.device, like.dtype)


@torch.no_grad()
def _output(layer: MoE, probe: Tensor) -> Tensor:
    was = [(m, m.training) for m in layer.modules()]
    layer.eval()
    watchers, layer._watchers = layer._watchers, ()
    try:
        return layer(probe).double()
    finally:
        layer._watchers = watchers
        for module, mode in was:
            module.training = mode
