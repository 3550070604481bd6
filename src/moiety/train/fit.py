"""`fit` and `evaluate`: train a classifier, with the losses of its routers, and measure it.

losses = fit(model, train, epochs=10, seed=0)
accuracy = evaluate(model, test)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ..modes import at_rest
from ..moe import MoE
from ..watch import watch


def fit(
    model: nn.Module,
    train: TensorDataset,
    *,
    epochs: int = 10,
    batch: int = 64,
    lr: float = 4e-3,
    weight_decay: float = 0.01,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> list[float]:
    """Train with AdamW on the device the model is on; return the loss of every step.

    The learning rate rises to `lr` and falls again (one cycle). `seed` decides the order of the
    examples and the noise of the routers: the same seed on the same machine gives the same
    numbers. `on_step` is called after each step with its number.
    """
    device = _device(model)
    x, y = (t.to(device) for t in train.tensors)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    order = list(_batches(len(y), batch, epochs, seed))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=len(order))
    model.train()
    losses = []
    with seeded(seed, device):
        for step, chosen in enumerate(order, start=1):
            loss = _loss(model, x[chosen], y[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
            if on_step is not None:
                on_step(step)
    return torch.stack(losses).tolist() if losses else []  # read once: a GPU need not wait


@torch.no_grad()
def evaluate(model: nn.Module, data: TensorDataset, *, batch: int = 256) -> float:
    """The share of examples whose class has the largest logit; the model's mode is restored."""
    device, right = _device(model), 0
    with at_rest(model):
        for x, y in zip(*(t.to(device).split(batch) for t in data.tensors)):
            right += int((model(x).argmax(-1) == y).sum())
    return right / len(data)


def find_device(name: str) -> torch.device:
    """The device of that name, such as "cpu" or "cuda:1"; one that is not here raises."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError):
        here = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise ValueError(f"there is no device {name!r} here; there is {', '.join(here)}") from None
    return device


@contextmanager
def seeded(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Draw random numbers from a seed inside, and leave the generators as they were."""
    cuda = [device] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        yield


def _batches(examples: int, batch: int, epochs: int, seed: int) -> Iterator[Tensor]:
    # A generator of its own: the order must not depend on how much noise a router draws.
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.randperm(examples, generator=generator).split(batch)


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if not any(isinstance(part, MoE) for part in model.modules()):
        return F.cross_entropy(model(x), y)
    with watch(model) as routes:
        return F.cross_entropy(model(x), y) + routes.loss()


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
