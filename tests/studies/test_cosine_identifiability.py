"""Flat directions and the size of tau: the tables of digest 5 §3, derived again."""

import math

import pytest
import torch

from moiety.studies.cosine import identifiability, regression
from moiety.studies.cosine.identifiability import ARMS, CLAIMS, FLAT, look
from moiety.studies.cosine.regression import Gate, inputs, law, predict, unflat
from moiety.studies.cosine.regression import flat as flatten
from moiety.studies.cosine.spectrum import gauss_newton


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(gate, k, dim=3, problems=3, seed=0):
    atoms, _ = law(problems, k, dim, gate, "tanh", seeded(seed))
    return atoms, inputs(500, dim, seeded(seed + 1))


def flats(gate, k, convention, dim=3):
    atoms, x = drawn(gate, k, dim)
    values = gauss_newton(atoms, x, gate, "tanh", convention)
    return (values < FLAT * values[:, -1:]).sum(1).tolist()


# Columns of the digest for k = 2, 3, 4, and what follows for the other gates.
TABLE = [
    ("vanilla", 0.0, 0.0, "free", (3, 3, 4)),
    ("perturbed", 0.5, 0.5, "free", (3, 3, 3)),
    ("vanilla", 0.0, 0.0, "reference", (1, 2, 3)),
    ("perturbed", 0.5, 0.5, "reference", (0, 0, 0)),
    ("perturbed", 0.5, 0.0, "reference", (0, 0, 0)),
    ("perturbed", 0.0, 0.5, "reference", (1, 2, 3)),
    ("vanilla", 0.0, 0.0, "direction", (0, 0, 0)),
    ("linear", 0.0, 0.0, "reference", (0, 0, 0)),
]


@pytest.mark.parametrize(("kind", "tau_1", "tau_2", "convention", "counts"), TABLE)
def test_the_table_of_ranks(kind, tau_1, tau_2, convention, counts):
    gate = Gate(kind, tau_1, tau_2)
    for k, count in zip((2, 3, 4), counts):
        assert flats(gate, k, convention) == [count] * 3


def test_in_other_dimensions_as_many_as_the_shapes_say():
    # All gate vectors free: k d of them; of unit vectors k (d − 1), of differences (k − 1) d count.
    for k, dim in ((2, 2), (4, 2), (2, 5)):
        seen = min(k * (dim - 1), (k - 1) * dim)
        assert flats(Gate("vanilla"), k, "free", dim) == [k * dim - seen] * 3
        assert flats(Gate("perturbed", 0.5, 0.5), k, "free", dim) == [dim] * 3


@pytest.mark.parametrize("gate", [Gate("vanilla"), Gate("perturbed", 0.4, 0.2)], ids=str)
def test_eigenvalues_are_those_of_autograds_matrix(gate):
    atoms, x = drawn(gate, 3, problems=1)
    theta = flatten(atoms)[0]
    slopes = torch.autograd.functional.jacobian(
        lambda t: predict(unflat(t, 3, 3, gate), x, gate, "tanh"), theta
    )
    want = torch.linalg.eigvalsh(slopes.mT @ slopes / len(x))
    torch.testing.assert_close(gauss_newton(atoms, x, gate, "tanh")[0], want, rtol=1e-6, atol=1e-14)


def test_directions_leave_out_lengths_and_nothing_else():
    gate = Gate("vanilla")
    atoms, x = drawn(gate, 3)
    whole, part = (gauss_newton(atoms, x, gate, "tanh", c) for c in ("reference", "direction"))
    assert part.shape[1] == whole.shape[1] - 2
    torch.testing.assert_close(whole[:, 2:], part)  # lengths are eigenvectors of their own


def test_the_smallest_eigenvalue_grows_as_tau_squared_while_tau_is_small():
    atoms, x = drawn(Gate("linear"), 3, problems=20)
    found = {
        tau: gauss_newton(atoms, x, Gate("perturbed", tau, tau), "tanh")[:, 0].log10().mean().item()
        for tau in (1e-4, 1e-3, 1e-2, 0.5, 3.0)
    }
    assert found[1e-3] - found[1e-4] == pytest.approx(2, abs=0.02)
    assert found[1e-2] - found[1e-3] == pytest.approx(2, abs=0.1)
    assert found[0.5] > found[3.0] > found[1e-2]
    assert math.log10(7.2e-6) == pytest.approx(found[0.5], abs=0.7)  # digest 5 §3.6


# -- the study -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARMS)
def test_each_arm_finds_what_it_expects(name):
    found = look(ARMS[name], seeded(1))
    assert found["beyond"] == 0
    assert found["identity"] < 1e-12
    tau, norms = ARMS[name]["tau_1"], (1.0, 2.0)
    if ARMS[name]["gate"] != "linear":
        low, high = (tau / (norm + tau) for norm in norms[::-1])
        assert low - 1e-12 <= found["radial"] <= high + 1e-12


def test_arms_of_one_k_see_the_same_mixtures(monkeypatch):
    seen = []
    plain = identifiability.gauss_newton

    def spy(atoms, *words):
        seen.append(atoms.eta)
        return plain(atoms, *words)

    monkeypatch.setattr(identifiability, "gauss_newton", spy)
    for name in ("linear", "tau 0.1", "tau_2 alone", "vanilla, free, k = 3"):
        look(ARMS[name], seeded(4))
    assert all(torch.equal(eta, seen[0]) for eta in seen)


def test_norms_that_are_only_bounded_below_are_caught(monkeypatch):
    monkeypatch.setattr(
        regression,
        "shrink",
        lambda v, tau: v / v.norm(dim=-1, keepdim=True).clamp(min=max(tau, 1e-9)),
    )
    assert look(ARMS["tau 0.1"], seeded())["identity"] > 1e-3


def test_claims_are_our_own_and_cover_the_table():
    assert {claim.tier for claim in CLAIMS} == {"our own"}
    tabled = [name for name in ARMS if "k =" in name]
    assert len(tabled) == 15
    assert set(tabled) == {claim.a for claim in CLAIMS if claim.metric == "beyond"}
