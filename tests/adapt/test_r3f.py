"""R3F by hand on two steps, its noise, and where it goes."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moiety.adapt.r3f import R3F, noised, symmetric_kl


class Words(nn.Module):
    """A classifier of bags of words, called as those of transformers are."""

    def __init__(self, words=7, dim=3, classes=2):
        super().__init__()
        self.embed, self.head = nn.Embedding(words, dim), nn.Linear(dim, classes)

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, attention_mask=None):
        return SimpleNamespace(logits=self.head(self.embed(input_ids).mean(1)))


class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, pixel_values):
        return SimpleNamespace(logits=self.head(pixel_values.flatten(1)))


def draw(seed):
    return torch.Generator().manual_seed(seed)


def seeded(kind):
    torch.manual_seed(3)
    return kind().double()


def noisy_term(r3f, model, x, logits, seed):
    inputs = {"pixel_values": x}
    return r3f(model, inputs, logits, r3f.draw(model, inputs, draw(seed)))


def test_symmetric_kl_by_hand():
    a, b = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]]), torch.tensor([[math.log(3), 0.0]] * 2)
    # Of (1/2, 1/2) and (3/4, 1/4), both ways: (1/4) ln(3/2) + (1/4) ln 2 = (1/4) ln 3.
    assert symmetric_kl(a, b).item() == pytest.approx(math.log(3) / 4 / 2)
    assert symmetric_kl(b, a) == symmetric_kl(a, b) and symmetric_kl(a, a) == 0
    ways = [
        F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")
        for x, y in ((a, b), (b, a))
    ]
    assert symmetric_kl(a, b) == pytest.approx(float(sum(ways)))


def test_two_steps_by_hand():
    model, lr, weight, noise = seeded(Pixels), 0.5, 2.0, 0.3
    x, y = torch.randn(5, 1, 2, 2, dtype=torch.float64, generator=draw(0)), torch.arange(5) % 3
    w, b = (p.detach().clone() for p in model.parameters())
    optimizer, r3f = torch.optim.SGD(model.parameters(), lr=lr), R3F(weight, noise)
    for step in range(2):
        logits = model(x).logits
        loss = F.cross_entropy(logits, y) + r3f.weight * noisy_term(r3f, model, x, logits, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # The same with the gradients written out: d/da of sum (p - q)(log p - log q), p of a.
        flat = x.flatten(1)
        noisy = flat + noise * torch.randn(5, 1, 2, 2, dtype=x.dtype, generator=draw(step)).flatten(
            1
        )
        p, q = ((v @ w.T + b).softmax(1) for v in (flat, noisy))
        to_p = p * ((p / q).log() - (p * (p / q).log()).sum(1, True)) + p - q
        to_q = q * ((q / p).log() - (q * (q / p).log()).sum(1, True)) + q - p
        to_ce = p - F.one_hot(y, 3)
        down = ((to_ce + weight * to_p).T @ flat + weight * to_q.T @ noisy) / 5
        w, b = w - lr * down, b - lr * (to_ce + weight * (to_p + to_q)).mean(0)
        assert torch.allclose(model.head.weight, w, rtol=0, atol=1e-10)
        assert torch.allclose(model.head.bias, b, rtol=0, atol=1e-10)
    assert weight * symmetric_kl(p.log(), q.log()) > 1e-3  # the second term was there


def test_noise_on_words_is_on_their_embeddings_alone_and_sends_them_no_gradient():
    model, ids = seeded(Words), torch.tensor([[1, 2, 3], [4, 5, 6]])
    clean = model(ids).logits
    noise = R3F(1.0, 0.2).draw(model, {"input_ids": ids}, draw(5))
    with noised(model, {"input_ids": ids}, noise) as inputs:
        noisy = model(**inputs).logits
    embedded = model.embed(ids)
    by_hand = embedded + 0.2 * torch.randn(embedded.shape, dtype=torch.float64, generator=draw(5))
    assert torch.allclose(noisy, model.head(by_hand.mean(1)), atol=1e-12)
    assert torch.equal(model(ids).logits, clean)  # the hook is gone
    noisy.sum().backward()
    assert model.embed.weight.grad is None and model.head.weight.grad is not None


def test_the_hook_goes_when_the_model_raises():
    model = seeded(Words)
    with pytest.raises(ZeroDivisionError), noised(model, {"input_ids": 0}, None):
        raise ZeroDivisionError
    assert not model.embed._forward_hooks


def test_its_noise_follows_its_generator_and_leaves_the_global_one():
    model, x = seeded(Pixels), torch.ones(4, 1, 2, 2, dtype=torch.float64)
    logits, state = model(x).logits, torch.get_rng_state()
    first, again, other = (noisy_term(R3F(1.0, 0.5), model, x, logits, seed) for seed in (0, 0, 1))
    assert first == again != other and torch.equal(torch.get_rng_state(), state)
    assert noisy_term(R3F(1.0, 0.1), model, x, logits, 0) < first


@pytest.mark.parametrize("options", [{"weight": -1.0}, {"noise": 0.0}, {"noise": math.nan}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="weight must be at least 0 and noise positive"):
        R3F(**options)
