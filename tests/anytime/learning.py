"""Small data, models and learners for the tests of learners."""

import torch
from torch import nn

from moiety import MoE
from moiety.anytime.backbones import MLP, TreeMLP
from moiety.anytime.base import Phase
from moiety.anytime.data import Examples
from moiety.anytime.fitting import Training
from moiety.anytime.learners import learner
from moiety.anytime.metering import Meter
from moiety.testing import check_learner

INPUTS, CLASSES = 16, 3
METER = Meter()  # one for all tests, since counting takes longer than training
SHORT = Training(epochs=2, batch=32, save_every=0)


def examples(rows: int = 150, seed: int = 0) -> Examples:
    """Rows of numbers whose class a linear map tells."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, INPUTS, generator=g)
    return Examples(x, (x @ torch.randn(INPUTS, CLASSES, generator=g)).argmax(1))


def phase(number: int = 1, seed: int = 0, held: int = 50, **words) -> Phase:
    data = examples(seed=number)
    train, validation = data.take(range(100)), data.take(range(100, 100 + held))
    return Phase(train=train, validation=validation, number=number, seed=seed, **words)


def mlp(seed: int) -> nn.Module:
    return MLP(8, inputs=INPUTS, classes=CLASSES)


def with_dropout(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES))


def tree_mlp(seed: int) -> nn.Module:
    return TreeMLP(8, inputs=INPUTS, classes=CLASSES)


def sparse(router: str = "switch", **options):
    """A maker of models with one sparse layer of two experts."""

    def make(seed: int) -> nn.Module:
        layer = MoE(router, 2, dim=INPUTS, hidden=8, **options)
        return nn.Sequential(nn.Linear(INPUTS, INPUTS), layer, nn.Linear(INPUTS, CLASSES))

    return make


def contract(make, **options) -> None:
    """Check the learners that `make(seed=…, **options)` makes."""
    check_learner(lambda seed: make(seed=seed, training=SHORT, meter=METER, **options))


def trained(name: str, model=mlp, phases: int = 2, **options):
    options = {"training": SHORT, "meter": METER, **options}
    made = learner(name, model, **options)
    made.reports = [made.train(phase(number)) for number in range(1, phases + 1)]
    return made


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
