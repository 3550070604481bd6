"""Masked gradients are flagged, each kind by its own sign; honest models are not."""

import pytest
import torch
from torch import nn

from moiety import MoE
from moiety.robust.apgd import APGD
from moiety.robust.ball import Ball
from moiety.robust.masking import Evidence, find_evidence, judge, unbounded
from moiety.robust.noise import Noise
from moiety.robust.search import RandomSearch
from moiety.robust.target import Target

EPS = 0.08


class Net(nn.Module):
    """Four tokens of an input, through an MoE layer (k=None: a dense one), to three classes."""

    def __init__(self, k=1):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 16)
        self.middle = nn.Linear(16, 16)
        if k:
            self.middle = MoE("top-k", dim=16, hidden=16, experts=4, k=k, balance={})
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        h = self.inner(x.view(len(x), 4, 4)).relu()
        return self.head((h + self.middle(h)).mean(1))


def data(n=48):
    """Three classes, each brighter at a third of the places."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 3
    x = 0.3 * torch.rand(n, 16, generator=draw) + 0.3
    for i, label in enumerate(y.tolist()):
        x[i, label * 5 : label * 5 + 5] += 0.12
    return x, y


def trained(k=1):
    model, (x, y) = Net(k), data(240)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module", params=[1, 2, None], ids=["top-1", "top-2", "dense"])
def honest(request):
    return trained(request.param)


@pytest.fixture(scope="module")
def sparse():
    return trained(1)


def look(model, **options):
    x, y = data()
    given = {"attack": APGD(steps=20), "search": RandomSearch(steps=60), **options}
    return find_evidence(Target(model), x, y, Ball(EPS), Noise(0, torch.arange(len(x))), **given)


def test_an_honest_model_is_not_flagged(honest):
    moe = isinstance(honest.middle, MoE)
    found = judge(look(honest, routes=moe), EPS)
    assert found["reasons"] == []
    assert found["flagged"] is False
    assert found["strongest"] >= max(found["random"], found["transfer"] or 0.0)
    assert (found["transfer"] is not None) == moe  # a hard router is compared with frozen routes
    assert found["strongest"] > 0.3


class Masked(nn.Module):
    def __init__(self, model, mask):
        super().__init__()
        self.model, self.mask = model, mask

    def forward(self, x):
        return self.mask(self.model, x)


class Backwards(torch.autograd.Function):
    """The identity, with the gradient of its opposite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return -grad


MASKS = {
    "quantised input": (
        lambda m, x: m((x * 50).round() / 50),
        ["Random search reaches", "The gradient is zero on 100.0%"],
    ),
    "saturated logits": (lambda m, x: 500 * m(x), ["The gradient is zero on"]),
    "no gradient at all": (lambda m, x: m(x.detach()), ["The gradient is zero on 100.0%"]),
    "a gradient that misleads": (
        lambda m, x: m(Backwards.apply(x)),
        ["Random search reaches", "step along the gradient raises the loss no more", "anywhere"],
    ),
}


@pytest.mark.parametrize("kind", MASKS)
def test_a_masked_gradient_is_flagged(kind, sparse):
    mask, signs = MASKS[kind]
    found = judge(look(Masked(sparse, mask)), EPS)
    assert found["flagged"] is True
    for sign in signs:
        assert any(sign in reason for reason in found["reasons"]), (sign, found)


def test_a_transfer_from_the_model_behind_the_mask_finds_more(sparse):
    hidden = Masked(sparse, MASKS["no gradient at all"][0])
    found = judge(look(hidden, source=Target(sparse)), EPS)
    assert found["transfer"] > found["strongest"] + 0.2
    assert any("An attack on another model reaches" in reason for reason in found["reasons"])


def test_a_transfer_from_frozen_routes_is_called_so(sparse):
    evidence = look(sparse, routes=True)
    evidence.transfer = torch.zeros_like(evidence.right)
    evidence.strongest = torch.ones_like(evidence.right)
    (reason,) = (r for r in judge(evidence.cpu(), EPS)["reasons"] if "An attack on" in r)
    assert reason.startswith("An attack on this model with its routes frozen reaches")


class Healer:
    """An attack that makes every example one that the model gets right."""

    def __init__(self, healthy):
        self.healthy = healthy

    def __call__(self, target, x, *given, **words):
        return self.healthy[: len(x)]


def test_what_is_wrong_when_clean_counts_as_fooled(sparse):
    x, _ = data()
    right = sparse(x).argmax(-1)
    y = torch.full_like(right, int(right[0]))
    healer = Healer(x[:1].expand_as(x))  # right for this label, wherever it started
    given = {"attack": healer, "search": healer, "source": Target(sparse)}
    evidence = find_evidence(Target(sparse), x, y, Ball(1.0), Noise(0, torch.arange(48)), **given)
    for kept in (evidence.strongest, evidence.random, evidence.transfer, evidence.unbounded):
        assert torch.equal(kept, evidence.right)
    assert not evidence.right.all()


def test_gradients_are_looked_at_under_no_grad_too(sparse):
    with torch.no_grad():
        assert judge(look(sparse, routes=True), EPS)["flagged"] is False


def test_the_attacks_made_so_far_count_as_the_strongest(sparse):
    x, _ = data()
    evidence = look(sparse, strongest=torch.zeros(len(x), dtype=torch.bool))
    assert judge(evidence, EPS)["strongest"] == 1.0


def test_numbers_by_hand():
    def bits(text):
        return torch.tensor([c == "1" for c in 2 * text])

    evidence = Evidence(
        right=bits("1110"), strongest=bits("1100"), random=bits("1000"), transfer=None,
        zero=bits("0011"), blind=bits("1100"), unbounded=bits("0000"),
    )  # fmt: skip
    found = judge(evidence, EPS)
    assert (found["strongest"], found["random"], found["transfer"]) == (0.5, 0.75, None)
    assert (found["examples"], found["eps"]) == (8, EPS)
    assert [reason.split()[0] for reason in found["reasons"]] == ["Random", "The", "On"]
    assert "33.3%" in found["reasons"][1]  # of the six that are right when clean
    assert "66.7%" in found["reasons"][2]


def test_one_example_more_is_luck():
    kept = torch.ones(20, dtype=torch.bool)
    for lucky, flagged in ((1, False), (2, True)):
        random = kept.clone()
        random[:lucky] = False
        evidence = Evidence(kept, kept, random, random, ~kept, ~kept, ~kept)
        assert judge(evidence, EPS)["flagged"] is flagged


@pytest.mark.parametrize(
    ("ball", "reach"),
    [
        (Ball(0.1, "linf", (0, 1)), 1.0),
        (Ball(0.1, "linf", None), 3.0),
        (Ball(0.1, "l2", (0, 1)), 2.0),
        (Ball(9.0, "linf", None), 9.0),
    ],
)
def test_an_attack_that_may_go_anywhere(ball, reach):
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    assert unbounded(ball, x) == Ball(reach, ball.norm, ball.bounds)


def test_the_model_is_left_as_it_was(sparse):
    sparse.train()
    before = torch.get_rng_state()
    look(sparse, routes=True)
    assert all(m.training for m in sparse.modules())
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.requires_grad and p.grad is not None for p in sparse.parameters())
    sparse.eval()
