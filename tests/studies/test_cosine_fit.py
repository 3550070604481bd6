"""Mixture regression and its fitter: identities of digest 5 §8, planted errors, success rates."""

from itertools import permutations

import pytest
import torch
from scipy.optimize import least_squares
from torch.autograd.functional import jacobian, jvp

from moiety.routing import build_router
from moiety.routing import cosine as core
from moiety.routing.perturbed_cosine import PerturbedCosine
from moiety.studies.cosine import fitter, regression
from moiety.studies.cosine.fitter import Box, Problem, fit, starts
from moiety.studies.cosine.regression import (
    Atoms,
    Gate,
    Law,
    flat,
    free_count,
    free_jacobian,
    inputs,
    law,
    predict,
    sample,
    scores,
    unflat,
)

VANILLA, LINEAR = Gate("vanilla"), Gate("linear")
GATES = [VANILLA, Gate("perturbed", 0.1, 0.5), Gate("perturbed", 0.0, 0.5), LINEAR]
EXPERTS = ["tanh", "relu", "linear"]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# -- the gate: of the study, and of the core -------------------------------------------------------


def of_study(b1, b0, x, tau_1, tau_2):
    """Scores `[n, k]` of the gate of the studies."""
    gate = Gate("perturbed" if tau_1 + tau_2 else "vanilla", tau_1, tau_2)
    return scores(Atoms(b1, b0, b1), x, gate).mT


def of_core(b1, b0, x, tau_1, tau_2):
    """Scores `[n, k]` of the routers `cosine` and `perturbed-cosine`."""
    if tau_1 + tau_2:
        name, taus = "perturbed-cosine", {"tau_1": tau_1, "tau_2": tau_2}
    else:
        name, taus = "cosine", {}
    router = build_router(name, dim=b1.shape[1], experts=len(b1), k=None, **taus).double()
    weights = {"embedding": b1, "bias": b0}
    return torch.func.functional_call(router, weights, (x,)).scores


BOTH = pytest.mark.parametrize("score", [of_study, of_core])
TAU_1, TAU_2 = 0.3, 0.8


def parameters():
    g = seeded(3)
    b1 = torch.randn(4, 3, generator=g, dtype=torch.float64)
    b0 = torch.randn(4, generator=g, dtype=torch.float64)
    return b1, b0, 3 * torch.randn(50, 3, generator=g, dtype=torch.float64)


def radial(score, tau_1, tau_2):
    """<b, ds/db> and s, both without the bias."""
    b1, b0, x = parameters()
    s, along = jvp(lambda b: score(b, b0 * 0, x, tau_1, tau_2), b1, b1)
    return along, s


def euler(score):
    return radial(score, 0.0, 0.0)[0].abs().max() < 1e-12


def perturbed_identity(score):
    along, s = radial(score, TAU_1, TAU_2)
    norm = parameters()[0].norm(dim=1)
    return torch.allclose(along, s * TAU_1 / (norm + TAU_1)) and along.abs().max() > 1e-3


def tau_2_alone(score):
    return radial(score, 0.0, TAU_2)[0].abs().max() < 1e-12


def scale_invariance(score):
    b1, b0, x = parameters()
    longer = b1 * torch.tensor([[1.0], [2.0], [5.0], [0.1]], dtype=torch.float64)
    same = torch.allclose(score(b1, b0, x, 0.0, 0.0), score(longer, b0, x, 0.0, 0.0))
    differ = score(b1, b0, x, TAU_1, TAU_2) - score(longer, b0, x, TAU_1, TAU_2)
    return same and differ[:, 1:].abs().amax(0).min() > 1e-3 and differ[:, 0].abs().max() < 1e-12


def limits(score):
    b1, b0, x = parameters()
    plain = score(b1, b0, x, 0.0, 0.0)
    tiny, huge = score(b1, b0, x, 1e-12, 1e-12), score(b1, b0, x, 1e9, 1e9)
    return torch.allclose(tiny, plain) and torch.allclose(huge, b0.expand_as(huge))


def score_range(score):
    b1, b0, x = parameters()
    far = (score(100 * b1, b0, 100 * x, TAU_1, TAU_2) - b0).abs().max()
    at_zero = [score(b1 * 0, b0, x, TAU_1, TAU_2), score(b1, b0, x * 0, TAU_1, TAU_2)]
    return far < 1 and all(torch.allclose(s, b0.expand_as(s)) for s in at_zero)


IDENTITIES = [euler, perturbed_identity, tau_2_alone, scale_invariance, limits, score_range]


def broken(score):
    return {identity.__name__ for identity in IDENTITIES if not identity(score)}


@BOTH
def test_the_identities_of_the_digest_hold(score):
    assert broken(score) == set()


WRONG = {
    "norm over the wrong axis": lambda v, tau: v / (v.norm(dim=-2, keepdim=True) + tau),
    "max(norm, tau)": lambda v, tau: v / v.norm(dim=-1, keepdim=True).clamp(min=max(tau, 1e-300)),
    "tau in the numerator": lambda v, tau: (v + tau) / (v.norm(dim=-1, keepdim=True) + tau),
}
BREAKS = {
    "norm over the wrong axis": {"perturbed_identity", "scale_invariance"},
    "max(norm, tau)": {"perturbed_identity", "scale_invariance"},
    "tau in the numerator": {"perturbed_identity", "limits", "score_range"},
}


@BOTH
@pytest.mark.parametrize("error", WRONG)
def test_a_planted_error_is_caught(score, error, monkeypatch):
    monkeypatch.setattr(regression if score is of_study else core, "shrink", WRONG[error])
    assert broken(score) >= BREAKS[error]


@BOTH
def test_swapped_taus_are_caught(score, monkeypatch):
    monkeypatch.setattr(PerturbedCosine, "taus", lambda self, x, noisy: (self.tau_2, self.tau_1))
    vectors, points = Gate.vectors, Gate.inputs
    monkeypatch.setattr(Gate, "vectors", points)
    monkeypatch.setattr(Gate, "inputs", vectors)
    assert broken(score) >= {"perturbed_identity", "tau_2_alone"}


def test_both_gates_are_the_same_function():
    b1, b0, x = parameters()
    for taus in ((0.0, 0.0), (0.3, 0.0), (0.0, 0.8), (0.3, 0.8)):
        torch.testing.assert_close(of_study(b1, b0, x, *taus), of_core(b1, b0, x, *taus))


# -- regression ------------------------------------------------------------------------------------


def test_a_mixture_worked_out_by_hand():
    # c = (3, 4) / (5 + 1), u = (2, 0) / (2 + 0.5): score 0.5 · 0.8 + 0.1 = 0.5, the reference's 0.
    # h = 2 tanh(0.5 · 2 − 1) = 0 and 3 tanh(1 · 2 + 0): g = 3 tanh(2) / (1 + e^0.5).
    table = [[3.0, 4.0, 0.1, 2.0, 0.5, 9.0, -1.0], [0.0, 0.0, 0.0, 3.0, 1.0, 9.0, 0.0]]
    atoms = Atoms.of_table(torch.tensor(table).double(), 2)
    x = torch.tensor([[2.0, 0.0]]).double()
    found = predict(atoms, x, Gate("perturbed", 1.0, 0.5), "tanh")
    assert found.item() == pytest.approx(3 * 0.9640275800758169 / (1 + 1.6487212707001282))


@pytest.mark.parametrize("expert", EXPERTS)
@pytest.mark.parametrize("gate", GATES, ids=str)
def test_derivatives_are_those_of_autograd(gate, expert):
    atoms, _ = law(2, 3, 2, gate, expert, seeded())
    x, y = sample(atoms, 40, gate, expert, seeded(1), noise=0.0)
    theta = flat(atoms)
    assert theta.shape == (2, free_count(3, 2, expert))
    assert torch.equal(unflat(theta, 3, 2, gate).table(), atoms.table())
    g, slopes = free_jacobian(atoms, x, gate, expert)
    assert torch.equal(g, y)
    for i in range(2):
        want = jacobian(lambda t, i=i: predict(unflat(t, 3, 2, gate), x[i], gate, expert), theta[i])
        torch.testing.assert_close(slopes[i].mT, want)


def test_gate_vectors_come_back_from_what_they_say():
    b1 = torch.randn(5, 3, generator=seeded(), dtype=torch.float64)
    for gate in (Gate("perturbed", 0.3, 0.1), LINEAR):
        torch.testing.assert_close(gate.back(gate.vectors(b1)), b1)
    torch.testing.assert_close(
        VANILLA.back(VANILLA.vectors(b1)).norm(dim=1), torch.ones(5).double()
    )
    assert Gate("perturbed", 0.3).back(torch.tensor([1.5, 0.0])).isinf().any()


def test_directions_have_length_one_and_the_same_function():
    atoms, _ = law(1, 3, 2, VANILLA, "tanh", seeded())
    unit = unflat(flat(atoms), 3, 2, VANILLA, mode="direction")
    torch.testing.assert_close(unit.b1.norm(dim=-1), torch.ones(1, 3).double())
    x = inputs(30, 2, seeded())
    torch.testing.assert_close(*(predict(a, x, VANILLA, "tanh") for a in (atoms, unit)))
    with pytest.raises(ValueError, match="sees norms"):
        unflat(flat(atoms), 3, 2, LINEAR, mode="direction")


def test_the_law_keeps_atoms_apart_and_counts_what_it_rejects():
    close, none = law(50, 3, 2, VANILLA, "tanh", seeded(), Law(gates_apart=0.0, experts_apart=0.0))
    apart, some = law(50, 3, 2, VANILLA, "tanh", seeded())
    assert (none, some > 5) == (0, True)
    distances = [
        min(torch.pdist(VANILLA.vectors(b1)).min() for b1 in drawn.b1) for drawn in (close, apart)
    ]
    assert distances[0] < 0.3 and distances[1] >= 0.5
    assert torch.equal(apart.b1[:, -1], torch.tensor([[1.0, 0.0]]).double().expand(50, 2))
    assert (apart.b0[:, -1] == 0).all()
    with pytest.raises(ValueError, match="asks too much"):
        law(1, 2, 2, VANILLA, "tanh", seeded(), Law(experts_apart=99.0))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cosine",), "vanilla"),
        (("perturbed",), "positive tau"),
        (("vanilla", 0.1), "positive tau"),
        (("perturbed", -0.1, 1.0), "negative"),
    ],
)
def test_a_wrong_gate_is_refused(words, said):
    with pytest.raises(ValueError, match=said):
        Gate(*words)


# -- the fitter ------------------------------------------------------------------------------------


def worst_parameter(found, truth, gate):
    """`[B]`: the largest error of any parameter under the best labelling, for tanh experts."""
    best = torch.full((len(found.b0),), torch.inf, dtype=torch.float64)
    eta = found.eta * found.eta[..., :1].sign()  # a tanh(z) = −a tanh(−z)
    for order in map(list, permutations(range(found.k))):
        c, b0 = gate.vectors(found.b1)[:, order], found.b0[:, order]
        same = Atoms(gate.back(c - c[:, -1:]), b0 - b0[:, -1:], eta[:, order])
        error = (same.table() - truth.table()).abs().nan_to_num(torch.inf).amax((1, 2))
        best = best.minimum(error)
    return best


def recover(problems, k, dim, tau, restarts, seed):
    """Noiseless problems of the law: which were recovered, which are called solved."""
    gate, g = Gate("perturbed", tau, tau), seeded(seed)
    truth, _ = law(problems, k, dim, gate, "tanh", g)
    x, y = sample(truth, 200, gate, "tanh", g, noise=0.0)
    found = fit(x, y, k, gate, "tanh", restarts=restarts, generator=g)
    return worst_parameter(found.atoms, truth, gate) <= 1e-6, found.solved


def test_random_starts_find_the_truth():
    good, solved = recover(30, k=2, dim=2, tau=0.1, restarts=16, seed=1)
    assert good.sum() >= 29
    assert solved.sum() >= 25 and not (solved & ~good).any()


@pytest.mark.slow  # 7 minutes on one core
@pytest.mark.parametrize(
    ("k", "dim", "restarts", "least"), [(2, 2, 16, 95), (2, 8, 16, 95), (3, 2, 128, 90)]
)
def test_random_starts_find_the_truth_in_most_of_100_problems(k, dim, restarts, least):
    goods, called = [], []
    for tau in (0.1, 0.5):
        good, solved = recover(100, k, dim, tau, restarts, seed=2)
        assert good.sum() >= least
        goods.append(good[solved])
        called.append(solved)
    assert torch.cat(goods).double().mean() >= 0.99
    assert torch.cat(called).sum() >= 100


def noisy(k=2, n=400, problems=4, seed=0, gate=GATES[1]):
    truth, _ = law(problems, k, 2, gate, "tanh", seeded(seed))
    return truth, *sample(truth, n, gate, "tanh", seeded(seed + 1))


def test_a_fit_is_a_least_squares_estimate_inside_the_box():
    truth, x, y = noisy()
    gate, box = GATES[1], Box()
    found = fit(x, y, 2, gate, "tanh", generator=seeded(), restarts=8, noise=0.1)
    started = fit(x, y, 2, gate, "tanh", generator=seeded(), start=flat(truth)[:, None], noise=0.1)
    assert (found.loss <= started.loss * (1 + 1e-6)).all()
    assert started.gap.isinf().all() and not started.solved.any()  # nothing to agree with
    ends = box.ends(2, 2, "tanh").numpy()
    for i in range(4):

        def residual(theta, i=i):
            atoms = unflat(torch.from_numpy(theta), 2, 2, gate)
            return (predict(atoms, x[i], gate, "tanh") - y[i]).numpy()

        theirs = least_squares(residual, found.theta[i].numpy() * 0.999, bounds=(-ends, ends))
        assert found.loss[i].item() <= 2 * theirs.cost / 400 * (1 + 1e-6)
    assert torch.equal(unflat(found.theta, 2, 2, gate).table(), found.atoms.table())
    assert (
        (predict(found.atoms, x, gate, "tanh") - y).square().mean(1) - found.loss
    ).abs().max() < 1e-12


def test_what_is_solved_depends_on_the_noise_and_on_two_that_agree():
    _, x, y = noisy()
    gate = GATES[1]
    knows = fit(x, y, 2, gate, "tanh", generator=seeded(), restarts=8, noise=0.1)
    assert knows.solved.sum() >= 3
    assert (knows.gap[knows.solved] <= 1e-6 * knows.loss[knows.solved]).all()
    none = fit(x, y, 2, gate, "tanh", generator=seeded(), restarts=8, noise=0.0)
    assert torch.equal(none.theta, knows.theta) and not none.solved.any()
    one = fit(x, y, 2, gate, "tanh", generator=seeded(), restarts=8, noise=0.1, polish=1)
    assert not one.solved.any()


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("expert", EXPERTS)
def test_every_gate_and_expert_can_be_fitted(gate, expert):
    truth, _ = law(3, 2, 2, gate, expert, seeded(5))
    x, y = sample(truth, 300, gate, expert, seeded(6))
    found = fit(x, y, 2, gate, expert, generator=seeded(), restarts=8, iterations=100)
    assert (found.loss < 0.1**2 * 1.3).sum() >= 2


def test_a_fit_that_would_leave_the_box_stays_and_says_so():
    _, x, y = noisy()
    box, gate = Box(a=0.5), GATES[1]  # true amplitudes are 1 to 2
    found = fit(x, y, 2, gate, "tanh", generator=seeded(), restarts=4, iterations=60, box=box)
    assert found.touched.all()
    assert (found.theta.abs() <= box.ends(2, 2, "tanh")).all()
    assert (found.atoms.eta[..., 0].abs() == 0.5).any(1).all()
    problem = Problem(x, y, 2, gate, "tanh", box.ends(2, 2, "tanh"))
    _, gradient, _ = problem.normal(found.theta, torch.arange(4))
    assert (found.projected_gradient < 0.1 * 2 * gradient.abs().amax(1)).all()


def test_the_optimisation_error_is_what_as_many_iterations_more_take_off():
    _, x, y = noisy()
    words = {"generator": seeded()}
    start = starts(4, 2, 2, 2, "tanh", seeded(8))
    short, long, double = (
        fit(x, y, 2, GATES[1], "tanh", **words, start=start, iterations=i) for i in (3, 300, 6)
    )
    assert (short.optimisation_error > 1e-4).all()
    assert (long.optimisation_error < 1e-9).sum() >= 3
    assert (double.loss <= short.loss).all()


def test_the_search_sees_no_more_points_than_it_may(monkeypatch):
    seen = []
    plain = fitter.descend

    def spy(problem, start, iterations):
        seen.append((problem.x.shape[1], start.shape[1]))
        return plain(problem, start, iterations)

    monkeypatch.setattr(fitter, "descend", spy)
    _, x, y = noisy(problems=1)
    words = {"restarts": 5, "iterations": 2, "search_points": 100, "polish": 3}
    fit(x, y, 2, GATES[1], "tanh", generator=seeded(), **words)
    assert seen == [(100, 5), (400, 3), (400, 3)]


def test_many_points_are_summed_in_pieces():
    truth, x, y = noisy(n=90_000, problems=2)
    problem = Problem(x, y, 2, GATES[1], "tanh", Box().ends(2, 2, "tanh"))
    loss, gradient, matrix = problem.normal(flat(truth), torch.arange(2))
    g, slopes = free_jacobian(truth, x, GATES[1], "tanh")
    torch.testing.assert_close(loss, (g - y).square().mean(1))
    torch.testing.assert_close(gradient, (slopes * (g - y)[:, None]).mean(-1))
    torch.testing.assert_close(matrix, slopes @ slopes.mT / 90_000)


def test_the_same_seed_gives_the_same_bits():
    _, x, y = noisy()
    a, b, c = (
        fit(x, y, 2, GATES[1], "tanh", generator=seeded(s), restarts=3, iterations=8)
        for s in (0, 0, 1)
    )
    assert torch.equal(a.theta, b.theta) and not torch.equal(a.theta, c.theta)


def test_problems_do_not_change_each_other():
    _, x, y = noisy()
    start = starts(4, 2, 2, 2, "tanh", seeded())
    words = {"generator": seeded(), "iterations": 10}
    all_four = fit(x, y, 2, GATES[1], "tanh", start=start, **words)
    alone = fit(x[2:3], y[2:3], 2, GATES[1], "tanh", start=start[2:3], **words)
    torch.testing.assert_close(all_four.theta[2:3], alone.theta)


def test_data_that_do_not_fit_together_are_refused():
    _, x, y = noisy()
    with pytest.raises(ValueError, match="float64"):
        fit(x.float(), y, 2, LINEAR, "tanh", generator=seeded())
    with pytest.raises(ValueError, match="B, n"):
        fit(x, y[:, 1:], 2, LINEAR, "tanh", generator=seeded())
    with pytest.raises(ValueError, match=r"\[4, r, 11\]"):
        fit(x, y, 2, LINEAR, "tanh", generator=seeded(), start=torch.zeros(4, 1, 7).double())
    with pytest.raises(ValueError, match="tanh, relu, linear"):
        fit(x, y, 2, LINEAR, "gelu", generator=seeded())
