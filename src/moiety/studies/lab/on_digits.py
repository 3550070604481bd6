"""What the studies of handwritten digits and `moiety demo` share: images, models, measures.

Every arm is the same small transformer; only its feed-forward parts differ: dense, or 8 experts
behind a router. The width of the experts makes the work for one token the same: (experts a token)
× (width of an expert) = (width of the dense part).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ... import cost
from ...data import digits
from ...models import PatchTransformer, dense
from ...moe import MoE
from ...train import evaluate, seeded
from ...watch import watch

DIM, DEPTH, HIDDEN, EXPERTS, BATCH = 48, 3, 128, 8, 64
TRAIN = 1000  # of the 1347 images that are not for the test; the others validate


@dataclass(frozen=True)
class Arm:
    """One model: a router by name, or dense, and how many experts are to work for a token."""

    name: str
    active: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    group: str | None = None


ARMS = [
    Arm("dense", active=1),
    Arm("softmax", active=EXPERTS),  # every expert works for every token
    Arm("top-k", options={"k": 2}),
    Arm("noisy-top-k", options={"k": 2}),
    Arm("switch", active=1),
    # Within an image: no answer depends on the other images of a batch.
    Arm("expert-choice", options={"capacity_factor": 2.0}, group="example"),
    Arm("sigmoid-balanced", options={"k": 2}),
    # Its gate starts dense and thins out by itself; `slots` holds it to two experts from the start.
    Arm("dselect-k", options={"k": 2, "slots": 2}),
    Arm("perturbed-cosine", options={"k": 2}),
    Arm("tree", options={"k": 2}),
    Arm("hash", options={"k": 2}),
]


def splits() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """The images to train, to choose by, and to test; the same for every seed."""
    both, test = digits()
    train = TensorDataset(*(t[:TRAIN] for t in both.tensors))
    validation = TensorDataset(*(t[TRAIN:] for t in both.tensors))
    return train, validation, test


def build(arm: Arm, seed: int) -> nn.Module:
    """The transformer of one arm, from a seed."""
    hidden = HIDDEN // arm.active

    def feedforward(dim: int) -> nn.Module:
        if arm.name == "dense":
            return dense(dim, hidden)
        words = {"hidden": hidden, "activation": F.gelu, "group": arm.group, **arm.options}
        return MoE(arm.name, EXPERTS, dim=dim, **words)

    with seeded(seed):
        return PatchTransformer(
            patches=16, patch_dim=4, classes=10, dim=DIM, depth=DEPTH, feedforward=feedforward
        )


def active_flops(model: nn.Module, test: TensorDataset) -> float:
    """Forward FLOPs per example, counted while the model runs; inactive slots cost nothing."""
    x = test.tensors[0].to(next(model.parameters()).device)
    layers = [part for part in model.modules() if isinstance(part, MoE)]
    usual = [layer.backend for layer in layers]
    for layer in layers:
        layer.backend = "loop"  # the plain path, all of whose products torch counts
    total = cost.forward_flops(lambda: model(x), model)
    for layer, backend in zip(layers, usual):
        layer.backend = backend
    return total / len(x)


def measure_routing(
    model: nn.Module, test: TensorDataset
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """The load of every expert on the test images; accuracy, balance and dead experts."""
    moes = [part for part in model.modules() if isinstance(part, MoE)]
    if not moes:
        return {}, {"accuracy": evaluate(model, test)}
    with watch(model) as routes:
        accuracy = evaluate(model, test)
    layers = list(routes.summary().values())
    losses = ", ".join(f"{name} {weight:g}" for name, weight in moes[0].balance.items())
    return {f"block {i}": layer.load for i, layer in enumerate(layers, start=1)}, {
        "accuracy": accuracy,
        "balance": sum(layer.effective / len(layer.load) for layer in layers) / len(layers),
        "dead": sum(len(layer.dead) for layer in layers),
        "losses": losses or "none",
    }
