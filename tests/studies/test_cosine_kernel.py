"""The fitter's kernel: the derivatives that the plain formulas give."""

import sys
from types import SimpleNamespace

import pytest
import torch

from interpreted import interpret
from moiety.studies.cosine import fitter, rates
from moiety.studies.cosine.regression import free_jacobian, inputs, predict, unflat

GATES = ("vanilla", "linear", "tau 0.1", "tau_1 alone", "tau_2 alone")


def compare(device, sizes):
    """Points that do not fill the last piece; a gate vector of zero where the gate sees norms."""
    from moiety.studies.cosine import kernel

    g = torch.Generator().manual_seed(0)
    for gate in (rates.gates()[name] for name in GATES):
        for expert in ("tanh", "relu", "linear"):
            for k, dim, n in sizes:
                theta = fitter.starts(2, 2, k, dim, expert, g).flatten(0, 1)
                theta[0, :dim] *= float(not gate.sees_norms)
                theta[1] *= 5
                which, x = torch.tensor([0, 0, 1, 1]), inputs(n, dim, g, 2)
                y = torch.randn(2, n, generator=g, dtype=x.dtype)
                value, slopes = free_jacobian(unflat(theta, k, dim, gate), x[which], gate, expert)
                want = torch.cat([slopes, (value - y[which])[:, None]], 1)
                problem = fitter.Problem(x.to(device), y.to(device), k, gate, expert, theta[0])
                there = theta.to(device), which.to(device), *problem.columns
                found = kernel.rows(*there, gate, expert, k).cpu().transpose(1, 2).flatten(2)
                assert not found[..., n:].any()
                torch.testing.assert_close(found[..., :n], want, rtol=1e-11, atol=1e-11)


def test_one_product_gives_loss_gradient_and_matrix(monkeypatch):
    g = torch.Generator().manual_seed(0)
    gate, theta = rates.GATES["tau 0.1"], fitter.starts(2, 2, 3, 2, "tanh", g).flatten(0, 1)
    x, which = inputs(70, 2, g, 2), torch.tensor([1, 0, 0, 1])
    problem = fitter.Problem(x, x.sum(-1), 3, gate, "tanh", theta[0])

    def rows(theta, which, x, u, y, tau, gate, expert, k):  # in the kernel's place, pieces of 64
        value, slopes = free_jacobian(unflat(theta, k, 2, gate), x.mT[which], gate, expert)
        found = torch.cat([slopes, (value - y[which])[:, None]], 1)
        return torch.nn.functional.pad(found, (0, 58)).unflatten(2, (2, 64)).transpose(1, 2)

    monkeypatch.setitem(sys.modules, "moiety.studies.cosine.kernel", SimpleNamespace(rows=rows))
    for found, want in zip(problem._quick_piece(theta, which), problem.normal(theta, which)):
        torch.testing.assert_close(found, want)


@pytest.mark.slow
def test_the_kernel_agrees_with_plain_formulas_in_tritons_interpreter():
    code = (
        "from moiety.studies.cosine import kernel; import test_cosine_kernel as test\n"
        "kernel.BLOCK, kernel.PIECE = 32, 64\n"
        "test.compare('cpu', [(2, 2, 70)])"
    )
    interpret(code, __file__)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    compare("cuda", [(2, 2, 300), (3, 8, 2500), (3, 2, 2048)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fits_with_and_without_the_kernel_end_in_the_same_place(monkeypatch):
    g = torch.Generator().manual_seed(0)
    gate, sizes = rates.GATES["tau 0.5"], rates.CELLS["exact"]
    truth = rates.true_mixture(sizes, gate, 0).each(torch.Tensor.cuda)
    x = inputs(3000, 2, g, 4).cuda()
    noise = 0.1 * torch.randn(4, 3000, generator=g, dtype=x.dtype)
    y = predict(truth, x, gate, "tanh") + noise.cuda()

    def loss(kernel):
        monkeypatch.setattr(fitter, "KERNEL", kernel)
        g = torch.Generator().manual_seed(1)
        return fitter.fit(x, y, 2, gate, "tanh", generator=g, iterations=80, noise=0.1).loss

    torch.testing.assert_close(loss(True), loss(False), rtol=1e-9, atol=0)
