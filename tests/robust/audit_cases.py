"""A small model with an MoE layer, its data, and an audit of it that several tests read."""

from functools import cache

import torch
from torch import nn

from moiety import MoE, watch
from moiety.robust import audit

QUICK = {"steps": 6, "masking": 2, "lipschitz": 0, "progress": False}
EPS = [0, 0.02, 0.1]
ATTACKS = ["pgd", "apgd", "apgd + router-margin", "apgd + overload", "apgd + diversity"]


class Net(nn.Module):
    """Four tokens of an input, through an MoE layer, to three classes."""

    def __init__(self, router="top-k", **options):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 16)
        self.moe = MoE(router, dim=16, hidden=16, experts=4, **options)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        h = self.inner(x.view(len(x), 4, 4)).relu()
        return self.head((h + 2 * self.moe(h)).mean(1))


def data(n=12, shape=(16,), classes=3):
    draw = torch.Generator().manual_seed(0)
    return torch.rand(n, *shape, generator=draw), torch.arange(n) % classes


def trained(kind=Net, **options):
    model, (x, y) = kind(**options), data()
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    for _ in range(80):
        with watch(model) as routes:
            loss = nn.functional.cross_entropy(model(x), y) + routes.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@cache
def plain():
    return trained(k=2)


@cache
def audited():
    """The audit of that model; read it, do not write to it."""
    return audit(plain(), data(), EPS, ATTACKS, **{**QUICK, "lipschitz": 2}).result
