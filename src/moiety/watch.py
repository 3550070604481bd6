"""See where the tokens went, collect the losses, and repeat recorded choices.

with moiety.watch(model) as routes:
    loss = task_loss(model(x), y) + routes.loss()
routes.summary()                    # per layer: load, entropy, dead experts, drops

with moiety.watch(model, keep="choice") as routes:
    model(x)
with moiety.replay(model, routes):
    model(x + noise)                # recorded choices, live weights (weights=True: recorded ones)

The MoE layers that come with `transformers` are seen as well (see `native`). Their models add
their own balance losses, so that `routes.loss()` is zero there.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from . import native
from .moe import MoE, Replayed
from .record import LayerSummary, Record, choice_alone, make_record, summarise, total
from .routing import Routing
from .routing.base import keep_real
from .routing.value import in_vmap

Keep = Literal["load", "choice", "all"]


class Routes:
    """What `watch` recorded. Layers are found by full name, or by a unique start or end of it."""

    collects = True  # False: the losses, and the graph behind them, are left to others

    def __init__(self, layers: list[str], keep: Keep) -> None:
        self.layers, self.keep = layers, keep
        self.balance: dict[str, dict[str, float]] = {}  # the weights of the losses, by layer
        self.records: list[tuple[str, Record]] = []
        self._terms: list[tuple[str, dict[str, Tensor]]] = []
        self._collected: list[tuple[str, dict[str, Tensor]]] = []
        self._taken = False

    def __repr__(self) -> str:
        return f"Routes(layers={self.layers}, keep={self.keep!r}, calls={len(self.records)})"

    def add(self, name: str, routing: Routing, terms: dict[str, Tensor]) -> None:
        """Record one call of a layer and its weighted losses.

        Where padding was routed (native layers do that), its slots are counted apart.
        """
        if terms and self.collects:
            self._terms.append((name, terms))
        real = keep_real(routing, routing.mask)
        kept = None if self.keep == "load" else real
        if self.keep == "choice":
            kept = choice_alone(real)
        self.records.append((name, make_record(real, routing, kept)))

    # -- losses --------------------------------------------------------------------------------

    def loss(self) -> Tensor:
        """The weighted balance losses of all layers and calls since the last time it was asked.

        Zero where no layer has any. Each layer's terms are computed on that layer alone and then
        added, so that no layer's collapse hides behind another's balance. A model that adds them
        to its `outputs.loss` itself leaves none, and asking for them again raises.
        """
        if self._taken and not self._terms:
            raise ValueError(
                "outputs.loss already holds the balance losses: leave out routes.loss(), and log "
                "them with routes.terms()"
            )
        terms = [term for _, call in self._terms for term in call.values()]
        self._collect()
        self._taken = False
        # Under vmap no tensor says that it requires a gradient.
        seen = terms and torch.is_grad_enabled() and not in_vmap()
        if seen and not any(t.requires_grad for t in terms):
            warnings.warn(
                "the balance losses carry no gradient: the layers ran under no_grad (reentrant "
                "gradient checkpointing does that; use_reentrant=False keeps it), or the gate is "
                "detached",
                stacklevel=2,
            )
        return sum(terms, torch.zeros(()))

    def taken(self) -> None:
        """Hear from a model that it has put all terms recorded so far into its own loss."""
        self._collect()
        self._taken = True

    def _collect(self) -> None:
        self._collected = [(n, {k: t.detach() for k, t in c.items()}) for n, c in self._terms]
        self._terms.clear()

    def terms(self) -> dict[str, dict[str, float]]:
        """The weighted losses by layer and name, as numbers to log.

        Those that wait for `loss()`, or else those that were collected last.
        """
        out: dict[str, dict[str, float]] = {}
        for name, call in self._terms or self._collected:
            layer = out.setdefault(name, {})
            for loss, term in call.items():
                layer[loss] = layer.get(loss, 0.0) + float(term.detach())
        return out

    # -- what happened -------------------------------------------------------------------------

    def find(self, name: str) -> str:
        """The full name of a layer, from itself or a unique start or end of it."""
        if name in self.layers:
            return name
        hits = [n for n in self.layers if n.startswith(name) or n.endswith(name)]
        if len(hits) != 1:
            what = f"fits {', '.join(hits)}" if hits else f"fits none of {', '.join(self.layers)}"
            raise KeyError(f"layer {name!r} {what}")
        return hits[0]

    def __getitem__(self, name: str) -> list[Routing]:
        """The decisions of a layer, one a call, in order."""
        if self.keep == "load":
            raise ValueError('choices were not kept: watch(model, keep="choice") or keep="all"')
        full = self.find(name)
        return [r.routing for n, r in self.records if n == full and r.routing is not None]

    def load(self) -> dict[str, Tensor]:
        """`[E]` for every layer: slots worked on, over all recorded calls."""
        return {name: total([r.load_E for r in calls]) for name, calls in self._by_layer()}

    def summary(self) -> dict[str, LayerSummary]:
        """For every layer that ran: load, entropy, dead experts, drop rate, effective experts."""
        return {name: summarise(calls) for name, calls in self._by_layer()}

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self.records.clear()
        self._terms.clear()
        self._taken = False

    def _by_layer(self) -> Iterator[tuple[str, list[Record]]]:
        for name in self.layers:
            calls = [record for n, record in self.records if n == name]
            if calls:
                yield name, calls


@contextlib.contextmanager
def watch(model: nn.Module, keep: Keep = "load") -> Iterator[Routes]:
    """Record the decisions of every MoE layer of a model, native ones of `transformers` as well.

    keep: "load" (counts only), "choice" (what was chosen, to replay), "all" (with gradients).
    """
    if keep not in ("load", "choice", "all"):
        raise ValueError(f'keep must be "load", "choice" or "all", got {keep!r}')
    layers, natives = _find(model)
    routes = Routes([*layers, *natives], keep)
    routes.balance = {name: dict(layer.balance) for name, layer in layers.items()}
    for name, layer in layers.items():
        layer._watchers = (*layer._watchers, (name, routes))
    try:
        with native.listen(model, natives, routes.add):
            yield routes
        trained = any(t.requires_grad for _, call in routes._terms for t in call.values())
        alone = not any(_collected_elsewhere(layer, routes) for layer in layers.values())
        if trained and alone and any(layer.training for layer in layers.values()):
            # They may still be collected after the block, but not once the routes are gone.
            weakref.finalize(routes, _warn_uncollected, routes._terms).atexit = False
    finally:
        for layer in layers.values():
            layer._watchers = tuple(w for w in layer._watchers if w[1] is not routes)


def _collected_elsewhere(layer: MoE, routes: Routes) -> bool:
    return any(r.collects for _, r in layer._watchers if r is not routes)


def _warn_uncollected(terms: list) -> None:
    if terms:
        warnings.warn(
            "balance losses were recorded but never collected: add routes.loss() to the loss",
            stacklevel=2,
        )


@contextlib.contextmanager
def replay(model: nn.Module, routes: Routes, *, weights: bool = False) -> Iterator[None]:
    """Repeat recorded choices, call by call, with live weights, or with the recorded ones as well.

    weights: freeze the combine weights too, so that nothing of the live routers is left. In native
    layers padding chooses for itself, and a gate that is none of the known ones (see
    `native`) leaves the recorded weights.
    """
    layers, natives = _find(model)
    missing = [name for name in routes.layers if name not in layers and name not in natives]
    if missing:
        raise ValueError(f"routes were recorded on other layers: {', '.join(missing)}")
    recorded = {name: Replayed(routes[name], weights) for name in routes.layers}
    ours = [name for name in recorded if name in layers]
    for name in ours:
        layers[name]._replayed = recorded[name]
    try:
        with native.substitute(natives, recorded):
            yield
    finally:
        for name in ours:
            layers[name]._replayed = None


def _find(model: nn.Module) -> tuple[dict[str, MoE], dict[str, native.Native]]:
    """Our MoE layers and native ones, by full name; a model with neither raises."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"a module with MoE layers is wanted, got {type(model).__name__}")
    layers = {_plain(name): m for name, m in model.named_modules() if isinstance(m, MoE)}
    natives = {_plain(name): block for name, block in native.blocks(model).items()}
    if not layers and not natives:
        raise ValueError(
            f"{type(model).__name__} has no MoE layer: neither a moiety.MoE nor experts with a "
            "router beside them, as transformers has"
        )
    return layers, natives


def moe_layers(model: nn.Module) -> dict[str, MoE]:
    """The `moiety.MoE` layers of a model by full name; a model without any raises."""
    layers, natives = _find(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no moiety.MoE layer; its own MoE layers "
            f"({', '.join(natives)}) can be watched and replayed, but not changed"
        )
    return layers


def _plain(name: str) -> str:
    """A layer's name as it was before `torch.compile` wrapped what holds it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod") or "moe"


def param_groups(model: nn.Module) -> list[dict]:
    """Parameters in up to three named groups for an optimizer: router, experts, rest.

    A group without parameters is left out, as optimizers refuse it.
    """
    layers = moe_layers(model).values()
    parts = {
        "router": [p for m in layers for p in m.router.parameters()],
        "experts": [p for m in layers for p in m.experts.parameters()],
        "rest": list(model.parameters()),
    }
    taken: set[nn.Parameter] = set()
    groups = []
    for name, params in parts.items():  # an expert may hold a layer with a router of its own
        own = [p for p in dict.fromkeys(params) if p not in taken]
        taken.update(own)
        if own:
            groups.append({"params": own, "name": name})
    return groups
