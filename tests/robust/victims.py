"""Small models to attack, in float64, and inputs for them."""

import torch
from torch import nn

from moiety import MoE

DIM, CLASSES = 6, 5


def mlp(seed: int = 0, classes: int = CLASSES) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Linear(DIM, 16), nn.Tanh(), nn.Linear(16, classes)
    return nn.Sequential(*layers).double().eval()


def linear(seed: int = 0, classes: int = CLASSES) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(DIM, classes).double().eval()


class Mixed(nn.Module):
    """A dense layer, an MoE layer over a sequence of one token, and a head."""

    def __init__(self, router: str = "top-k", seed: int = 0, **options) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(DIM, 8)
        self.moe = MoE(router, 4, dim=8, hidden=16, **options)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        h = self.first(x)[:, None]
        return self.head((h + self.moe(h))[:, 0])


def mixed(router: str = "top-k", **options) -> nn.Module:
    return Mixed(router, **options).double().eval()


def inputs(count: int = 12, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, DIM, generator=generator, dtype=torch.float64)


def answers(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Labels on which the model is right."""
    with torch.no_grad():
        return model(x).argmax(-1)
