"""The leak detector: planted leaks are found, and clean data have none."""

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety.data import load_problem
from moiety.data.leaks import class_score, find_leaks, number_score, settled, threshold_score


def clean(seed, rows=300):
    """Columns of several kinds, and targets that have nothing to do with them."""
    draw = np.random.default_rng(seed)
    frame = pandas.DataFrame(
        {
            "normal": draw.normal(size=rows),
            "long tail": draw.exponential(size=rows) ** 3,
            "small whole": draw.integers(0, 5, rows),
            "few words": draw.choice(list("abc"), rows),
            "many words": draw.integers(0, 150, rows).astype(str),
            "mostly one": draw.choice(["x", "y"], rows, p=[0.97, 0.03]),
            "gaps": np.where(draw.random(rows) < 0.6, np.nan, draw.normal(size=rows)),
        }
    )
    share = draw.uniform(0.02, 0.98)
    labels = pandas.DataFrame(
        {
            "rare": draw.choice(["yes", "no"], rows, p=[share, 1 - share]),
            "many": draw.choice(list("pqrstu"), rows),
            "value": draw.lognormal(size=rows),
        }
    )
    return frame, labels


KINDS = {"rare": "classes", "many": "classes", "value": "number"}


@pytest.mark.parametrize("rows", [40, 300, 3000])
def test_clean_data_have_no_leak(rows):
    for seed in range(50):
        assert find_leaks(*clean(seed, rows), KINDS) == []


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.sampled_from([60, 300, 2000]),
    how=st.sampled_from(["renamed", "coded", "threshold", "with gaps"]),
)
def test_a_column_that_is_the_target_is_an_exact_leak(seed, rows, how):
    frame, labels = clean(seed, rows)
    draw = np.random.default_rng(seed)
    target = pandas.Series(draw.choice(list("pq"), rows))
    number = (target == "p").astype(float)
    labels["planted"] = target
    frame["leak"] = {
        "renamed": target.map({"p": "Paris", "q": "Quito"}),
        "coded": number,
        "threshold": number + draw.uniform(0, 0.9, rows),  # above 1 or below
        "with gaps": target.where(target == "p"),  # a gap says q
    }[how]
    found = find_leaks(frame, labels[["planted"]], {"planted": "classes"})
    assert [(leak.column, leak.dropped) for leak in found] == [("leak", True)]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.sampled_from([60, 300, 2000]),
    how=st.sampled_from(["line", "curve", "noise"]),
)
def test_a_number_in_another_unit_is_a_leak(seed, rows, how):
    frame, labels = clean(seed, rows)
    value = labels["value"]
    spread = np.random.default_rng(seed).normal(0, 0.15 * value.std(), rows)
    frame["leak"] = {
        "line": 32 - 1.8 * value,
        "curve": np.log(value),
        "noise": value + spread,
    }[how]
    (leak,) = find_leaks(frame, labels[["value"]], {"value": "number"})
    assert leak.column == "leak"
    assert leak.dropped == (how != "noise")


def test_a_column_of_the_same_source_is_suspected():
    """As relationship is for never_married: husbands are married, of the others it is open."""
    draw = np.random.default_rng(0)
    married = draw.random(5000) < 0.5
    role = np.where(married & (draw.random(5000) < 0.9), "husband", "other")
    frame = pandas.DataFrame({"role": role, "noise": draw.normal(size=5000)})
    labels = pandas.DataFrame({"married": married.astype(str)})
    (leak,) = find_leaks(frame, labels, {"married": "classes"})
    assert leak.column == "role"
    assert not leak.dropped
    assert "settles the class on 45% of the rows" in leak.reason


def test_what_settles_only_the_obvious_is_no_leak():
    """Children do not earn: many rows are settled, and little is told."""
    draw = np.random.default_rng(0)
    age = draw.integers(0, 80, 40000)
    labels = pandas.DataFrame({"rich": ((age > 25) & (draw.random(40000) < 0.08)).astype(str)})
    assert settled(age, (labels["rich"] == "True").to_numpy().astype(int))[0] > 0.25
    ages = pandas.DataFrame({"age": age.astype(str)})
    assert find_leaks(ages, labels, {"rich": "classes"}) == []


def test_a_good_number_is_no_leak():
    """Its ends settle the class, as those of many a column of this set do."""
    from sklearn.datasets import load_breast_cancer

    frame = load_breast_cancer(as_frame=True).frame
    labels = frame[["target"]].astype(str)
    assert find_leaks(frame.drop(columns="target"), labels, {"target": "classes"}) == []


def test_scores_by_hand():
    # Ten of each: the column is right on 9 of 10 in both classes, guessing on 10 of 20.
    levels = np.array(([0] * 9 + [1]) + ([1] * 9 + [0]))
    ids = np.array([0] * 10 + [1] * 10)
    assert class_score(levels, ids) == pytest.approx((18 - 10) / 10)
    assert class_score(np.arange(20), ids) == 0  # an id says nothing of other rows
    assert threshold_score(np.arange(20.0), ids) == 1
    assert threshold_score(levels.astype(float), ids) == pytest.approx(0.8)
    assert threshold_score(np.arange(20.0), (np.arange(20) == 19).astype(int)) == 0  # chance
    assert number_score(levels * 0, ids.astype(float)) == pytest.approx(0, abs=0.02)


@pytest.fixture
def leaky(tmp_path):
    frame, labels = clean(0, 400)
    frame["label"] = labels["rare"]
    frame["copy"] = np.where(labels["rare"] == "yes", "ja", "nein")
    frame.to_csv(tmp_path / "leaky.csv", index=False)
    return tmp_path / "leaky.csv"


def test_an_exact_leak_is_left_out_unless_it_is_to_be_kept(leaky):
    dropped, kept = load_problem(leaky), load_problem(leaky, leaks="keep")
    assert "copy" not in dropped.categories
    assert "copy" in kept.categories
    assert [leak.dropped for leak in dropped.leaks + kept.leaks] == [True, False]
    assert "copy left out of the inputs" in "\n".join(dropped.notes)


def test_nothing_but_a_leak_is_an_error(tmp_path, leaky):
    pandas.read_csv(leaky)[["copy", "label"]].to_csv(tmp_path / "only.csv", index=False)
    with pytest.raises(ValueError, match=r"every column gives a target away \(copy\)"):
        load_problem(tmp_path / "only.csv")
