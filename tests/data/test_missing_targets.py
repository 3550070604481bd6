"""Rows that lack some of their targets: left out, or kept with the gaps masked."""

import numpy as np
import pandas as pd
import pytest
import torch

from moiety.data import load_problem
from moiety.data.problem import MISSING


@pytest.fixture
def table(tmp_path):
    """Rows 0–19 lack their colour, 10–29 their size and their mark: 10–19 lack all three."""
    draw, rows = np.random.default_rng(0), 200
    x = draw.normal(size=rows)
    frame = pd.DataFrame({"x": x, "z": draw.normal(size=rows)})
    frame["colour"] = np.where(x + draw.normal(size=rows) > 0, "red", "green").astype(object)
    frame["size"] = 3 + 2 * x + draw.normal(size=rows)
    frame["mark"] = draw.integers(0, 3, rows).astype(float)
    frame.loc[:19, "colour"] = None
    frame.loc[10:29, ["size", "mark"]] = np.nan
    frame.to_csv(tmp_path / "gaps.csv", index=False)
    return tmp_path / "gaps.csv"


TARGETS = ["colour", "size", "mark"]


def together(problem, name):
    return torch.cat([split.targets[name] for split in problem.splits.values()])


def test_by_default_rows_without_a_target_are_left_out(table):
    problem = load_problem(table, targets=TARGETS)
    assert sum(map(len, problem.splits.values())) == 170
    assert any("30 rows without a target were left out" in note for note in problem.notes)
    assert int(together(problem, "colour").min()) == 0


def test_masked_rows_stay_and_those_without_any_target_go(table):
    problem = load_problem(table, targets=TARGETS, missing="mask")
    assert sum(map(len, problem.splits.values())) == 190
    assert any("10 rows without any target were left out" in note for note in problem.notes)
    said = "missing targets: colour in 10, size in 10, mark in 10 of 190 rows; masked"
    assert any(said in note for note in problem.notes)
    assert int((together(problem, "colour") == MISSING).sum()) == 10
    assert int((together(problem, "mark") == MISSING).sum()) == 10
    assert int(together(problem, "size").isnan().sum()) == 10
    # No gap is a class, and no gap counts for mean and spread.
    colour, size, mark = problem.targets
    assert colour.classes == ["green", "red"] and mark.classes == ["0", "1", "2"]
    known = problem.train.targets["size"]
    known = known[~known.isnan()]
    assert abs(float(known.mean())) < 1e-5 and float(known.std(correction=0)) == pytest.approx(1)
    assert 1 < size.mean < 5


def test_without_gaps_both_ways_are_the_same(table):
    frame = pd.read_csv(table).dropna()
    frame.to_csv(table, index=False)
    one, two = (load_problem(table, targets=TARGETS, missing=how) for how in ("drop", "mask"))
    assert one.notes == two.notes
    for name, split in one.splits.items():
        for target, values in split.targets.items():
            assert torch.equal(values, two.splits[name].targets[target])


def test_a_leak_is_found_on_the_rows_that_are_labelled(table):
    frame = pd.read_csv(table)
    frame["copy"] = frame["colour"].fillna("red").map({"red": "r", "green": "g"})
    frame.to_csv(table, index=False)
    problem = load_problem(table, targets=TARGETS, missing="mask")
    assert [(leak.column, leak.target, leak.dropped) for leak in problem.leaks] == [
        ("copy", "colour", True)
    ]


def test_an_empty_target_and_a_wrong_word_are_named(table):
    frame = pd.read_csv(table)
    frame["size"] = np.nan
    frame.to_csv(table, index=False)
    with pytest.raises(ValueError, match="200 of 200 rows have no 'size'"):
        load_problem(table, targets=TARGETS, missing="mask")
    with pytest.raises(ValueError, match="missing must be drop or mask, got 'fill'"):
        load_problem(table, targets=TARGETS, missing="fill")


def test_most_of_a_target_may_be_missing_when_it_is_masked(table):
    frame = pd.read_csv(table)
    frame.loc[:149, "mark"] = np.nan
    frame.to_csv(table, index=False)
    with pytest.raises(ValueError, match="rows have no 'mark'"):
        load_problem(table, targets=TARGETS)
    problem = load_problem(table, targets=TARGETS, missing="mask")
    assert int((together(problem, "mark") != MISSING).sum()) == 50
