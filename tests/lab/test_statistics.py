"""Verdicts are calibrated: simulated studies whose truth is known."""

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from moiety.io import read_json
from moiety.lab.statistics import (
    LEVEL,
    Evidence,
    detectable,
    holm,
    paired,
    seeds_needed,
    seeds_to_decide,
    spent,
    t_interval,
    verdicts,
)

MARGIN = 0.01
REPEATS = 5000
ROOT = Path(__file__).parent.parent.parent


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


def test_claims_looked_at_more_often_keep_their_own_level():
    """In units of its level the second is the surer one, though its p is the larger."""
    assert holm([0.001, 0.002], levels=[0.001, 0.02]) == pytest.approx([0.001, 0.004])
    sure, late = np.array([0.05, 0.051, 0.049, 0.052, 0.05]), [0.012, 0.013, 0.011, 0.0125, 0.0115]
    alone = verdicts([Evidence("greater", late, MARGIN, look=9)])[0]
    _, together = verdicts(
        [Evidence("greater", sure, MARGIN), Evidence("greater", late, MARGIN, 9)]
    )
    assert together.p == pytest.approx(alone.p) and together.level == spent(9)


def test_a_claim_without_evidence_counts_like_one_that_says_nothing():
    x = studies(0.03, 8, repeats=1)[0]
    nothing = Evidence("greater", [-MARGIN, MARGIN], MARGIN)
    for untested in (1, 4):
        (said,) = verdicts([Evidence("greater", x, MARGIN)], untested=untested)
        assert said == verdicts([Evidence("greater", x, MARGIN)] + [nothing] * untested)[0]


# -- calibration -----------------------------------------------------------------------------------
# benchmarks/calibration.py has 5 000 repetitions of all of it; see the last tests.


def accuracies(truth, seeds, images=450):
    """Differences of two accuracies: they come in steps of 1/images."""
    draws = np.random.default_rng(4)
    rates = 0.9 + draws.normal(0, 0.005, (2, REPEATS, seeds))
    rates[0] += truth
    first, second = draws.binomial(images, rates) / images
    return first - second


@pytest.mark.parametrize(
    ("make", "seeds"),
    [(studies, seeds) for seeds in (5, 8, 10, 20, 50)] + [(accuracies, 5), (accuracies, 20)],
)
def test_false_words_are_rare_and_intervals_cover(make, seeds):
    """The difference is δ to the digit: neither above nor inside."""
    said = [verdicts([Evidence("greater", x, MARGIN)])[0] for x in make(MARGIN, seeds)]
    words = [verdict.word for verdict in said]
    assert words.count("holds") / REPEATS <= LEVEL
    assert words.count("negligible") / REPEATS <= LEVEL
    covered = sum(v.interval[0] <= MARGIN <= v.interval[1] for v in said)
    assert 0.94 <= covered / REPEATS <= 0.96


@given(st.lists(st.floats(-0.05, 0.05), min_size=2, max_size=12))
def test_words_mirror(x):
    mirror = {"holds": "reversed", "reversed": "holds"}
    said = word(x)
    assert word([-each for each in x]) == mirror.get(said, said)
    same = word(x, "equivalent")
    assert same == {"negligible": "holds", "holds": "reversed"}.get(said, said)


def test_equal_differences_of_a_coarse_metric_do_not_raise_the_rate():
    """0 or 2δ with the same chance: 5 seeds agree once in 16, and that is no certainty."""
    x = np.random.default_rng(5).choice([0.0, 2 * MARGIN], (2000, 5))
    said = [word(row) for row in x]
    assert (np.ptp(x, axis=1) == 0).mean() > 0.04
    assert said.count("holds") / 2000 <= LEVEL and said.count("negligible") / 2000 <= LEVEL


def test_a_family_of_claims_errs_no_more_often_than_one():
    """Both kinds, all of them false by a hair: does any hold?"""
    draws = np.random.default_rng(1).normal(MARGIN, 0.01, (1000, 8, 6))
    kinds = ["greater", "equivalent"] * 4
    said = [
        [v.word for v in verdicts([Evidence(kind, x, MARGIN) for kind, x in zip(kinds, y)])]
        for y in draws
    ]
    assert np.mean(["holds" in words for words in said]) <= LEVEL


def test_looking_again_after_more_seeds_does_not_raise_the_rate():
    """Stop as soon as it holds, else add five seeds, four times."""
    paid = free = 0
    for x in studies(MARGIN, 25, repeats=1000):
        paid += any(word(x[: 5 * look], look=look) == "holds" for look in range(1, 6))
        free += any(word(x[: 5 * look]) == "holds" for look in range(1, 6))
    assert paid / 1000 <= LEVEL < free / 1000


@pytest.mark.parametrize(("truth", "right"), [(0.0, "negligible"), (2 * MARGIN, "holds")])
@pytest.mark.parametrize("claims", [1, 4])
def test_the_planned_number_of_seeds_decides(truth, right, claims):
    draw, said = np.random.default_rng(2), []
    for _ in range(300):
        planned = seeds_needed(draw.normal(0.0, 0.01, 5), MARGIN, claims)
        assert planned >= 5
        family = [
            Evidence("greater", x, MARGIN) for x in draw.normal(truth, 0.01, (claims, planned))
        ]
        said += [verdict.word for verdict in verdicts(family)]
    assert said.count(right) / len(said) >= 0.8


def test_a_pilot_without_spread_asks_for_as_many_as_a_sign_test_needs():
    assert seeds_needed([0.0, 0.0, 0.0], MARGIN) == 6
    assert seeds_needed([0.0, 0.0, 0.0], MARGIN, claims=10) == 9
    assert seeds_needed([0.0, 1e-4, -1e-4], MARGIN) == 5


@pytest.mark.parametrize(
    ("differences", "seeds"),
    [([0.02] * 4, 6), ([0.01] * 4, None), ([-1.0, 1.0, 0.5, -0.4], None)],
)
def test_how_many_seeds_would_decide(differences, seeds):
    assert seeds_to_decide(differences, MARGIN, spent(1)) == seeds


def test_a_hopeless_plan_says_so():
    with pytest.raises(ValueError, match="larger smallest effect"):
        seeds_needed([-1.0, 1.0, 0.5], 1e-3)


def test_the_detectable_effect_is_told_eight_times_in_ten():
    x = studies(0.0, 10, repeats=1)[0]
    far = detectable(x)
    spread = float(x.std(ddof=1))
    said = [word(y, margin=MARGIN) for y in studies(MARGIN + far, 10, spread, 1500)]
    assert 0.77 <= said.count("holds") / 1500 <= 0.86


# -- what is committed -----------------------------------------------------------------------------


def test_the_committed_calibration_keeps_the_promises():
    """Also of strange differences, but for a strong skew and few values, which the page says."""
    measured = read_json(ROOT / "results" / "calibration.json")
    assert measured["repeats"] == REPEATS
    for shape in ("normal", "accuracy of 450 images"):
        for row in measured["one claim"][shape]:
            assert row["false holds"] <= LEVEL and row["false same"] <= LEVEL
            assert 0.94 <= row["coverage"] <= 0.96
    assert [row["seeds"] for row in measured["one claim"]["normal"]] == [5, 8, 10, 20, 50]
    assert all(row["any false holds"] <= LEVEL for row in measured["family"])
    looks = measured["looks"]
    assert looks["false holds"] <= LEVEL < looks["false holds without paying"]
    assert all(row["decided"] >= 0.8 for row in measured["planned"])


def test_the_page_on_statistics_shows_the_committed_figures(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    calibration = importlib.import_module("calibration")
    measured = read_json(ROOT / "results" / "calibration.json")
    assert calibration.table(measured) in (ROOT / "docs" / "statistics.md").read_text()
    again = calibration.errors("normal", 5, REPEATS)
    assert again == pytest.approx(measured["one claim"]["normal"][0], abs=0.002)
