"""Slopes over n and when they count; the studies of rates and of the worst case."""

import dataclasses
import math

import pytest
import torch

from moiety.lab.store import Store, Trial
from moiety.lab.study import Running
from moiety.studies.cosine import course, fitter, project, rates, slopes, worst_case
from moiety.studies.cosine.fitter import Fit
from moiety.studies.cosine.regression import Atoms, Gate, inputs, predict
from moiety.studies.cosine.slopes import Effort, Point, Sizes, measure, slope, with_twin
from moiety.studies.cosine.voronoi import settle

CPU = torch.device("cpu")
PERTURBED = rates.GATES["tau 0.5"]
EXACT = rates.CELLS["exact"]


def point(n, error, solved=True):
    return Point(n, dict.fromkeys(slopes.SLOPES, error), dict.fromkeys(slopes.FACTS, 0.0), solved)


def line(power, grid=(300, 1000, 3000, 10_000)):
    return [point(n, 2 * n**power) for n in grid]


def running(study, arm, folder, seed=0, **settings):
    own = {**study.scale("smoke").settings, **study.arms[arm], **settings}
    trial, store = Trial(study.name, arm, seed, own), Store(folder)
    return Running(trial, CPU, store.curve(trial), store.checkpoint(trial), lambda share: None)


# -- slopes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [-0.5, -0.25, 0.0])
def test_the_slope_is_the_power_of_n(power):
    assert slope(line(power), "function") == pytest.approx(power)


def test_a_size_that_is_not_solved_enters_no_slope():
    points = line(-0.5)
    wild = dataclasses.replace(points[1], medians=dict.fromkeys(slopes.SLOPES, 1e9))
    off = [points[0], wild, *points[2:]]
    assert slope(off, "function") != pytest.approx(-0.5, abs=0.1)
    off[1] = dataclasses.replace(wild, solved=False)
    assert slope(off, "function") == pytest.approx(-0.5)
    found = course.metrics(off)
    assert found["solved"] == 0.75 and found["function"] == pytest.approx(-0.5)


def test_few_sizes_or_a_short_range_make_no_slope():
    assert slope(line(-0.5, (300, 10_000)), "function") is None
    assert slope(line(-0.5, (300, 500, 900)), "function") is None
    assert slope(line(-0.5, (300, 500, 3000)), "function") == pytest.approx(-0.5)
    assert slope([point(n, None) for n in (300, 1000, 9000)], "function") is None


def made(left, ahead, square=1.0, fits=100):
    """What `conclude` says of fits whose optimisation error and loss from the truth are given."""
    ones = torch.ones(fits, dtype=torch.float64)
    no = torch.zeros(fits, dtype=torch.bool)
    truth = rates.true_mixture(EXACT, PERTURBED, 0).each(lambda t: t.expand(fits, *t.shape))
    fit = Fit(truth, ones, ones, no, 0 * ones, 0 * ones, left * ones, no)
    told = {"function": math.sqrt(square) * ones}
    cells = settle(truth, truth, PERTURBED, "tanh")
    return slopes.conclude(300, told, fit, cells, dataclasses.replace(fit, loss=ahead * ones), no)


def test_a_point_is_solved_by_the_rules_that_were_written_before():
    few = (torch.arange(100) < 9).double()  # 9 of 100 fits
    some, many = (torch.arange(100) < 15).double(), (torch.arange(100) < 60).double()
    assert made(left=0.04, ahead=1.0).solved
    assert not made(left=0.06, ahead=1.0).solved  # the median
    assert not made(left=0.04, ahead=1.0, square=0.5).solved  # of the squared function error
    assert made(left=few, ahead=1.0).solved
    assert not made(left=some * 0.3, ahead=1.0).solved  # the 90th percentile
    assert made(left=some * 0.19, ahead=1.0).solved
    assert not made(left=0.0, ahead=1 - few).solved  # lower from the truth, in more than 5 %
    assert made(left=0.0, ahead=1 - few * (torch.arange(100) < 5)).solved
    assert made(left=0.0, ahead=1 - 0.04 * many).solved  # by less than counts
    assert made(left=0.0, ahead=1 + many).solved


def test_a_median_needs_a_quarter_of_the_repetitions():
    values = torch.tensor([1.0, 2.0, 3.0] + [math.nan] * 9)
    assert slopes.median(values) == 2
    assert slopes.median(torch.cat([values, values[-1:]])) is None


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_a_twin_takes_mass_from_its_atom_and_changes_nothing_else(spread):
    truth = rates.true_mixture(EXACT, PERTURBED, 0)
    x, g = inputs(20, 2, torch.Generator().manual_seed(0)), torch.Generator().manual_seed(0)
    more = with_twin(truth.each(lambda t: t.expand(3, 5, *t.shape)), torch.full((3, 5), spread), g)
    assert more.b1.shape == (3, 5, 3, 2) and not more.b0[..., -1].any()
    same = predict(more, x, PERTURBED, "tanh") - predict(truth, x, PERTURBED, "tanh")
    assert (same.abs().max() < 1e-12) == (spread == 0)
    torch.testing.assert_close(more.eta[..., 1:, :], truth.eta.expand(3, 5, -1, -1))


def test_a_measured_point_falls_with_n_and_is_the_same_again():
    truth, effort = rates.true_mixture(EXACT, PERTURBED, 0), Effort(4, 6, 30)
    one, again, more = (
        measure(truth, EXACT, PERTURBED, n, effort, seed=1, device=CPU) for n in (300, 300, 1200)
    )
    assert one == again and one.solved and more.solved
    assert more.medians["function"] < 0.7 * one.medians["function"]
    assert one.medians["expert, shared"] is None
    other = measure(truth, EXACT, PERTURBED, 300, effort, seed=2, device=CPU)
    assert other.medians["function"] != one.medians["function"]


def test_fits_that_took_another_reference_are_polished_again_and_counted():
    truth = rates.true_mixture(EXACT, PERTURBED, 0)
    found = measure(truth, EXACT, PERTURBED, 1200, Effort(8, 4, 30), seed=0, device=CPU)
    assert 0 < found.facts["moved"] < 1  # two labellings of equal loss, one drawn by the starts
    assert found.medians["expert, single"] < 0.3  # of parameters of order one


def test_truth_reaches_no_fit_but_the_diagnostic(monkeypatch):
    seen = []

    def fit(x, y, k, **words):
        seen.append(words.get("start"))
        return slopes_fit(x, y, k, **words)

    slopes_fit = slopes.fit
    monkeypatch.setattr(slopes, "fit", fit)
    truth = rates.true_mixture(EXACT, PERTURBED, 0)
    measure(truth, EXACT, PERTURBED, 300, Effort(2, 2, 3), seed=0, device=CPU)
    assert seen[0] is None
    torch.testing.assert_close(seen[1][:, 0], slopes.flat(truth).expand(2, -1))


# -- the studies -----------------------------------------------------------------------------------


def test_true_mixtures_differ_between_gates_in_the_reference_alone():
    for cell in rates.CELLS.values():
        vanilla, linear = (
            rates.true_mixture(cell, rates.GATES[g], 3) for g in ("vanilla", "linear")
        )
        assert torch.equal(vanilla.table()[:-1], linear.table()[:-1])
        assert vanilla.b1[-1, 0] == 1 and not linear.b1[-1].any()
        assert torch.equal(vanilla.eta, linear.eta)
        other = rates.true_mixture(cell, rates.GATES["vanilla"], 4)
        assert not torch.equal(vanilla.table(), other.table())


def test_cells_are_in_order_and_take_only_n_of_ten_times_the_parameters():
    order = list(dict.fromkeys(a["cell"] for a in rates.study.arms.values() if "cell" in a))
    assert order == list(rates.CELLS)
    grid = rates.study.scale("full").settings["grid"]
    assert EXACT.parameters == 11 and EXACT.samples(grid) == grid
    assert rates.CELLS["over, d 8"].parameters == 48
    assert rates.CELLS["over, d 8"].samples(grid) == grid[1:]
    assert min(rates.study.scale("smoke").settings["grid"]) >= 480


def test_the_stated_rates_are_no_measurement(tmp_path):
    found = rates.run(running(rates.study, rates.STATED_ARM, tmp_path))
    assert found["function"] == found["expert, single"] == found["bias, shared"] == -0.5
    assert found["expert, shared"] == found["gate raw, shared"] == -0.25
    assert found["solved"] is None and found.keys() == rates.study.metrics.keys()


def test_an_arm_that_a_scale_leaves_out_has_no_numbers(tmp_path):
    one = running(rates.study, "vanilla, over", tmp_path, draws={"exact": 2})
    assert set(rates.run(one).values()) == {None}
    late = running(rates.study, "vanilla, over", tmp_path, seed=2, draws={"over": 2})
    assert set(rates.run(late).values()) == {None}


def test_a_killed_trial_goes_on_to_the_same_bits(tmp_path):
    arm, sizes = "tau 0.1, exact", {"grid": [300, 600, 900], "iterations": 5}
    whole = running(rates.study, arm, tmp_path / "whole", **sizes)
    want = rates.run(whole)

    def die(share):
        if share > 0.4:
            raise KeyboardInterrupt

    killed = running(rates.study, arm, tmp_path / "killed", **sizes)
    killed.tick = die
    with pytest.raises(KeyboardInterrupt):
        rates.run(killed)
    assert [p["n"] for p in killed.checkpoint.load()["points"]] == [300, 600]
    resumed = running(rates.study, arm, tmp_path / "killed", **sizes)
    assert rates.run(resumed) == want
    assert resumed.curve.rows() == whole.curve.rows()
    assert resumed.extra == whole.extra and len(whole.extra["points"]) == 3


def test_every_claim_has_its_margin_and_is_our_own():
    margins = {"function": {0.05}, "gate raw, single": {0.1, 0.4}}
    for claim in (*rates.study.claims, *worst_case.study.claims):
        assert claim.margin in margins.get(claim.metric, {0.1})
        assert claim.tier == "our own"


def test_the_projected_time_counts_what_the_fits_ask_for(monkeypatch):
    settings, sizes = {**rates.SMOKE, "iterations": 2, "grid": [480]}, rates.CELLS["over"]
    asked, normal = [], fitter.Problem.normal

    def counted(problem, theta, which):
        asked.append(theta.numel() * problem.x.shape[1])
        return normal(problem, theta, which)

    truth, effort = rates.true_mixture(sizes, PERTURBED, 0), course.effort_of(settings, sizes)
    monkeypatch.setattr(fitter.Problem, "normal", counted)
    measure(truth, sizes, PERTURBED, 480, effort, seed=0, device=CPU)
    most = project.work_of(settings, sizes)
    assert 0.4 * most.values < sum(asked) < 2.5 * most.values  # each descent also begins


def test_the_seeds_that_fit_into_a_time_are_those_before_it_is_over():
    one = project.Speed(launches=1.0, value=0.5)
    work = [project.Work(2, 4), project.Work(2, 4), project.Work(0, 1)]
    assert work[0].seconds(one, workers=1) == 4 and work[0].seconds(one, workers=2) == 3
    assert [project.seeds_within(t, work, one, 1) for t in (3.9, 4, 8, 8.5)] == [0, 1, 2, 3]
    late = rates.work_of_seed(rates.FULL, 9)
    assert 0 < late.values < rates.work_of_seed(rates.FULL, 0).values
    assert "seeds that fit" in rates.tell_projected("smoke", "cpu")


@pytest.mark.parametrize("name", worst_case.FAMILIES)
def test_families_of_mixtures_come_nearer_to_degeneracy(name):
    family, sizes = worst_case.FAMILIES[name]
    gate = Gate("vanilla")
    drawn = rates.true_mixture(sizes, gate, 0)
    near, far = family(drawn, 10_000), family(drawn, 100)
    if name.startswith("as drawn"):
        assert near is drawn
    elif name.startswith("alike"):
        apart = [(m.eta[0] - m.eta[1]).norm().item() for m in (near, far)]
        assert apart[0] / apart[1] == pytest.approx(100 ** (-0.125 if "8" in name else -0.25))
    elif name.startswith("angle"):
        c = gate.vectors(near.b1)
        angle = torch.acos(c[0] @ c[1]).item()
        assert angle == pytest.approx(10_000 ** (-0.125 if "8" in name else -0.25))
        assert near.b1[0].norm() == pytest.approx(near.b1[1].norm().item())
    else:
        assert near.b1[:-1].abs().amax(-1).tolist() == pytest.approx([9.0] * (sizes.true - 1))
        assert torch.equal(near.b1[-1], drawn.b1[-1])


def test_a_family_is_followed_along_n(tmp_path, monkeypatch):
    seen = []

    def kept(truth: Atoms, *rest: object, **words: object) -> Point:
        seen.append(truth)
        return point(rest[2], 1.0)

    monkeypatch.setattr(course, "measure", kept)
    worst_case.run(running(worst_case.study, "vanilla, alike n^(-1/4)", tmp_path))
    assert len(seen) == 2 and not torch.equal(seen[0].eta, seen[1].eta)
    assert Sizes(2, 2, 2, "tanh") == worst_case.FAMILIES["alike n^(-1/4)"][1]
