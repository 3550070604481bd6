"""The grouped product in float32 on a GPU: the same sums, without a wait for the host."""

from types import SimpleNamespace

import pytest
import torch

from interpreted import interpret
from moiety import MoE
from moiety.cost import forward_flops
from moiety.experts import grouped
from moiety.experts.grouped import grouped_mm, grouped_outer

CASES = [  # experts, outputs, inputs, rows of each expert, rows of nobody
    (3, 20, 7, [5, 0, 90], 7),
    (1, 64, 64, [130], 0),
    (5, 96, 36, [64, 64, 0, 1, 200], 3),
    (4, 32, 48, [0, 0, 0, 0], 5),
]


def compare(product, outer, device, atol):
    """Against plain products in float64; rows of nobody hold NaN, which must not spread."""
    torch.manual_seed(0)
    for experts, outputs, inputs, counts, nobody in CASES:
        ends = torch.tensor(counts).cumsum(0)
        used, rows = int(ends[-1]), int(ends[-1]) + nobody
        a, g = torch.randn(rows, inputs), torch.randn(rows, outputs)
        a[used:], g[used:] = float("nan"), float("nan")
        w, where = torch.randn(experts, outputs, inputs), ends.int().to(device)
        there = [t.to(device) for t in (a, g, w)]
        found = product(there[0], there[2], where).double().cpu()
        back = product(there[1], there[2].transpose(1, 2), where).double().cpu()
        sums = outer(there[1], there[0], where).double().cpu()
        a, g, w, start = a.double(), g.double(), w.double(), 0
        for e, end in enumerate(ends.tolist()):
            mine = slice(start, end)
            torch.testing.assert_close(found[mine], a[mine] @ w[e].T, atol=atol, rtol=atol)
            torch.testing.assert_close(back[mine], g[mine] @ w[e], atol=atol, rtol=atol)
            want = g[mine].T @ a[mine]
            torch.testing.assert_close(sums[e], want, atol=10 * atol, rtol=atol)
            start = end


def test_the_kernels_agree_with_plain_products_in_tritons_interpreter():
    code = (
        "from moiety.experts import kernels; import test_kernels\n"
        "kernels._precision = lambda: 'ieee'\n"
        "test_kernels.compare(kernels.product, kernels.outer, 'cpu', 1e-5)"
    )
    interpret(code, __file__)


@pytest.mark.parametrize(
    ("tf32", "width", "capturing", "ours"),
    [
        (False, 4096, False, True),
        (True, 256, False, True),
        (True, 1024, False, False),  # torch is faster there
        (True, 1024, True, True),  # and cannot be captured
    ],
)
def test_who_multiplies_on_a_gpu(monkeypatch, tf32, width, capturing, ours):
    monkeypatch.setattr(grouped, "KERNELS", True)
    matmul = SimpleNamespace(fp32_precision="tf32" if tf32 else "ieee")
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    a = SimpleNamespace(is_cuda=True, dtype=torch.float32, shape=(8, width))
    b = SimpleNamespace(shape=(2, 2 * width, width))
    assert grouped._own(a, b, grouped.WIDE_PRODUCT) == ours


@pytest.mark.gpu
@pytest.mark.parametrize(("tf32", "atol"), [(False, 2e-5), (True, 3e-2)])
def test_on_a_gpu(monkeypatch, tf32, atol):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", tf32)
    compare(grouped_mm, grouped_outer, "cuda", atol)


@pytest.mark.gpu
def test_a_layer_in_float32_never_waits_for_the_host():
    torch.manual_seed(0)
    layer = MoE("top-k", 8, dim=32, hidden=64, k=2, capacity_factor=1.5, balance={}).cuda()
    x = torch.randn(4, 50, 32, device="cuda", requires_grad=True)
    layer(x).sum().backward()  # what is set up once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert forward_flops(lambda: layer(x.detach()), layer) >= 4 * 50 * 2 * 4 * 32 * 64 * 0.5
    want = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    layer.backend = "loop"
    found = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    for a, b in zip(found, want):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
