"""Many seeds on a GPU: the captured step, and the kernels for convolutions and pooling."""

import warnings

import pytest
import torch
from test_many import SEEDS, conv, dropping, mlp, plain, routed, task
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from moiety.train import fit_many

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def exact_convolutions():
    """TF32 rounds to ten bits: parity is measured without it."""
    usual = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = usual


def small_cnn(seed=None):
    return nn.Sequential(
        nn.Unflatten(1, (1, 12, 12)),
        nn.Conv2d(1, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(20, 3),
    )


def images(examples=44):
    x = torch.randn(examples, 144, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def states(fitted):
    return {name: t.cpu() for name, t in fitted.state.items()}


def check_same(a, b, tolerance):
    for name, t in a.items():
        torch.testing.assert_close(t, b[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "adagrad", "adadelta", "sgd"])
@pytest.mark.parametrize(
    ("make", "data"),
    [(mlp, task()), (routed(), task()), (small_cnn, images())],
    ids=["mlp", "routed", "cnn"],
)
def test_the_captured_step_equals_the_plain_loop(make, data, optimizer):
    words = {"seeds": SEEDS, "steps": 20, "batch": 16, "lr": 1e-2, "optimizer": optimizer}
    words["weight_decay"] = 0.1  # AdamW has one of its own unless told
    # Adam divides a gradient that is all rounding by itself; a larger eps keeps it small.
    eps = {"eps": 1e-4} if optimizer.startswith("adam") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a step that is not captured would warn
        fitted = fit_many(make, data, device="cuda", clip=1.0, options=eps, **words)
    for i, seed in enumerate(SEEDS):
        model, losses, _ = plain(
            make,
            data,
            seed,
            optimizer=optimizer,
            steps=20,
            lr=1e-2,
            clip=1.0,
            weight_decay=0.1,
            **eps,
        )
        torch.testing.assert_close(
            torch.tensor(fitted.history[i].loss), torch.tensor(losses), rtol=2e-3, atol=2e-3
        )
        ours = {name: t[i].cpu() for name, t in fitted.state.items()}
        check_same({n: p.detach() for n, p in model.named_parameters()}, ours, 5e-3)


@pytest.mark.parametrize(
    ("make", "data"),
    [(mlp, task()), (conv, task()), (small_cnn, images())],
    ids=["mlp", "norm", "cnn"],
)
def test_captured_and_not_captured_are_bit_equal_and_repeat(make, data):
    def run(graph):
        words = {"seeds": SEEDS, "epochs": 6, "batch": 16, "device": "cuda", "graph": graph}
        return fit_many(make, data, validation=data, patience=3, **words)

    a, b, c = run(True), run(True), run(False)
    for other in (b, c):
        check_same(states(a), states(other), 0)
        assert [h.loss for h in a.history] == [h.loss for h in other.history]
        assert a.best_step == other.best_step


def test_random_numbers_are_new_in_every_step():
    run = fit_many(dropping, task(), seeds=SEEDS, steps=12, lr=0.0, batch=44, device="cuda")
    for history in run.history:  # the same weights and examples: only dropout differs
        assert len(set(history.loss)) == 12
    again = fit_many(dropping, task(), seeds=SEEDS[:1], steps=12, lr=0.0, batch=44, device="cuda")
    assert again.history[0].loss == pytest.approx(run.history[0].loss, abs=1e-6)


def test_a_step_that_draws_is_captured_and_the_same():
    words = {"seeds": SEEDS, "steps": 12, "batch": 16, "device": "cuda"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured = fit_many(dropping, task(), **words)
    check_same(states(captured), states(fit_many(dropping, task(), graph=False, **words)), 0)


def test_numbers_drawn_by_counting():
    from scipy import stats

    from moiety.train import kernels

    seed_S = torch.tensor([0, 1, 2**40], device="cuda")

    def drawn(kind, seed_S=seed_S, step=3, number=1, p=0.0):
        step = torch.tensor([step], device="cuda")
        return kernels.draw(seed_S, step, number, kind, p, (100, 300)).flatten(1).cpu()

    for u, n in zip(drawn("uniform"), drawn("normal"), strict=True):
        assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-4
        assert stats.kstest(n.numpy(), "norm").pvalue > 1e-4
    assert drawn("bernoulli", p=0.3).mean(1) == pytest.approx([0.3] * 3, abs=0.02)
    assert drawn("uniform")[1].equal(drawn("uniform", seed_S[1:2])[0])
    for other in (
        drawn("uniform", step=4),
        drawn("uniform", number=2),
        drawn("uniform").roll(1, 0),
    ):
        assert (drawn("uniform") == other).float().mean() < 1e-3


class Waiting(nn.Module):
    """Waits for the host inside backward, where vmap does not see it."""

    def __init__(self, seed=None):
        super().__init__()
        self.linear = nn.Linear(16, 3)

    def forward(self, x):
        return self.linear(x).sigmoid().unsqueeze(-1).expand(-1, -1, 2).prod(-1)


def test_a_step_that_cannot_be_captured_says_so_and_is_right():
    with pytest.warns(UserWarning, match="without a CUDA graph"):
        fitted = fit_many(Waiting, task(), seeds=SEEDS, steps=8, batch=16, device="cuda")
    plain_run = fit_many(
        Waiting, task(), seeds=SEEDS, steps=8, batch=16, device="cuda", graph=False
    )
    check_same(states(fitted), states(plain_run), 0)


@pytest.mark.parametrize(
    ("copies", "shape", "out", "size", "padding", "last"),
    [
        (3, (4, 2, 9, 11), 5, 3, 1, False),
        (2, (9, 1, 36, 36), 10, 5, 0, False),
        (2, (17, 10, 16, 16), 20, 5, 2, False),
        (2, (3, 3, 8, 8), 100, 1, 0, False),
        (3, (4, 3, 9, 11), 8, 3, 1, True),
        (2, (70, 32, 8, 8), 32, 3, 1, True),
        (1, (5, 28, 6, 6), 112, 3, 0, True),
        (2, (3, 80, 2, 2), 56, 3, 2, True),
    ],
)
def test_convolutions(copies, shape, out, size, padding, last):
    from moiety.train.layers import _StackedConvolve

    torch.manual_seed(0)
    x = torch.randn(copies, *shape, device="cuda", requires_grad=True)
    weight = torch.randn(copies, out, shape[1], size, size, device="cuda", requires_grad=True)
    bias = torch.randn(copies, out, device="cuda", requires_grad=True)
    ours = _StackedConvolve.apply(x, weight, bias, padding, last)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    theirs = torch.stack([F.conv2d(a, w, b, padding=padding) for a, w, b in zip(*exact)])
    g = torch.randn_like(ours)
    pairs = zip(
        (ours, *torch.autograd.grad(ours, (x, weight, bias), g)),
        (theirs, *torch.autograd.grad(theirs, exact, g.double())),
    )
    for a, b in pairs:
        scale = b.abs().max().item()
        torch.testing.assert_close(a.double(), b, rtol=0, atol=5e-6 * scale)


@pytest.mark.parametrize(
    ("size", "shape"), [(2, (2, 3, 8, 8)), (2, (3, 9, 7)), (3, (2, 2, 10, 11))]
)
def test_pooling_is_bit_equal_also_with_ties_and_nan(size, shape):
    from moiety.train.layers import _StackedPool

    torch.manual_seed(0)
    x = torch.randn(2, *shape, device="cuda").relu()  # ties at 0
    x[0, ..., 0, 1] = torch.nan
    x.requires_grad_()
    ours, theirs = _StackedPool.apply(x, size), F.max_pool2d(x.flatten(0, -4), size).view(-1)
    torch.testing.assert_close(ours.view(-1), theirs, rtol=0, atol=0, equal_nan=True)
    g = torch.randn_like(ours)
    (a,), (b,) = (torch.autograd.grad(y, x, g.view(y.shape)) for y in (ours, theirs))
    assert torch.equal(a, b)
