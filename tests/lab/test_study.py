"""What a study says wrong is told when it is made, not after its trials."""

import re

import pytest
from simulated import WORDS, make_study

from moiety.lab.claims import equivalent, greater
from moiety.lab.study import Metric, Scale


@pytest.mark.parametrize("form", [".3g", ".1%", ",.2f", "d", ".0f", ""])
def test_formats_of_a_metric(form):
    assert Metric("Error", format=form).format == form


@pytest.mark.parametrize("form", [".q", "%d", "{:.2f}", "s", "+.2f"])
def test_a_format_that_cannot_write_a_number_or_a_difference(form):
    with pytest.raises(ValueError, match="metric 'Error' cannot be written in the format"):
        Metric("Error", format=form)


def test_words_of_a_metric():
    with pytest.raises(ValueError, match=r"better is .* not 'less'"):
        Metric("Error", better="less")
    with pytest.raises(ValueError, match=r"split is .* not 'dev'"):
        Metric("Error", split="dev")


@pytest.mark.parametrize("seeds", [0, 2.0, True])
def test_a_scale_needs_seeds(seeds):
    with pytest.raises(ValueError, match=f"at least one seed, not {seeds}"):
        Scale(seeds=seeds)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "../x"}, "named like room/name, by letters, digits, - and _, not '../x'"),
        ({"run": None}, "give run (a trial) or run_block (several)"),
        ({"run_block": dict}, "give run (a trial) or run_block (several)"),
        ({"arms": {}}, "needs at least one arm, one metric and one scale"),
        ({"scales": {}}, "needs at least one arm, one metric and one scale"),
        ({"arms": {"a": [1]}}, "the settings of an arm are a dict, not [1]"),
        ({"metrics": {"accuracy": "A"}}, "a metric is a Metric(...), not 'A'"),
        ({"scales": {"small": 5}}, "a scale is a Scale(...), not 5"),
        ({"claims": ["a > b"]}, "a claim is made by greater(...) or equivalent(...), not 'a > b'"),
        ({"claims": [greater("a", "x", 0.1, **WORDS)]}, "a claim names the arm 'x'; there are a"),
        (
            {"claims": [greater("a", "b", 0.1, **WORDS | {"metric": "f1"})]},
            "a claim names the metric 'f1'; there are accuracy, loss",
        ),
        ({"metrics": {"accuracy": Metric("A", better="")}}, "neither more nor less is better"),
        ({"block": 0}, "block and threads must be at least 1"),
        ({"threads": 0}, "block and threads must be at least 1"),
    ],
)
def test_what_is_wrong_with_a_study_is_one_sentence(change, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        make_study(**change)


def test_arms_may_be_the_same_in_what_has_no_better():
    claims = [equivalent("a", "b", 1.0, **WORDS)]
    assert make_study(claims, metrics={"accuracy": Metric("Count", better="")}).claims
