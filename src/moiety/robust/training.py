"""PGD adversarial training (Puigcerver et al. 2022, §5): a batch is attacked before its update.

    losses = fit_attacked(model, train, eps=8 / 255, steps=10, epochs=20)     # as `train.fit`

In `train.loop` the loss attacks its own batch:

    def loss(rows):
        return F.cross_entropy(model(attack_batch(model, x[rows], y[rows])), y[rows])

The attack sees the model in eval mode, so without noise of routers and without dropout, and leaves
no trace: no counter moves, no load is counted, no balance loss is collected, no random number is
used up. The balance losses are those of the one forward on the attacked batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ..moe import MoE
from ..train import fit, step_seed
from .ball import Ball, Norm
from .noise import Noise
from .pgd import PGD
from .target import Bounds, Normalize, Target, check_inputs, plain_inputs

EPS = 8 / 255


def attack_batch(
    model: nn.Module | Target,
    x: Tensor,
    y: Tensor,
    *,
    eps: float = EPS,
    steps: int = 10,
    rel_stepsize: float | None = None,
    random_start: bool = False,
    norm: Norm = "linf",
    bounds: Bounds = (0.0, 1.0),
    seed: int = 0,
) -> Tensor:
    """The batch after PGD on the model as it is now; the last point of each example.

    The batch is attacked whole, as it is trained on: where a capacity couples examples, they
    are coupled here too. `seed` decides a random start and nothing else: give each step its own
    (drawn by `torch.randint`, it survives a resume of `train.loop`).
    """
    target = model if isinstance(model, Target) else Target(model)
    attack = PGD(steps=steps, rel_stepsize=rel_stepsize, random_start=random_start)
    noise = Noise(seed, torch.arange(len(x), device=x.device))
    with target.at_rest(), _unwatched(target.model):
        return attack(target, x, y, Ball(eps, norm, bounds), noise, keep="last").detach()


def fit_attacked(
    model: nn.Module,
    train: TensorDataset,
    *,
    normalize: Normalize = None,
    eps: float = EPS,
    steps: int = 10,
    rel_stepsize: float | None = None,
    random_start: bool = False,
    norm: Norm = "linf",
    bounds: Bounds = (0.0, 1.0),
    seed: int = 0,
    **options: Any,
) -> list[float]:
    """`train.fit` on attacked batches, with its options; return the loss of every step.

    `seed` is that of `fit`, and each step draws its random start from it. With eps = 0 the numbers
    are those of `fit`.
    """
    x, y = train.tensors
    check_inputs(x, y, bounds)
    x, y = plain_inputs(x, y)
    attack = partial(
        attack_batch,
        eps=eps,
        steps=steps,
        rel_stepsize=rel_stepsize,
        random_start=random_start,
        norm=norm,
        bounds=bounds,
    )
    attacked = _Attacked(Target(model, normalize=normalize), x, y, attack, seed)
    return fit(attacked, TensorDataset(torch.arange(len(y)), y), seed=seed, **options)


class _Attacked(nn.Module):
    """A model that is called with the numbers of examples, since an attack needs their labels."""

    def __init__(
        self, target: Target, x: Tensor, y: Tensor, attack: Callable[..., Tensor], seed: int
    ) -> None:
        super().__init__()
        self.model, self.target, self.attack = target.model, target, attack
        self.seed, self.step = seed, 0
        self.x, self.y = (t.to(target.device) for t in (x, y))

    def forward(self, rows: Tensor) -> Tensor:
        self.step += 1
        seed = step_seed(self.seed, self.step)
        x = self.attack(self.target, self.x[rows], self.y[rows], seed=seed)
        return self.target(x).logits


@contextlib.contextmanager
def _unwatched(model: nn.Module) -> Iterator[None]:
    """Hide a model's layers from those who watch it: the forwards of an attack are no training."""
    layers = [(part, part._watchers) for part in model.modules() if isinstance(part, MoE)]
    for layer, _ in layers:
        layer._watchers = ()
    try:
        yield
    finally:
        for layer, watchers in layers:
            layer._watchers = watchers
