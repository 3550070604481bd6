"""The ledger shows every claim, corrects over a paper, and never mixes what does not belong."""

from pathlib import Path

import numpy as np
import pytest
from simulated import CLAIMS, WORDS, make_result, make_study

from moiety.io import read_json, write_json
from moiety.lab.claims import equivalent, greater
from moiety.lab.judging import judge
from moiety.lab.ledger import family_size, ledger, ledger_markdown, result_path
from moiety.lab.schema import check_result
from moiety.lab.study import Metric, Scale

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "results"


def values(a=0.05, c=0.0, spread=0.004):
    draws = np.random.default_rng(0)
    return {
        name: 0.9 + lead + draws.normal(0, spread, 6)
        for name, lead in (("a", a), ("b", 0.0), ("c", c))
    }


def commit(folder, study, **how):
    result = make_result(study, values(**how), folder)
    write_json(result_path(folder, study.name), result)
    return result


def rows_of(folder, *studies):
    return ledger(folder, {study.name: study for study in studies})


# -- rows ------------------------------------------------------------------------------------------


def test_a_study_without_a_result_is_not_run(tmp_path):
    rows = rows_of(tmp_path, make_study())
    assert [(row.word, row.verdict) for row in rows] == [("not run", None)] * 2
    assert "moiety study run paper/digits" in ledger_markdown(rows)


def test_a_row_tells_all_of_a_claim(tmp_path):
    study = make_study()
    result = commit(tmp_path, study)
    first, second = rows_of(tmp_path, study)
    assert (first.word, second.word) == ("holds", "holds")
    assert first.verdict == result["claims"][0]["verdict"]  # the paper has these two claims alone
    assert first.would_change == result["claims"][0]["would_change"]
    told = first.as_dict()
    assert told["claim"]["quote"] == "better" and told["failed"] == 0
    assert told["result"]["trials_sha256"] == result["trials_sha256"]
    assert told["result"]["deviations"] == ["smaller"] and told["result"]["command"] == "run"


def test_all_claims_of_a_paper_are_corrected_together(tmp_path):
    one, two = make_study(name="paper/one"), make_study(name="paper/two")
    results = [commit(tmp_path, one), commit(tmp_path, two, a=0.03)]
    rows = rows_of(tmp_path, one, two)
    together = judge([claim for result in results for claim in result["claims"]])
    assert [row.verdict for row in rows] == together
    assert rows[0].verdict["p"] > results[0]["claims"][0]["verdict"]["p"]
    # One that was not run counts as well, so that running it can only help the others.
    result_path(tmp_path, "paper/two").unlink()
    alone = rows_of(tmp_path, one, two)
    assert alone[0].verdict == judge(results[0]["claims"], untested=2)[0]
    assert alone[0].verdict["p"] >= rows[0].verdict["p"]


def test_the_family_of_a_study_is_its_paper(monkeypatch):
    others = {name: make_study(name=name) for name in ("paper/one", "paper/two")}
    others["lab/x"] = make_study(name="lab/x", paper="")
    monkeypatch.setattr("moiety.lab.ledger.list_studies", lambda: others)
    monkeypatch.setattr("moiety.lab.ledger.load_study", others.get)
    assert family_size(others["paper/one"]) == 4
    assert family_size(make_study(name="mine/third")) == 6  # in a file of the user's
    assert family_size(others["lab/x"]) == 2  # answers for itself


def test_other_papers_and_studies_of_our_own_are_corrected_alone(tmp_path):
    one, other = make_study(name="paper/one"), make_study(name="other/one", paper="Another")
    own = [make_study(name=f"lab/{name}", paper="") for name in ("x", "y")]
    results = [commit(tmp_path, study) for study in (one, other, *own)]
    rows = rows_of(tmp_path, one, other, *own)
    said = [claim["verdict"] for result in results for claim in result["claims"]]
    assert [row.verdict for row in rows] == said


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"margin": 0.02}, "measured with another margin: run again"),
        ({"quote": "much better"}, "measured with another quote: run again"),
        (
            {"margin": 0.02, "tier": "exact"},
            "measured with another margin and tier: run again",
        ),
        ({"metric": "loss"}, "not run"),
        ({"b": "c"}, "not run"),
    ],
)
def test_a_claim_that_was_changed_afterwards_has_no_verdict(tmp_path, change, note):
    commit(tmp_path, make_study())
    changed = greater(**{"a": "a", "b": "b", "margin": 0.01, **WORDS, **change})
    first, second = rows_of(tmp_path, make_study([changed, CLAIMS[1]]))
    assert (first.note, first.verdict) == (note, None)
    assert second.word == "holds"
    assert note in ledger_markdown([first])


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (
            {"metrics": {"accuracy": Metric("Error", "lower")}},
            "measured with another metric: run again",
        ),
        (
            {"arms": {"a": {"k": 8}, "b": {"k": 2}, "c": {"k": 3}}},
            "measured with another setting of a: run again",
        ),
        ({"scales": {"small": Scale(5, {"steps": 99})}}, "another setting of a and setting of b"),
        ({"scales": {"full": Scale(5)}}, "measured with another scale: run again"),
    ],
)
def test_a_study_that_was_changed_afterwards_has_no_verdict(tmp_path, change, note):
    commit(tmp_path, make_study())
    row = rows_of(tmp_path, make_study(**change))[0]
    assert note in row.note and row.verdict is None


def test_settings_that_a_search_chose_may_differ_from_the_file(tmp_path):
    result = commit(tmp_path, make_study())
    result["tuning"] = {"space": {"k (a)": "1 to 9"}, "arms": {"a": {"space": {"k": "1 to 9"}}}}
    write_json(result_path(tmp_path, "paper/digits"), result)
    changed = make_study(arms={"a": {"k": 8}, "b": {"k": 2}, "c": {"k": 3}})
    assert rows_of(tmp_path, changed)[0].word == "holds"
    changed = make_study(arms={"a": {"k": 1}, "b": {"k": 9}, "c": {"k": 3}})
    assert rows_of(tmp_path, changed)[0].word == "measured with another setting of b"


def test_two_claims_on_the_same_arms_are_told_apart(tmp_path):
    claims = [CLAIMS[0], greater("a", "b", 0.03, **WORDS)]
    result = commit(tmp_path, make_study(claims))
    rows = rows_of(tmp_path, make_study(claims[::-1]))
    assert [row.measured["margin"] for row in rows] == [0.03, 0.01]
    assert [row.verdict for row in rows] == [c["verdict"] for c in result["claims"]][::-1]


@pytest.mark.parametrize("damage", ["schema", "word", "cut", "name"])
def test_a_result_that_breaks_the_schema_is_said(tmp_path, damage):
    study = make_study()
    result, path = commit(tmp_path, study), result_path(tmp_path, study.name)
    if damage == "schema":
        write_json(path, {**result, "schema": 2})
    elif damage == "word":
        result["claims"][0]["verdict"]["word"] = "reversed"
        write_json(path, result)
    elif damage == "name":
        write_json(path, {**result, "study": "paper/other"})
    else:
        path.write_text(path.read_text()[:100])
    for row in rows_of(tmp_path, study):
        assert row.word == "unusable result" and row.verdict is None


# -- the page --------------------------------------------------------------------------------------


def test_the_page_by_hand(tmp_path):
    study = make_study([greater("a", "b", 0.01, **{**WORDS, "mark": "2 §5", "number": "> 1 | 2"})])
    result = commit(tmp_path, study)
    text = ledger_markdown(rows_of(tmp_path, study))
    (claim,) = result["claims"]
    assert "moiety study claims" in text.splitlines()[2]
    assert "1 claims: 1 holds" in text
    assert "## A paper" in text and "> better (2 §5)" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| paper/digits 1")]
    assert line.replace("\\|", "").count("|") == 8  # text cannot break the table
    assert "| **holds** | +" in line and " points (+" in line
    assert f"| {claim['tier']}, scale small | 6 |" in line
    assert "a is better than b by more than 1 point" in text
    assert claim["would_change"] in text
    assert result["trials_sha256"][:16] in text and "`run` (small, cpu)" in text
    assert "Deviations from the paper:** smaller." in text


@pytest.mark.parametrize("tier", ["exact", "scaled down", "proxy", "our own"])
@pytest.mark.parametrize("effect", [0.05, 0.0, -0.05, 0.011])
def test_a_proxy_never_says_that_a_paper_is_wrong(tmp_path, tier, effect):
    study = make_study([greater("a", "b", 0.01, **{**WORDS, "tier": tier})])
    commit(tmp_path, study, a=effect)
    text = ledger_markdown(rows_of(tmp_path, study))
    assert ("says nothing against the paper" in text) == (tier == "proxy")
    assert not any(word in text for word in ("wrong", "refute", "disprove", "fails", "false"))


def test_the_whole_scale_goes_without_saying(tmp_path):
    study = make_study(scales={"full": Scale(6)})
    write_json(
        result_path(tmp_path, study.name), {**commit(tmp_path, make_study()), "scale": "full"}
    )
    text = ledger_markdown(rows_of(tmp_path, study))
    assert "**holds**" in text and "scale full" not in text


def test_our_own_questions_come_last(tmp_path):
    own, paper = make_study(name="lab/x", paper=""), make_study()
    text = ledger_markdown(rows_of(tmp_path, own, paper))
    assert text.index("## A paper") < text.index("## Questions of our own")


def test_one_seed_is_shown_without_an_interval(tmp_path):
    study = make_study([equivalent("a", "b", 0.01, **WORDS)])
    result = make_result(study, {"a": [0.9], "b": [0.8]}, tmp_path)
    write_json(result_path(tmp_path, study.name), result)
    text = ledger_markdown(rows_of(tmp_path, study))
    assert "**undecided** | – |" in text and "Two seeds or more" in text


# -- what is committed -----------------------------------------------------------------------------


def test_the_committed_page_is_what_the_committed_results_give():
    assert (ROOT / "docs" / "claims.md").read_text() == ledger_markdown(ledger(RESULTS)), (
        "write docs/claims.md anew: moiety study claims --out docs/claims.md"
    )


def test_committed_results_of_studies_keep_the_schema():
    for row in ledger(RESULTS):
        path = result_path(RESULTS, row.study)
        if path.exists():
            check_result(read_json(path))
