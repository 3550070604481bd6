"""Cells, errors and losses of fitted mixtures, on atoms made by hand."""

import math

import pytest
import torch

from moiety.studies.cosine.regression import Atoms, Gate, inputs, law, predict, shrink
from moiety.studies.cosine.voronoi import (
    back,
    canonical,
    compare_experts,
    errors,
    loss_1,
    loss_2,
    relabel,
    settle,
)

PERTURBED = Gate("perturbed", 0.5, 0.5)
GATES = {
    "vanilla": Gate("vanilla"),
    "perturbed": PERTURBED,
    "tau_1 alone": Gate("perturbed", 0.5, 0.0),
    "tau_2 alone": Gate("perturbed", 0.0, 0.5),
    "linear": Gate("linear"),
}


def atoms(*rows):
    """Rows of b1 (two numbers), b0, eta."""
    return Atoms.of_table(torch.tensor(rows, dtype=torch.float64), 2)


# a tanh(w·x + c) with b1 = (1, 0) and mass 1; the reference
TRUTH = atoms([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 2.0, 0.0, 1.0, 0.5])


def drawn(gate, k=3, dim=2, expert="tanh", seed=0):
    return law(1, k, dim, gate, expert, torch.Generator().manual_seed(seed))[0].each(lambda t: t[0])


def judged(fitted, truth, gate=PERTURBED, expert="tanh"):
    return errors(settle(fitted, truth, gate, expert), truth, gate, expert)


def permuted(some, order):
    return some.each(lambda t: t[order])


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("expert", ["tanh", "relu", "linear"])
def test_the_truth_itself_has_no_error_and_any_other_mixture_has_one(gate, expert):
    truth = drawn(gate, expert=expert)
    cells = settle(truth, truth, gate, expert)
    assert cells.owner.tolist() == [0, 1, 2] and not cells.moved and not cells.empty
    found = errors(cells, truth, gate, expert)
    assert max(found[f"{part}, single"] for part in ("gate raw", "bias", "expert")) < 1e-7
    assert all(value.isnan() for name, value in found.items() if name.endswith("shared"))
    assert loss_1(cells, truth, expert) < 1e-7 and loss_2(cells, truth, expert) < 1e-7
    for part in range(3):
        table = [truth.b1, truth.b0, truth.eta]
        table[part] = table[part].clone()
        table[part][0] += 0.05
        other = settle(Atoms(*table), truth, gate, expert)
        assert loss_1(other, truth, expert) > 0.01 and loss_2(other, truth, expert) > 0.01


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_the_order_of_atoms_does_not_matter_where_the_reference_stays(gate):
    truth = drawn(gate)
    fitted = permuted(truth.each(lambda t: t + 0.02 * torch.randn_like(t)), [0, 1, 2])
    fitted.b1[-1], fitted.b0[-1] = truth.b1[-1], 0.0
    swapped = permuted(fitted, [1, 0, 2])
    one, two = (settle(some, truth, gate, "tanh") for some in (fitted, swapped))
    assert two.owner.tolist() == [1, 0, 2]
    for loss in (loss_1, loss_2):
        torch.testing.assert_close(loss(one, truth, "tanh"), loss(two, truth, "tanh"))
    torch.testing.assert_close(
        errors(one, truth, gate, "tanh"), errors(two, truth, gate, "tanh"), equal_nan=True
    )


@pytest.mark.parametrize("name", ["perturbed", "tau_1 alone", "linear"])
def test_a_fit_with_another_reference_is_the_same_mixture(name):
    gate, x = GATES[name], inputs(50, 2, torch.Generator().manual_seed(1))
    truth = drawn(gate, k=2)
    other = relabel(truth, settle(truth, permuted(truth, [1, 0]), gate, "tanh"), gate, 1e3)
    torch.testing.assert_close(predict(other, x, gate, "tanh"), predict(truth, x, gate, "tanh"))
    assert other.b0[-1] == 0 and not other.b1[-1].any()
    cells = settle(other, truth, gate, "tanh")
    assert cells.moved and cells.owner.tolist() == [1, 0]
    found = errors(cells, truth, gate, "tanh")
    assert max(found[f"{part}, single"] for part in ("gate raw", "bias", "expert")) < 1e-6
    again = relabel(other, cells, gate, 1e3)
    torch.testing.assert_close(again.table(), truth.table())
    assert not settle(again, truth, gate, "tanh").moved


def test_what_no_gate_vector_can_say_becomes_the_nearest_that_one_can():
    c = torch.tensor([[0.6, 0.0], [-1.2, 0.9]], dtype=torch.float64)  # the second has norm 1.5
    b1 = back(c, c, PERTURBED, limit=4.5)
    torch.testing.assert_close(
        PERTURBED.vectors(b1), torch.tensor([[0.6, 0.0], [-0.72, 0.54]]).double()
    )
    assert b1[1].norm() == pytest.approx(4.5)
    unit = back(c, torch.full((2, 2), 2.0).double(), GATES["vanilla"], limit=4.5)
    torch.testing.assert_close(unit, shrink(c, 0.0) * math.sqrt(8))


def test_experts_are_compared_up_to_their_symmetry():
    eta = torch.tensor([[1.5, 1.0, -2.0, 0.5]], dtype=torch.float64)
    scaled = torch.cat([eta[:, :1] / 4, eta[:, 1:] * 4], -1)
    assert compare_experts(-eta, eta, "tanh")[0] == 0
    assert compare_experts(-eta, eta, "tanh")[1] == -1
    assert compare_experts(scaled, eta, "tanh")[0] > 1
    assert compare_experts(scaled, eta, "relu")[0] < 1e-20
    assert compare_experts(-eta, eta, "relu")[0] > 1  # relu is not odd
    assert compare_experts(-eta[:, 1:], eta[:, 1:], "linear")[0] > 1
    assert canonical(eta, "relu")[0, 1:].norm() == pytest.approx(1)


def test_a_turned_tanh_expert_is_no_error_and_a_scaled_one_is():
    turned = Atoms(TRUTH.b1, TRUTH.b0, -TRUTH.eta)
    assert judged(turned, TRUTH)["expert, single"] == 0
    scaled = Atoms(TRUTH.b1, TRUTH.b0, 1.1 * TRUTH.eta)
    assert judged(scaled, TRUTH)["expert, single"] > 0.1


def test_errors_by_hand():
    # b1 is 1.21 for 1; b0 is 0.3 for 0; the experts are off by 0.3 and by 0.4
    fitted = atoms([1.21, 0.0, 0.3, 1.3, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 2.0, 0.4, 1.0, 0.5])
    found = judged(fitted, TRUTH)
    assert found["gate raw, single"] == pytest.approx(0.21)
    assert found["gate direction, single"] == 0
    assert found["bias, single"] == pytest.approx(0.3)
    assert found["expert, single"] == pytest.approx(math.sqrt((0.09 + 0.16) / 2))
    turned = Atoms(fitted.b1[:, [1, 0]], fitted.b0, fitted.eta)
    assert judged(turned, TRUTH)["gate direction, single"] == pytest.approx(math.sqrt(2))


def shared(spread, mass=0.5):
    """The first true atom by two, of masses `mass` and 1 − `mass`, off by opposite steps."""
    one = [1.0, 0.0, math.log(mass), 1.0, 1.0 + spread, 0.0, 0.0]
    two = [1.0, 0.0, math.log(1 - mass), 1.0, 1.0 - spread, 0.0, 0.0]
    return atoms(one, two, TRUTH.table()[1].tolist())


def test_two_atoms_on_one_true_atom_are_a_shared_cell_of_their_joint_mass():
    for spread, mass in ((0.0, 0.5), (0.0, 0.1), (0.1, 0.5)):
        cells = settle(shared(spread, mass), TRUTH, PERTURBED, "tanh")
        assert cells.owner.tolist() == [0, 0, 1] and cells.count.tolist() == [2, 1]
        found = errors(cells, TRUTH, PERTURBED, "tanh")
        assert found["expert, shared"] == pytest.approx(spread)
        assert found["bias, shared"] == pytest.approx(0, abs=1e-12)
        assert found["expert, single"] == 0 and found["gate raw, single"].isnan()
        # only L_2 counts the squares of what is shared: 0.5 · 0.1² twice, where L_{1,1} has 0.1
        assert loss_2(cells, TRUTH, "tanh") == pytest.approx(spread**2, abs=1e-12)
        assert loss_1(cells, TRUTH, "tanh") == pytest.approx(spread, abs=1e-12)
        assert loss_1(cells, TRUTH, "tanh", r=3.0) == pytest.approx(spread**3, abs=1e-12)


def pooled_loss(power):
    """A planted error: the same power in single and in shared cells."""
    return lambda cells, truth, expert: loss_1(cells, truth, expert, r=power)


def tells_single_from_shared(loss):
    """Whether a loss halves with the error of a single atom and quarters with that of two."""
    single = [atoms([1.0, 0.0, 0.0, 1.0, 1.0 + s, 0.0, 0.0], TRUTH.table()[1].tolist())
              for s in (0.2, 0.1)]  # fmt: skip
    both = [[loss(settle(some, TRUTH, PERTURBED, "tanh"), TRUTH, "tanh").item() for some in pair]
            for pair in (single, [shared(0.2), shared(0.1)])]  # fmt: skip
    ratios = [large / small for large, small in both]
    return ratios == pytest.approx([2.0, 4.0])


def test_a_pooled_loss_is_caught():
    assert tells_single_from_shared(loss_2)
    assert not tells_single_from_shared(pooled_loss(1.0))
    assert not tells_single_from_shared(pooled_loss(2.0))


def test_single_and_shared_errors_are_never_pooled():
    both = shared(0.1)
    both.eta[2, 0] += 0.3
    found = judged(both, TRUTH)
    assert found["expert, shared"] == pytest.approx(0.1)
    assert found["expert, single"] == pytest.approx(0.3)


def test_a_shared_reference_does_not_carry_its_spread_into_single_atoms():
    near = PERTURBED.back(torch.tensor([0.0, 0.1], dtype=torch.float64)).tolist()
    rest = TRUTH.table()[1, 3:].tolist()
    goal = PERTURBED.vectors(TRUTH.b1)[0]
    # Two atoms of equal mass, at c = 0 and c = (0, 0.1): the mean is (0, 0.05).
    moved = PERTURBED.back(goal + torch.tensor([0.0, 0.05], dtype=torch.float64)).tolist()
    first = [*moved, math.log(2), *TRUTH.table()[0, 3:].tolist()]
    fitted = atoms(first, [*near, 0.0, *rest], [0.0, 0.0, 0.0, *rest])
    cells = settle(fitted, TRUTH, PERTURBED, "tanh")
    assert cells.owner.tolist() == [0, 1, 1]
    found = errors(cells, TRUTH, PERTURBED, "tanh")
    assert found["gate raw, single"] < 1e-9 and found["bias, single"] < 1e-9
    spread = PERTURBED.back(torch.tensor([0.0, 0.05], dtype=torch.float64)).norm()
    assert found["gate raw, shared"] == pytest.approx(spread.item())


def test_a_fit_with_an_empty_cell_is_counted_and_has_no_errors():
    fitted = Atoms(torch.zeros_like(TRUTH.b1), TRUTH.b0, TRUTH.eta[[1, 1]])
    cells = settle(fitted, TRUTH, PERTURBED, "tanh")
    assert cells.empty and cells.count.tolist() == [0, 2]
    assert all(value.isnan() for value in errors(cells, TRUTH, PERTURBED, "tanh").values())


def test_the_length_of_a_vanilla_gate_vector_is_an_error_of_the_raw_one_alone():
    gate = GATES["vanilla"]
    truth = drawn(gate, k=2)
    longer = Atoms(truth.b1 * torch.tensor([[3.0], [1.0]]).double(), truth.b0, truth.eta)
    found = judged(longer, truth, gate)
    assert found["gate raw, single"] == pytest.approx(2 * truth.b1[0].norm().item())
    assert found["gate direction, single"] < 1e-7 and found["expert, single"] == 0


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_many_fits_at_once_are_judged_as_one_by_one(gate):
    truth = drawn(gate, k=2)
    table = torch.stack([drawn(gate, k=3, seed=s).table() for s in range(6)])
    many = Atoms.of_table(table, 2)
    together = judged(many, truth, gate)
    for row in range(6):
        alone = judged(many.each(lambda t, row=row: t[row]), truth, gate)
        for name, value in alone.items():
            torch.testing.assert_close(together[name][row], value, equal_nan=True)
