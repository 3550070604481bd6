"""After growth the copies of an expert go different ways: other weights, for other tokens."""

import pytest
import torch
from torch import nn

from moiety import MoE, watch
from moiety.anytime.backbones import PooledTree, TreeMLP
from moiety.anytime.base import Phase
from moiety.anytime.data import Examples
from moiety.anytime.fitting import Training
from moiety.anytime.learners import learner
from moiety.experts import ModuleExperts
from moiety.models import PatchTransformer
from moiety.watch import moe_layers

STEPS = 200
SIDE = 8  # of an image


def two_rules(seed: int, *shape: int) -> Phase:
    """Rows of two kinds, shifted up or down, and the rule of one is the other's turned round."""
    g = torch.Generator().manual_seed(seed)
    up = torch.randint(2, (300,), generator=g)
    x = torch.randn(300, *shape, generator=g) + (2.0 * up - 1).view(-1, *[1] * len(shape))
    parts = x.flatten(2).mean(2) if x.dim() > 2 else x
    y = (parts[:, 0] > parts[:, -1]).long() ^ up
    train, held = Examples(x[:200], y[:200]), Examples(x[200:], y[200:])
    return Phase(train=train, validation=held, number=seed)


def mlp(seed: int) -> nn.Module:
    return TreeMLP(8, inputs=16, classes=2)


def cnn(seed: int) -> nn.Module:
    """One convolution as an expert, under a soft tree that sees the image."""
    conv = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    shape = (3, SIDE, SIDE)
    experts = ModuleExperts([conv], dim=3 * SIDE**2, out_dim=2, shape=shape)
    return nn.Sequential(nn.Flatten(), MoE(PooledTree(shape, 1), experts))


def transformer(seed: int) -> nn.Module:
    """One block with a sparse layer."""

    def layer(dim: int) -> nn.Module:
        return MoE("switch", 2, dim=dim, hidden=8)

    return PatchTransformer(
        patches=4, patch_dim=4, classes=2, dim=8, depth=1, heads=2, feedforward=layer
    )


def weights(layer: MoE, expert: int) -> torch.Tensor:
    if isinstance(layer.experts, ModuleExperts):
        own = list(layer.experts.members[expert].parameters())
    else:
        own = [p[expert] for p in layer.experts.parameters()]
    return torch.cat([p.detach().flatten() for p in own])


@pytest.mark.parametrize(
    ("name", "make", "shape", "options"),
    [
        ("growing-moe", mlp, (16,), {}),
        ("growing-moe", cnn, (3, SIDE, SIDE), {}),
        ("growing-switch", transformer, (4, 4), {"count": 1}),
        ("growing-switch", transformer, (4, 4), {"count": 1, "how": "rows"}),
    ],
    ids=["mlp", "cnn", "families", "rows"],
)
def test_after_200_steps_the_copies_differ_and_serve_different_tokens(name, make, shape, options):
    words = {"batch": 32, "method": "adam", "lr": 0.01}
    made = learner(name, make, training=Training(epochs=2, **words), **options)
    made.train(two_rules(1, *shape))
    made.training = Training(epochs=STEPS, steps=STEPS, patience=STEPS, **words)
    now = two_rules(2, *shape)
    report = made.train(now)
    assert report.steps == STEPS
    with watch(made.models[0], keep="all") as routes:
        made.predict(now.validation.x)
    for grown in report.growth["layers"]:
        layer = moe_layers(made.models[0])[grown["layer"]]
        pair = [*grown["parents"], *grown["children"]]
        one, two = (weights(layer, expert) for expert in pair)
        assert (one - two).norm() > 0.05 * one.norm()
        share = routes[grown["layer"]][0].dense()[:, pair]
        served = share[share.sum(1) > 0].argmax(1).bincount(minlength=2)
        assert served.min() > 0.1 * served.sum()
