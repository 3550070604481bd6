"""A claim is whole before there are results; judging needs only what a result file stores."""

import re

import numpy as np
import pytest

from moiety.lab.claims import Claim, equivalent, greater
from moiety.lab.judging import judge, would_change

WORDS = {"metric": "accuracy", "quote": "better", "reason": "matters", "tier": "exact"}
NOISE = np.array([-1.0, 1.0, -0.5, 0.5, 0.0, 0.3]) * 1e-3


def row(effect, kind="greater", noise=NOISE, look=1, margin=0.01):
    differences = [float(x) for x in effect + noise]
    return {"kind": kind, "a": "new", "b": "old", "margin": margin, "look": look} | {
        "differences": differences
    }


def test_the_two_kinds():
    assert greater("a", "b", 0.1, **WORDS).kind == "greater"
    assert equivalent("a", "b", 0.1, **WORDS) == Claim(
        kind="equivalent", a="a", b="b", margin=0.1, **WORDS
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"margin": 0.0}, "must be positive"),
        ({"margin": float("nan")}, "must be positive"),
        ({"b": "a"}, "'a' twice"),
        ({"tier": "rough"}, "one of exact, scaled down, proxy, our own"),
        ({"kind": "less"}, "greater.*equivalent"),
        ({"reason": " "}, "needs a quote and a reason"),
        ({"quote": ""}, "needs a quote and a reason"),
    ],
)
def test_what_is_no_claim_is_refused(change, message):
    whole = {"kind": "greater", "a": "a", "b": "b", "margin": 0.1, **WORDS}
    with pytest.raises(ValueError, match=message):
        Claim(**{**whole, **change})


def test_a_family_is_judged_together_with_what_was_not_tested():
    (alone,) = judge([row(0.05)])
    assert alone["word"] == "holds" and alone["seeds"] == 6
    both = judge([row(0.05), row(0.05)])
    assert [verdict["p"] for verdict in both] == pytest.approx([2 * alone["p"]] * 2)
    (with_untested,) = judge([row(0.05)], untested=1)
    assert with_untested == both[0]
    weak = row(0.0114)
    assert judge([weak])[0]["word"] == "holds"
    assert judge([weak], untested=9)[0]["word"] == "undecided"


@pytest.mark.parametrize(("differences", "effect"), [([], None), ([0.5], 0.5)])
def test_fewer_than_two_seeds_decide_nothing_and_count(differences, effect):
    lone = {**row(0.0), "differences": differences}
    verdict, other = judge([lone, row(0.05)])
    assert verdict["word"] == "undecided" and verdict["effect"] == effect and verdict["p"] == 1
    assert verdict["interval"] is None and verdict["detectable"] is None
    assert other == judge([row(0.05)], untested=1)[0]
    assert "Two seeds or more" in would_change(lone, verdict)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (row(0.05), "Seeds in which new is better than old by 0.01 or less."),
        (row(-0.05), "Seeds in which old is better than new by 0.01 or less."),
        (row(0.0), r"differ by 0.01 or more, or a smallest effect below 0.000\d+, declared"),
        (row(0.0, "equivalent"), "Seeds in which new and old differ by 0.01 or more."),
        (row(0.05, "equivalent"), "Seeds in which new and old differ by 0.01 or less."),
        (row(0.01), "further from the smallest effect of 0.01: as it is, more than 1000 seeds"),
    ],
)
def test_what_would_change_a_verdict(given, sentence):
    (verdict,) = judge([given])
    assert re.search(sentence, would_change(given, verdict))


def test_the_seeds_that_would_decide_do():
    """The same effect and spread at that many seeds, at the next look, is decided."""
    given = row(0.0105)
    (verdict,) = judge([given])
    assert verdict["word"] == "undecided"
    about, seeds, *_ = would_change(given, verdict).split()
    assert about == "About" and 20 < int(seeds) < 60
    draws = np.random.default_rng(0)
    spread = np.std(given["differences"], ddof=1)
    effect = np.mean(given["differences"])
    said = [
        judge([row(0, noise=draws.normal(effect, spread, int(seeds)), look=2)])[0]["word"]
        for _ in range(500)
    ]
    assert 0.75 <= said.count("holds") / 500 <= 0.87
    more = would_change(given, verdict, claims=10)
    assert int(more.split()[1]) > int(seeds)


def test_numbers_are_written_as_the_metric_is():
    given = row(0.05)
    assert "1 point" in would_change(given, judge([given])[0], form=".1%")
