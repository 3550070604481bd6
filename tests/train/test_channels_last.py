"""Stacked networks whose channels lie side by side, beside each network alone."""

import copy

import pytest
import torch
from torch import nn

from interpreted import interpret
from moiety.train import layers
from moiety.train.norms import Norms

COPIES = 3


class Viewed(nn.Module):
    """Flattens by `view`, as many a network does, in each of its forms."""

    def forward(self, x):
        flat = x.view(x.shape[0], -1)
        return (flat + x.view(size=(x.shape[0], -1)) + x.view_as(flat)) / 3


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(8, 20, 3),
        nn.BatchNorm2d(20),
        nn.ReLU(),
        Viewed(),
        nn.Linear(80, 5),
    )


def compare(device, atol):
    """Answers, gradients and statistics of copies in one program, and of each alone."""
    torch.manual_seed(0)
    alone = [network().to(device) for _ in range(COPIES)]
    params, buffers = torch.func.stack_module_state([copy.deepcopy(model) for model in alone])
    x = torch.randn(COPIES, 6, 3, 8, 8).to(device)

    def one(params, buffers, x):
        with Norms():
            return torch.func.functional_call(alone[0], (params, buffers), (x,))

    found = torch.func.vmap(one)(params, buffers, x)
    g = torch.randn(COPIES, 6, 5).to(device)
    slopes = torch.autograd.grad(found, [*params.values()], g)
    statistics = {name: t.clone() for name, t in buffers.items()}
    for i, model in enumerate(alone):
        answer = model(x[i])
        torch.testing.assert_close(found[i], answer, atol=atol, rtol=atol)
        want = torch.autograd.grad(answer, [*model.parameters()], g[i])
        for mine, theirs in zip(slopes, want):
            torch.testing.assert_close(mine[i], theirs, atol=10 * atol, rtol=atol)
        for name, theirs in model.named_buffers():
            torch.testing.assert_close(statistics[name][i], theirs, atol=atol, rtol=atol)


def copied(device):
    """How often images had to be laid out anew."""
    from moiety.train import channels_last

    seen, usual = [], channels_last.to_last
    channels_last.to_last = lambda x: seen.append(layers.is_last(x)) or usual(x)
    try:
        compare(device, 1e-4)
    finally:
        channels_last.to_last = usual
    return seen.count(False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_on_a_gpu_end_as_each_alone(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    compare("cuda", 1e-4)
    assert copied("cuda") == 2  # the first input, forwards and backwards


def test_copies_end_as_each_alone_in_tritons_interpreter():
    code = (
        "from moiety.train import kernels, layers; import test_channels_last as test\n"
        "kernels._precision = lambda: 'ieee'; layers._runs_here = lambda x: True\n"
        "layers._is_here = lambda x: True\n"
        "test.compare('cpu', 1e-5); assert test.copied('cpu') == 2"
    )
    interpret(code, __file__)


def test_copies_on_a_cpu_end_as_each_alone():
    compare("cpu", 1e-5)
