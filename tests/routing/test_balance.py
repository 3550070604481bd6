"""Balance losses against numbers worked by hand: the example of docs/losses.md, and extremes."""

from __future__ import annotations

import math

import pytest
import torch

from moiety.routing import balance, build_router
from moiety.routing.value import Routing

PROBS = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.6, 0.2, 0.1]])
INDEX = torch.tensor([[0, 1], [1, 2]])
SHIFT = torch.tensor([[1.0], [2.0]])  # the scores are log p plus this, so this is their logsumexp


def example(**changes) -> Routing:
    fields = {"probs": PROBS, "scores": PROBS.log() + SHIFT} | changes
    return Routing.choose(INDEX, PROBS, **fields)


def of_probs(probs, index, **fields) -> Routing:
    return Routing.choose(torch.tensor(index), torch.tensor(probs), **fields)


# -- the example of docs/losses.md -----------------------------------------------------------------


def test_importance_of_the_example():
    # Sums 0.5, 0.9, 0.4, 0.2: mean 0.5, squared deviations 0, 0.16, 0.01, 0.09, their mean 0.065.
    # 0.065 / 0.5² = 0.26.
    assert balance.importance(example()).item() == pytest.approx(0.26)


def test_switch_of_the_example():
    # f = 1/4, 2/4, 1/4, 0 of the four slots; P = 0.25, 0.45, 0.2, 0.1.
    # 4 · (0.0625 + 0.225 + 0.05) = 1.35.
    assert balance.switch(example()).item() == pytest.approx(1.35)


def test_gshard_of_the_example():
    # First choices are 0 and 1: f = 1/2, 1/2, 0, 0. 4 · (0.125 + 0.225) = 1.4.
    assert balance.gshard(example()).item() == pytest.approx(1.4)


def test_z_of_the_example():
    # logsumexp of the scores is 1 and 2: (1 + 4) / 2 = 2.5.
    assert balance.z(example()).item() == pytest.approx(2.5)


def test_load_of_the_example():
    # One token, scores 1, 0.5, 0, −0.5, noise 0.5, two chosen, threshold 0.5 (the second largest).
    # (threshold − score) / noise = −1, 0, 1, 2; p = Φ(1), Φ(0), Φ(−1), Φ(−2)
    #   = 0.841345, 0.5, 0.158655, 0.022750: mean 0.380688, population variance 0.100964.
    # 0.100964 / 0.380688² = 0.69668.
    scores = torch.tensor([[1.0, 0.5, 0.0, -0.5]])
    r = Routing.choose(
        torch.tensor([[0, 1]]),
        scores.softmax(-1),
        scores=scores,
        threshold=torch.tensor([0.5]),
        noise_std=torch.tensor(0.5),
    )
    assert balance.load(r).item() == pytest.approx(0.69668, abs=1e-5)


def test_sigmoids_of_the_example_are_made_a_distribution():
    # Twice the gate has the same shares: every loss on the gate stays.
    twice = example(probs=2 * PROBS)
    assert balance.importance(twice).item() == pytest.approx(0.26)
    assert balance.switch(twice).item() == pytest.approx(1.35)
    assert balance.gshard(twice).item() == pytest.approx(1.4)


# -- extremes --------------------------------------------------------------------------------------


def test_even_gates_are_the_optimum():
    even = of_probs([[0.25] * 4] * 4, [[0], [1], [2], [3]])
    assert balance.importance(even).item() == 0
    assert balance.switch(even).item() == pytest.approx(1)
    assert balance.gshard(even).item() == pytest.approx(1)


def test_collapse():
    # All mass on one of E = 4: the E sums are 1, 0, 0, 0, mean 1/4, variance 3/16; 3/16 · 16 = 3.
    one = of_probs([[1.0, 0.0, 0.0, 0.0]] * 3, [[0]] * 3)
    assert balance.importance(one).item() == pytest.approx(3)
    assert balance.switch(one).item() == pytest.approx(4)
    assert balance.gshard(one).item() == pytest.approx(4)


def test_switch_counts_what_the_router_wanted_not_what_capacity_left():
    cut = example(
        active=torch.tensor([[True, False], [True, True]]),
        dropped=torch.tensor([[False, True], [False, False]]),
    )
    assert balance.switch(cut).item() == pytest.approx(1.35)


def test_a_first_choice_that_capacity_cut_is_still_the_first():
    cut = example(
        active=torch.tensor([[False, True], [True, True]]),
        dropped=torch.tensor([[True, False], [False, False]]),
    )
    assert balance.gshard(cut).item() == pytest.approx(1.4)


def test_load_is_zero_without_noise():
    assert balance.load(example()).item() == 0


def test_gradients_push_towards_balance():
    logits = torch.zeros(6, 4, requires_grad=True)
    with torch.no_grad():
        logits[:, 0] = 1.0
    for name in ("importance", "switch", "gshard"):
        logits.grad = None
        r = Routing.choose(torch.zeros(6, 1, dtype=torch.long), logits.softmax(-1), scores=logits)
        balance.LOSSES[name](r).backward()
        assert (logits.grad[:, 0] > 0).all(), name  # a step lowers the favourite
        assert (logits.grad[:, 1:] < 0).all(), name


def test_own_terms_of_a_router():
    for name in ("entropy", "reachability", "sparsity"):
        r = example(penalties={name: torch.tensor(0.7)})
        assert balance.LOSSES[name](r).item() == pytest.approx(0.7)
        with pytest.raises(ValueError, match=f"no {name} term"):
            balance.LOSSES[name](example())


def test_losses_say_what_they_lack():
    bare = Routing(index=INDEX, weight=torch.ones(2, 2), experts=4, tokens=2)
    for name in ("importance", "switch", "gshard"):
        with pytest.raises(ValueError, match=f"{name} loss needs a gate distribution"):
            balance.LOSSES[name](bare)
    with pytest.raises(ValueError, match="needs router scores"):
        balance.z(bare)


def test_weights():
    terms = balance.terms(example(), {"switch": 0.1, "z": 0.0, "importance": 2})
    assert {k: v.item() for k, v in terms.items()} == pytest.approx(
        {"switch": 0.135, "importance": 0.52}
    )
    with pytest.raises(ValueError, match="no balance loss is named 'swich'"):
        balance.check_weights({"swich": 1.0})
    with pytest.raises(ValueError, match="finite number"):
        balance.check_weights({"switch": math.inf})


# -- padding ---------------------------------------------------------------------------------------

ALONE = [
    ("noisy-top-k", {}),
    ("switch", {}),
    ("sigmoid-balanced", {}),
    ("cosine", {}),
    ("cosine", {"k": None}),
    ("perturbed-cosine", {}),
    ("tree", {}),
    ("tree", {"k": 2}),
    ("hash", {"k": 2}),
]


def pad(t: torch.Tensor, rows: torch.Tensor, side: str) -> torch.Tensor:
    return torch.cat([rows, t] if side == "left" else [t, rows])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("name", "options"), ALONE)
def test_padding_changes_no_loss_of_a_router(name, options, side):
    # Eval: training noise would differ between the two calls. `random` depends on positions.
    torch.manual_seed(0)
    router = build_router(name, dim=8, experts=4, **options).eval()
    x = torch.randn(9, 8)
    padded = pad(x, 5 * torch.randn(7, 8), side)
    mask = pad(torch.ones(9, dtype=torch.bool), torch.zeros(7, dtype=torch.bool), side)
    plain, other = router(x), router(padded, mask)
    torch.testing.assert_close(other.dense()[mask], plain.dense())
    assert other.load().tolist() == plain.load().tolist()
    for loss in ("importance", "load", "switch", "gshard", "z"):
        if plain.probs is not None:
            torch.testing.assert_close(balance.LOSSES[loss](other), balance.LOSSES[loss](plain))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("std", [torch.tensor(0.5), torch.rand(2, 4) + 0.1])
def test_padding_changes_no_load_loss(side, std):
    def grown(t, fill):
        return pad(t, torch.full((3, *t.shape[1:]), fill, dtype=t.dtype), side)

    fields = {"probs": PROBS, "scores": PROBS.log() + SHIFT}
    noisy = {"threshold": torch.tensor([0.2, 1.1]), "noise_std": std}
    plain = Routing.choose(INDEX, PROBS, **fields, **noisy)
    mask = grown(torch.ones(2, dtype=torch.bool), False)
    padded = Routing.choose(
        grown(INDEX, 3),
        grown(PROBS, 0.7),
        probs=grown(PROBS, 0.7),
        scores=grown(fields["scores"], 3.0),
        threshold=grown(noisy["threshold"], -1.0),
        noise_std=std if std.dim() == 0 else grown(std, 2.0),
        mask=mask,
        active=mask[:, None].expand(-1, 2),
    )
    for loss in ("importance", "load", "switch", "gshard", "z"):
        torch.testing.assert_close(balance.LOSSES[loss](padded), balance.LOSSES[loss](plain))
    assert balance.load(plain) > 0


def test_entropy_and_reachability_of_the_example():
    router = build_router("dselect-k-static", dim=4, experts=3, k=1)
    with torch.no_grad():
        router.z.copy_(torch.tensor([[0.0, -0.25]]))
    # Digits 1/2 and 0.15625: codes 0.421875, 0.421875, 0.078125 and, of nobody, 0.078125.
    routing = router(torch.zeros(5, 4, dtype=torch.float64))
    assert float(balance.entropy(routing).detach()) == pytest.approx(0.927371, abs=1e-6)
    assert float(balance.reachability(routing).detach()) == pytest.approx(0.078125, abs=1e-9)
    router.reach = "code"
    routing = router(torch.zeros(5, 4, dtype=torch.float64))
    assert float(balance.reachability(routing).detach()) == pytest.approx(1.084746, abs=1e-6)


def test_sparsity_of_the_example():
    router = build_router("gumbel-static", dim=4, experts=2)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([0.5, 0.25]).logit())
    routing = router(torch.zeros(5, 4))
    assert float(balance.sparsity(routing).detach()) == pytest.approx(-2.079442, abs=1e-5)
