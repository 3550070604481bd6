"""Layer norm of stacked copies, beside that of each alone."""

import pytest
import torch
from torch.nn import functional as F

from interpreted import interpret

EPS = 1e-5
# Copies, rows (one or more axes), numbers of a row: more and less than fill a tile, or a part.
SHAPES = [(3, (2, 5), 12), (1, (1,), 16), (2, (7, 11), 33), (4, (130,), 64)]


def draw(shape, device, dtype=torch.float32):
    copies, rows, width = shape
    lots = torch.Generator().manual_seed(0)
    x = 3 + 2 * torch.randn(copies, *rows, width, generator=lots)
    scale, shift = torch.randn(2, copies, width, generator=lots)
    g = torch.randn(x.shape, generator=lots)
    return [t.to(device) for t in (x.to(dtype), scale, shift, g)]


def compare(device, shape, atol):
    """Values and gradients of the kernels, and of torch's own for each copy in float64."""
    from moiety.train.layer_norm import layer_norm

    x, scale, shift, g = draw(shape, device)
    own = [t.clone().requires_grad_() for t in (x, scale, shift)]
    y = layer_norm(*own, EPS, torch.float32)
    y.backward(g)
    again = [t.detach().clone().requires_grad_() for t in own]
    layer_norm(*again, EPS, torch.float32).backward(g)
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(own, again))
    for i in range(len(x)):
        alone = [t[i].double().requires_grad_() for t in (x, scale, shift)]
        known = F.layer_norm(alone[0], [x.shape[-1]], *alone[1:], EPS)
        known.backward(g[i].double())
        torch.testing.assert_close(y[i].double(), known, atol=atol, rtol=atol)
        for mine, theirs in zip(own, alone):
            torch.testing.assert_close(mine.grad[i].double(), theirs.grad, atol=atol, rtol=atol)


def compare_half(device):
    """bfloat16 in, what is asked for out, gradients as the inputs are."""
    from moiety.train.layer_norm import layer_norm

    x, scale, shift, g = draw(SHAPES[0], device, torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        own = [t.clone().requires_grad_() for t in (x, scale, shift)]
        y = layer_norm(*own, EPS, dtype)
        y.backward(g.to(dtype))
        assert y.dtype == dtype
        assert [t.grad.dtype for t in own] == [torch.bfloat16, torch.float32, torch.float32]
        known = F.layer_norm(x.float(), [x.shape[-1]]) * scale[:, None, None]
        known = known + shift[:, None, None]
        torch.testing.assert_close(y.float(), known, atol=0.03, rtol=0.01)


def compare_both(device):
    """In two dtypes by one pass: the same values, and gradients through either or through both."""
    from moiety.train.layer_norm import layer_norm

    for shape in SHAPES:
        x, scale, shift, g = draw(shape, device)
        for read in ("full", "half", "both"):
            own, other = ([t.clone().requires_grad_() for t in (x, scale, shift)] for _ in "ab")
            y, half = layer_norm(*own, EPS, torch.float32, torch.bfloat16)
            known = layer_norm(*other, EPS, torch.float32)
            assert torch.equal(y, known) and half.dtype == torch.bfloat16
            # The interpreter cuts numbers off where a GPU rounds them.
            torch.testing.assert_close(half.float(), known, atol=1e-6, rtol=2**-7)
            rounded = g.to(torch.bfloat16)
            if read == "full":
                y.backward(g)
                known.backward(g)
            elif read == "half":
                half.backward(rounded)
                known.backward(rounded.float())
            else:
                torch.autograd.backward([y, half], [g, rounded])
                known.backward(g + rounded.float())
            for mine, theirs in zip(own, other):
                torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=1e-5)


def compare_in_a_crew(device):
    """A norm before linear layers in bfloat16: as vmap itself has it, with one cast less."""
    from moiety.train.transformer import Stacked

    x, scale, shift, _ = draw(SHAPES[0], device)
    weights = torch.randn(3, 12, 12, generator=torch.Generator().manual_seed(1)).to(device)

    def one(x, scale, shift, weight):
        seen = F.layer_norm(x, [12], scale, shift, EPS)
        return F.linear(seen, weight).float() + F.linear(seen, weight.T).float() + seen

    def inside(*parts):
        with Stacked(), torch.autocast(device, torch.bfloat16):
            return one(*parts)

    def plain(*parts):
        with torch.autocast(device, torch.bfloat16):
            return one(*parts)

    parts = [t.clone().requires_grad_() for t in (x, scale, shift, weights)]
    found, known = (torch.func.vmap(f)(*parts) for f in (inside, plain))
    slopes = [torch.autograd.grad(y.sum(), parts) for y in (found, known)]
    for mine, theirs in zip((found, *slopes[0]), (known, *slopes[1])):
        assert float((mine - theirs).norm() / theirs.norm()) < 0.01


def compare_under_vmap(device, kernels=True):
    """As a crew has it: some copies share an input, or a weight that is not stacked."""
    from moiety.train.transformer import Stacked, _Norm

    calls, usual = [], _Norm.apply
    _Norm.apply = lambda *args: calls.append(args) or usual(*args)
    x, scale, shift, _ = draw(SHAPES[0], device)

    def one(x, scale, shift):
        with Stacked():
            return F.layer_norm(x, [x.shape[-1]], scale, shift, EPS)

    for dims in ((0, 0, 0), (1, 0, 0), (None, 0, 0), (0, None, 0)):
        parts = [x.transpose(0, 1) if dims[0] == 1 else x, scale, shift]
        parts = [t[0] if dim is None else t for t, dim in zip(parts, dims)]
        found = torch.func.vmap(one, dims)(*parts)
        wide = [t.expand(3, *t.shape) if d is None else t for t, d in zip(parts, dims)]
        wide[0] = wide[0].transpose(0, 1) if dims[0] == 1 else wide[0]
        for i in range(3):
            known = F.layer_norm(wide[0][i], [x.shape[-1]], wide[1][i], wide[2][i], EPS)
            torch.testing.assert_close(found[i], known, atol=1e-5, rtol=1e-5)
    _Norm.apply = usual
    assert len(calls) == 4 * kernels


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_on_a_gpu_end_as_each_alone():
    for shape in [*SHAPES, (8, (32, 65), 192), (6, (64, 96), 256)]:
        compare("cuda", shape, 2e-4)
    compare_half("cuda")
    compare_both("cuda")
    compare_in_a_crew("cuda")
    compare_under_vmap("cuda")


def test_copies_end_as_each_alone_in_tritons_interpreter():
    code = (
        "from moiety.train import transformer; import test_layer_norm as test\n"
        "transformer._runs_here = lambda x: True\n"
        "for shape in test.SHAPES: test.compare('cpu', shape, 1e-4)\n"
        "test.compare_half('cpu'); test.compare_both('cpu'); test.compare_in_a_crew('cpu')\n"
        "test.compare_under_vmap('cpu')"
    )
    interpret(code, __file__)


def test_copies_on_a_cpu_end_as_each_alone():
    compare_under_vmap("cpu", kernels=False)
