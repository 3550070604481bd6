"""Mixtures that grow: the expert that costs the most is copied, in every layer, through `grow`.

learner("growing-moe", lambda seed: TreeMLP(64))              # soft tree gates: exact
learner("growing-switch", make_language_model, how="rows")    # sparse: families exact, rows not

(ALMA, Caccia et al. 2022; digest 4, sections 3.3, 3.4 and 3.6.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from ..grow import Growth, grow
from ..moe import MoE
from ..routing.tree import Tree
from ..watch import Routes, moe_layers, watch
from .base import Learner, Phase
from .fitting import losses_of


class GrowingLayers(Learner):
    """What both growing mixtures share: when, which experts, and how a state is rebuilt."""

    options: ClassVar[tuple[str, ...]] = ("every", "copies", "split", "how")
    how: Literal["family", "rows"] = "family"

    def __init__(
        self,
        model: Callable[[int], nn.Module],
        *,
        every: int,
        count: int,
        split: str,
        **common: Any,
    ) -> None:
        for word, n in (("every", every), ("count", count)):
            if not isinstance(n, int) or n < 1:
                raise ValueError(f"{word} must be a whole number, at least 1, got {n!r}")
        if split not in ("loss", "usage"):
            raise ValueError(f'split must be "loss" or "usage", got {split!r}')
        self.every, self.copies, self.split = every, count, split
        self.history: list[dict[str, list[int]]] = []  # the copied experts of each growth, by layer
        super().__init__(model, **common)
        self.check(moe_layers(self.models[0]))

    def check(self, layers: Mapping[str, MoE]) -> None:
        """Raise where these layers cannot grow in this way."""

    def _grow(self, phase: Phase) -> dict[str, Any]:
        optimizer = self._carried_optimizer()
        routes, losses = self._look(phase)
        grown = grow(
            self.models[0],
            optimizer,
            by="loss" if self.split == "loss" else "usage",
            routes=routes,
            loss=losses if self.split == "loss" else None,
            count=self.copies,
            how=self.how,
        )
        if optimizer is not None:
            self._carry(optimizer)
        self.history.append({one.layer: one.parents for one in grown})
        return {"layers": [_plain(one) for one in grown]}

    def _carried_optimizer(self) -> Optimizer | None:
        """The optimizer of the last phase, where its state is carried on."""
        if self.carried[0] is None:
            return None
        optimizer = self.training.optimizer(_learned(self.models[0]))
        optimizer.load_state_dict(self.carried[0])
        return optimizer

    def _carry(self, grown: Optimizer) -> None:
        """Note the state of a grown optimizer in the order of the model's parameters.

        Growth appends parameters to it; the next phase numbers them as the model lists them.
        """
        ordered = self.training.optimizer(_learned(self.models[0]))
        for p in _learned(self.models[0]):
            if p in grown.state:
                ordered.state[p] = grown.state[p]
        self.carried[0] = ordered.state_dict()

    @torch.no_grad()
    def _look(self, phase: Phase) -> tuple[Routes, list[torch.Tensor]]:
        """What each expert did on validation, and the loss of each example there."""
        data, rows = phase.probe.to(self.device), self.training.eval_batch
        with watch(self.models[0], keep="choice") as routes:
            losses = [
                losses_of(self.models[0], x, y)
                for x, y in zip(data.x.split(rows), data.y.split(rows))
            ]
        return routes, losses

    def state(self) -> dict[str, Any]:
        return {**super().state(), "history": self.history}

    def load(self, state: Mapping[str, Any]) -> None:
        self.history = [dict(growth) for growth in state["history"]]
        super().load(state)

    def _rebuild(self, i: int, state: Mapping[str, Any]) -> nn.Module:
        """The model, grown again as it grew: its weights are then loaded."""
        model = self.build(i)
        layers = moe_layers(model)
        for growth in state["history"]:
            for name, parents in growth.items():
                grow(layers[name], parents=parents, how=self.how)
        return model


class GrowingMoE(GrowingLayers):
    """A mixture with soft tree gates; in each layer a leaf becomes a node above it and its copy.

    every   phases between growths
    split   which leaf: "loss" (sum of the losses through it, the paper's) or "usage" (its code's)
    count   leaves of a layer to split at a time
    """

    name = "growing-moe"

    def __init__(
        self,
        model: Callable[[int], nn.Module],
        *,
        every: int = 1,
        split: Literal["loss", "usage"] = "loss",
        count: int = 1,
        **common: Any,
    ) -> None:
        super().__init__(model, every=every, split=split, count=count, **common)

    def check(self, layers: Mapping[str, MoE]) -> None:
        for name, layer in layers.items():
            if not (isinstance(layer.router, Tree) and layer.router.dense):
                raise ValueError(
                    f"growing-moe splits soft tree gates; the router of layer {name!r} is "
                    f"{layer.router!r}: use one, or the learner growing-switch"
                )


class GrowingSwitch(GrowingLayers):
    """A sparse mixture, a Switch transformer for example, whose layers grow flat.

    every   phases between growths
    how     "families": a copy shares its parent's score, and a new gate chooses between the two
            (exact); "rows": a copy of the parent's router row competes with it (the paper's)
    split   which experts: those with the largest "loss" or "usage"
    count   experts of a layer to copy at a time
    """

    name = "growing-switch"

    def __init__(
        self,
        model: Callable[[int], nn.Module],
        *,
        every: int = 1,
        how: Literal["families", "rows"] = "families",
        split: Literal["loss", "usage"] = "loss",
        count: int = 2,
        **common: Any,
    ) -> None:
        if how not in ("families", "rows"):
            raise ValueError(f'how must be "families" or "rows", got {how!r}')
        self.how = "rows" if how == "rows" else "family"
        super().__init__(model, every=every, split=split, count=count, **common)

    @property
    def exact(self) -> bool:
        # A family shares the capacity it had; but a copy under a dense gate halves the weights by
        # which tokens with "priority" go first.
        return self.how == "family" and not any(
            layer.router.dense and layer.overflow == "priority"
            for layer in moe_layers(self.models[0]).values()
        )

    def check(self, layers: Mapping[str, MoE]) -> None:
        for layer in layers.values():
            if self.how == "rows":
                layer.router.check_rows()


def _learned(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _plain(one: Growth) -> dict[str, Any]:
    return {"layer": one.layer, "parents": one.parents, "children": one.children, "gap": one.gap}
