"""Verdicts are calibrated: simulated studies whose truth is known."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from moiety.lab.statistics import (
    LEVEL,
    Evidence,
    detectable,
    holm,
    paired,
    seeds_needed,
    spent,
    t_interval,
    verdicts,
)

MARGIN = 0.01
REPEATS = 5000


def word(differences, kind="greater", look=1, margin=MARGIN):
    return verdicts([Evidence(kind, differences, margin, look)])[0].word


def studies(truth, seeds, spread=0.01, repeats=REPEATS):
    return np.random.default_rng(0).normal(truth, spread, (repeats, seeds))


def test_p_values_are_those_of_scipy():
    x = studies(0.004, 9, repeats=1)[0]
    said = verdicts([Evidence("greater", x, MARGIN)])[0]
    inside = max(
        stats.ttest_1samp(x, MARGIN, alternative="less").pvalue,
        stats.ttest_1samp(x, -MARGIN, alternative="greater").pvalue,
    )
    above = stats.ttest_1samp(x, MARGIN, alternative="greater").pvalue
    below = stats.ttest_1samp(x, -MARGIN, alternative="less").pvalue
    assert said.p == pytest.approx(min(inside, above, below))
    assert said.interval == pytest.approx(stats.ttest_1samp(x, 0).confidence_interval(0.95))


# -- by hand -----------------------------------------------------------------------------------


def test_an_interval_by_hand():
    # mean 2, standard deviation 1, error 1/√3, t at 2.5 % with 2 degrees 4.3027
    low, high = t_interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)))


def test_holm_by_hand():
    # sorted 0.01 × 4, 0.02 × 3, 0.03 × 2 → kept at 0.06, 0.04 × 1 → kept at 0.06
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])


def test_the_four_words():
    noise = np.array([-1.0, 1.0, -0.5, 0.5, 0.0, 0.3, -0.3, 0.1]) * 1e-3
    assert word(0.05 + noise) == "holds"
    assert word(-0.05 + noise) == "reversed"
    assert word(0.0 + noise) == "negligible"
    assert word(0.01 + noise) == "undecided"
    assert word(0.0 + noise, "equivalent") == "holds"
    assert word(0.05 + noise, "equivalent") == word(-0.05 + noise, "equivalent") == "reversed"
    assert word(0.01 + noise, "equivalent") == "undecided"


def test_equal_differences_are_as_sure_as_a_sign_test():
    # 2⁻⁵ is above the 2 % of a first look, 2⁻⁶ below; rounding must not pass for spread
    assert word([0.02] * 5) == word([0.0] * 5) == "undecided"
    equal = [0.9 - 0.88, 0.8 - 0.78, 0.7 - 0.68, 0.6 - 0.58, 0.5 - 0.48, 0.4 - 0.38]
    assert len(set(equal)) > 1 and word(equal) == "holds"
    assert word(-np.array(equal)) == "reversed"
    assert word([0.0] * 6) == "negligible"
    assert word([0.01] * 60) == "undecided"
    assert verdicts([Evidence("greater", equal, MARGIN)])[0].p == 2**-6


def test_pairs_are_those_of_shared_seeds():
    assert paired({0: 1.0, 1: 2.0, 3: 9.0}, {1: 1.5, 0: 0.0, 2: 7.0}) == [1.0, 0.5]
    assert paired({0: 1.0}, {2: 1.0}) == []
    with pytest.raises(ValueError, match="NaN"):
        paired({0: math.nan, 1: 2.0}, {0: 1.0, 1: 1.0})


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (("greater", [1.0], 0.1), "at least two finite numbers"),
        (("greater", [1.0, math.inf], 0.1), "at least two finite numbers"),
        (("greater", [1.0, 2.0], 0.0), "must be positive"),
        (("larger", [1.0, 2.0], 0.1), "greater.*equivalent"),
        (("greater", [1.0, 2.0], 0.1, 0), "counted from 1"),
    ],
)
def test_what_makes_no_sense_is_refused(claim, message):
    with pytest.raises(ValueError, match=message):
        Evidence(*claim)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_only_raises_and_keeps_the_order(p):
    adjusted = holm(p)
    assert (adjusted >= np.array(p) - 1e-12).all() and (adjusted <= 1).all()
    assert (np.argsort(adjusted, kind="stable")[np.argsort(p)] >= 0).all()
    order = np.argsort(p)
    assert (np.diff(adjusted[order]) >= 0).all()


def test_all_looks_together_spend_the_level():
    assert sum(spent(look) for look in range(1, 60)) == pytest.approx(LEVEL)
    assert all(spent(look) > spent(look + 1) for look in range(1, 9))


# -- calibration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [5, 8, 12, 20])
def test_intervals_cover_as_often_as_they_say(seeds):
    x = studies(0.02, seeds)
    half = stats.t.isf(0.025, seeds - 1) * x.std(1, ddof=1) / math.sqrt(seeds)
    assert t_interval(x[0]) == pytest.approx((x[0].mean() - half[0], x[0].mean() + half[0]))
    assert 0.94 <= (np.abs(x.mean(1) - 0.02) <= half).mean() <= 0.96


@pytest.mark.parametrize("seeds", [5, 12])
@pytest.mark.parametrize(
    ("truth", "wrong"),
    [(MARGIN, "holds"), (-MARGIN, "reversed"), (MARGIN, "negligible"), (0.0, "holds")],
)
def test_a_false_word_is_rare(seeds, truth, wrong):
    said = [word(x) for x in studies(truth, seeds)]
    assert said.count(wrong) / len(said) <= LEVEL


def test_a_family_of_claims_errs_no_more_often_than_one():
    draws = np.random.default_rng(1).normal(MARGIN, 0.01, (1000, 8, 6))
    said = [[v.word for v in verdicts([Evidence("greater", x, MARGIN) for x in y])] for y in draws]
    assert np.mean(["holds" in words for words in said]) <= LEVEL


def test_looking_again_after_more_seeds_does_not_raise_the_rate():
    """Stop as soon as it holds, else add five seeds, four times."""
    false = 0
    for x in studies(MARGIN, 25, repeats=2000):
        looks = (word(x[: 5 * look], look=look) for look in range(1, 6))
        false += any(said == "holds" for said in looks)
    assert false / 2000 <= LEVEL


@pytest.mark.parametrize("truth", [0.0, 2 * MARGIN])
@pytest.mark.parametrize("spread", [0.004, 0.01])
def test_the_planned_number_of_seeds_decides(truth, spread):
    draw, decided = np.random.default_rng(2), 0
    for _ in range(400):
        planned = seeds_needed(draw.normal(0.0, spread, 5), MARGIN)
        assert planned >= 5
        decided += word(draw.normal(truth, spread, planned)) != "undecided"
    assert decided / 400 >= 0.8


def test_a_hopeless_plan_says_so():
    with pytest.raises(ValueError, match="larger smallest effect"):
        seeds_needed([-1.0, 1.0, 0.5], 1e-3)


def test_the_detectable_effect_is_told_eight_times_in_ten():
    x = studies(0.0, 10, repeats=1)[0]
    far = detectable(x)
    spread = float(x.std(ddof=1))
    said = [word(y, margin=MARGIN) for y in studies(MARGIN + far, 10, spread, 1500)]
    assert 0.77 <= said.count("holds") / 1500 <= 0.86
