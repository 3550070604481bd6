"""The page of a study as text: complete, escaped, a table for every plot; also without plotly."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

import studied
from moiety.lab.schema import check_result
from moiety.report import figures, page, study_page
from moiety.report.words import (
    THOUSANDS,
    apart,
    difference,
    duration,
    interval,
    number,
    quantity,
    sentence,
)

EVIL = "</script><script>document.title='evil'</script><!--\u2028<img src=x onerror=alert(1)>"


class Elements(HTMLParser):
    """Tags with their attributes, in order, and the text of every script."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.scripts, self.inside = [], [], None
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")
            self.inside = "script"

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1] += data

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Five megabytes of plotly would only slow these tests down."""
    monkeypatch.setattr("moiety.report.study.plotly_script", lambda: "/* plotly */")


def plots(html):
    block = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html, re.S)
    return json.loads(block[1])


def test_the_made_up_results_follow_the_schema():
    check_result(studied.result())
    check_result(studied.smallest())
    words = [claim["verdict"]["word"] for claim in studied.RESULT["claims"]]
    assert set(words) == {"holds", "reversed", "negligible", "undecided"}


def test_every_plot_has_data_a_label_and_a_table():
    html = study_page(studied.result())
    found, drawn = Elements(html), plots(html)
    places = [a for a in found.all("div") if a.get("class") == "plot"]
    assert len(drawn) == len(places) == studied.PLOTS
    assert [a["id"] for a in places] == list(drawn)
    assert all(a["role"] == "img" and a["aria-label"] for a in places)
    assert all(spec["data"] for spec in drawn.values())
    for figure in re.findall(r"<figure>.*?</figure>", html, re.S):
        assert re.search(r"<details>.*<table.*<tbody>\s*<tr>", figure, re.S)


def test_verdicts_come_first_and_say_what_was_found():
    html = study_page(studied.result())
    assert html.index('id="verdicts"') < html.index('id="arms"') < html.index('id="curves"')
    for text in (
        "dselect-k is better than top-k by more than 0.5 points.",
        "dense is worse than top-k by more than 0.5 points.",
        "perturbed-cosine and top-k differ by less than 0.5 points either way.",
        "These seeds do not tell whether switch is better than dense by more than 0.5 points.",
        "softmax and top-k differ by less than 0.050 either way.",
        "+1.10 points",
        "+0.96 to +1.23 points",
        "scaled down",
        studied.QUOTE,
        "2 §5; its number: &gt; 1 point",
        "half of what the paper reports",
        studied.RESULT["claims"][0]["would_change"],
        "ValueError: the loss is not finite",
        studied.RESULT["command"],
        studied.RESULT["trials_sha256"],
        *studied.RESULT["deviations"],
    ):
        assert text in html, text


def test_notes_stand_by_themselves_and_leaks_are_marked():
    html = study_page(studied.result())
    leaks, known = html.split('id="notes"')[1].split('<dl class="known">')
    assert '<ul class="findings">' in leaks and leaks.count("<li>") == 1
    assert "<li><strong>Suspected leak:</strong> id gives digit away: the rows are" in leaks
    assert "<dt>Image</dt><dd>1,797 examples" in known
    assert "<dt></dt><dd>Every image is centred.</dd>" in known
    assert 'id="notes"' not in study_page(studied.result(notes=[]))


def test_answers_and_warnings_come_first():
    result = studied.result(scale="smoke")
    lost = {"tried": 9, "discarded": {"diverged": 9}, "chosen": None, "best": [None] * 9}
    result["tuning"]["arms"]["dense"] = lost | {"failure": "no setting of dense is left of 9"}
    html = study_page(result, {"Best": "dselect-k, <surely>"})
    first = html.split("<nav")[0]
    assert "<dt>Best</dt><dd>dselect-k, &lt;surely&gt;</dd>" in first
    for text in (
        "A smoke test",
        '1 suspected leak. <a href="#notes">',
        'dense was not measured: no setting of dense is left of 9 <a href="#search">',
        '1 of 30 trials failed (switch). <a href="#failures">',
    ):
        assert text in first, text
    (search,) = [spec for spec in plots(html).values() if "Best" in str(spec["layout"]["yaxis"])]
    assert "dense" not in [trace["name"] for trace in search["data"]]  # there is nothing to draw
    assert 'class="short"' not in study_page(studied.smallest())


def test_arms_have_intervals_and_are_sorted_by_buttons():
    html = study_page(studied.result())
    (table,) = re.findall(r'<table class="results sortable">.*?</table>', html, re.S)
    heads = re.findall(r"<th scope=\"col\"[^>]*><button type=\"button\">([^<]+)</button>", table)
    costs = ["Active FLOPs", "Parameters", "Memory", "Examples", "Time"]
    assert heads == ["Arm", "Accuracy", *costs, "Loss", "Dead experts", "Trials"]
    assert "<small>validation, lower is better</small>" in table
    for arm in studied.RESULT["arms"]:
        value = arm["metrics"]["accuracy"]
        text = f"{value['mean']:.1%}<small>{value['low']:.1%} to {value['high']:.1%}</small>"
        assert f'data-value="{value["mean"]}">{text}' in table
    assert ">4<small>1 failed</small>" in table
    assert 'data-value="">–<' in table  # the dense arm has no dead experts to count


def test_headings_are_in_order():
    for result in (studied.result(), studied.smallest()):
        levels = [
            int(tag[1]) for tag, _ in Elements(study_page(result)).tags if re.match("h[1-6]$", tag)
        ]
        assert levels[0] == 1 and levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))


def test_every_link_and_label_leads_somewhere():
    found = Elements(study_page(studied.result()))
    ids = [a["id"] for _, a in found.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for a in found.all("a")} <= set(ids)
    assert {a["aria-labelledby"] for _, a in found.tags if "aria-labelledby" in a} <= set(ids)


def test_the_policy_allows_these_scripts_and_no_network():
    html = study_page(studied.result())
    found = Elements(html)
    (policy,) = [a["content"] for a in found.all("meta") if "http-equiv" in a]
    rules = dict(rule.split(maxsplit=1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'" and rules["img-src"] == "data:"
    data, *code = found.scripts
    assert rules["script-src"].split() == [page.fingerprint(script) for script in code]
    assert len(code) == 2 and json.loads(data)
    assert not {"link", "img", "iframe", "base", "form"} & {tag for tag, _ in found.tags}
    assert not any("src" in a or any(n.startswith("on") for n in a) for _, a in found.tags)


def poisoned(value):
    """The same result with every text that is free replaced by a bad one."""
    if isinstance(value, list):
        return [poisoned(each) for each in value]
    if not isinstance(value, dict):
        return EVIL if isinstance(value, str) else value
    kept = ("word", "better", "format", "kind", "from", "equal", "trials_sha256", "when", "metric")
    kept += ("main", "split", "tier")
    return {k: v if k in kept else poisoned(v) for k, v in value.items()}


def test_texts_are_escaped_everywhere():
    result = poisoned(studied.result())
    for named in ("curves", "loads", "trajectories"):
        result[named] = {f"{EVIL}{name}": value for name, value in result[named].items()}
    result["tuning"]["arms"] = {EVIL: result["tuning"]["arms"]["dense"]}
    result["versions"] = result["arms"][0]["settings"] = {EVIL: EVIL}
    html = study_page(result)
    found = Elements(html)
    assert len(found.all("script")) == 3 and not found.all("img")
    assert "<!--" not in html and "\u2028" not in found.scripts[0]
    # Plotly reads tags in texts, so they are escaped for it once more.
    named = [trace.get("name", "") for spec in plots(html).values() for trace in spec["data"]]
    assert not any("<" in name for name in named) and any("&lt;/script" in name for name in named)


def test_little_is_enough_for_a_page():
    html = study_page(studied.smallest())
    assert plots(html) == {}
    assert "90.0%" in html and "1 arm<" in html and "1 seed<" in html
    for absent in ('id="verdicts"', 'id="curves"', 'id="failures"', "Looks at"):
        assert absent not in html


def test_one_seed_has_points_without_bars_and_lines_without_bands():
    result = studied.result()
    for arm in result["arms"]:
        for value in arm["metrics"].values():
            value |= {"low": None, "high": None}
    for arms in result["curves"].values():
        for line in arms.values():
            line |= {"low": [None] * 60, "high": [None] * 60}
    for claim in result["claims"]:
        claim["verdict"] |= {"interval": None, "detectable": None, "word": "undecided"}
    html = study_page(result)
    assert len(plots(html)) == studied.PLOTS - 1  # no effects to draw
    assert not any("fill" in trace for spec in plots(html).values() for trace in spec["data"])
    assert "share fewer than two seeds: nothing can be said." in html


def test_what_is_not_finite_is_a_dash_and_never_breaks_the_plots():
    result = studied.result()
    result["arms"][0]["metrics"]["accuracy"]["mean"] = float("nan")
    result["curves"]["loss"]["dense"]["mean"][3] = float("inf")
    assert len(plots(study_page(result))) == studied.PLOTS


def test_without_plotly_all_tables_are_open_and_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("moiety.report.study.plotly_script", lambda: "")
    html = study_page(studied.result())
    assert "moiety[lab]" in html
    assert html.count("<details open>") == studied.PLOTS
    assert 'class="plot"' not in html and 'id="figures"' not in html
    assert len(Elements(html).scripts) == 1  # sorting and copying still work


def test_arms_differ_by_more_than_their_colour():
    looks = {(figures.marker(i, 7)["symbol"], figures.colour(i)) for i in range(56)}
    assert len(looks) == 56
    assert len({figures.marker(i, 7)["symbol"] for i in range(7)}) == 7


def test_points_that_coincide_are_moved_apart_and_others_are_not():
    places, (low, high) = figures._apart([2.0, 1.0, 2.0])
    assert places[1] == 1.0
    assert places[0] < 2.0 < places[2] and places[2] - places[0] == pytest.approx(0.03)
    assert low < 1.0 and high > max(places)
    places, (low, high) = figures._apart([5.0, 5.0])
    assert high - low == pytest.approx(0.5) and sum(places) == pytest.approx(10.0)
    assert figures._apart([0.0])[0] == [0.0]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (number(None), "–"),
        (number(float("inf")), "–"),
        (number(-0.25, ".1%"), "−25.0%"),
        (number(2.5, "d"), "2.5"),
        (number(181690.0, ",d"), "181,690"),
        (interval(0.1, None, ".1%"), ""),
        (interval(0.1, 0.2, ".1%"), "10.0% to 20.0%"),
        (difference(0.0113, ".1%"), "+1.13 points"),
        (difference(-0.031, ".3f"), "−0.031"),
        (difference(0.005, ".1%", signed=False), "0.5 points"),
        (quantity(2.26e6, THOUSANDS), "2.26 M"),
        (quantity(950, THOUSANDS), "950"),
        (duration(0.0341), "0.034 s"),
        (duration(6.26), "6.3 s"),
        (difference(0.01, ".1%", signed=False), "1 point"),
        (difference(0.01234, ".1%", signed=False), "1.23 points"),
        (difference(0.05, ".3f", signed=False), "0.050"),
        (duration(119.9), "2 min 00 s"),
        (duration(3725), "1 h 02 min"),
    ],
)
def test_numbers_are_written_as_people_read_them(written, text):
    assert written == text


@pytest.mark.parametrize(
    ("kind", "word", "effect", "start"),
    [
        ("greater", "holds", 1.0, "a is better than b by more than"),
        ("greater", "reversed", -1.0, "a is worse than b by more than"),
        ("greater", "negligible", 0.0, "a and b differ by less than"),
        ("greater", "undecided", 0.5, "These seeds do not tell whether a is better"),
        ("greater", "undecided", -0.6, "a is not better than b; how much worse it is, these seeds"),
        ("equivalent", "holds", 0.0, "a and b differ by less than"),
        ("equivalent", "reversed", 1.0, "a is better than b by more than"),
        ("equivalent", "reversed", -1.0, "a is worse than b by more than"),
        ("equivalent", "undecided", 0.5, "These seeds do not tell whether a and b differ"),
    ],
)
def test_a_verdict_is_a_sentence(kind, word, effect, start):
    verdict = {"word": word, "effect": effect, "interval": [effect - 0.5, effect + 0.5]}
    claim = {"kind": kind, "a": "a", "b": "b", "margin": 0.5, "verdict": verdict}
    assert sentence(claim, ".2f").startswith(start)


@pytest.mark.parametrize("name", ["report.png", "report-plots.png", "report-phone.png"])
def test_the_pictures_of_the_page_are_light(name):
    assert (Path(__file__).parent.parent / "docs" / name).stat().st_size < 300_000


def test_names_of_a_plot_leave_out_a_set_that_both_have():
    assert apart("usps / self-distillation", "usps / MARS") == ("self-distillation", "MARS")
    assert apart("usps / MARS", "scierc / MARS") == ("usps / MARS", "scierc / MARS")
    assert apart("top-k", "top-k, large") == ("top-k", "top-k, large")
