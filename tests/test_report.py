"""The routing page: complete, escaped, self-contained, and readable without colour."""

import re
from html.parser import HTMLParser

import pytest

from moiety.report import Column, course_page, health_page, routing_page

LOADS = {
    "dense": {},
    "top-k": {"blocks.0.moe": [0.4, 0.3, 0.3, 0.0], "blocks.1.moe": [1, 1, 1, 1]},
    "<script>alert(1)</script>": {"x & y": [0.9, 0.1]},
}


def page(**changes):
    values = {
        "title": "Two routers",
        "summary": "A comparison.",
        "rows": [{"arm": "top-k", "accuracy": 0.9712}, {"arm": "dense", "accuracy": None}],
        "columns": [Column("arm", "Router"), ("accuracy", "Accuracy", ".1%")],
        "loads": LOADS,
        "settings": {"seed": "0"},
        "command": "moiety demo --seed 0",
    }
    return routing_page(**(values | changes))


class Tables(HTMLParser):
    """Collect every table as rows of cell texts, under the table's caption."""

    def __init__(self):
        super().__init__()
        self.tables, self.caption, self.into, self.tags, self.attributes = {}, "", None, [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag == "caption":
            self.caption, self.into = "", "caption"
        elif tag == "tr":
            self.tables.setdefault(self.caption, []).append([])
        elif tag in ("td", "th"):
            self.into = "cell"
            self.tables[self.caption][-1].append("")

    def handle_endtag(self, tag):
        if tag in ("td", "th", "caption"):
            self.into = None

    def handle_data(self, data):
        if self.into == "caption":
            self.caption += data
        elif self.into == "cell":
            self.tables[self.caption][-1][-1] += data


def parse(html):
    parser = Tables()
    parser.feed(html)
    return parser


def loads_table(html, arm):
    found = [rows for caption, rows in parse(html).tables.items() if caption.startswith(f"{arm}: ")]
    (rows,) = found
    return rows


def test_results_are_formatted_and_gaps_are_dashes():
    (rows,) = [rows for name, rows in parse(page()).tables.items() if name.startswith("Results")]
    assert rows == [["Router", "Accuracy"], ["top-k", "97.1%"], ["dense", "–"]]


def test_every_expert_of_every_layer_appears():
    rows = loads_table(page(), "top-k")
    assert rows[0] == ["Expert", "0", "1", "2", "3"]
    assert rows[1] == ["blocks.0.moe", "40.0%", "30.0%", "30.0%", "0.0%dead"]
    assert rows[2] == ["blocks.1.moe", "25.0%", "25.0%", "25.0%", "25.0%"]  # counts are scaled
    wide = {"hash": {"a": [1.0] * 128, "b": [1.0] * 3}}
    assert [len(row) for row in loads_table(page(loads=wide), "hash")] == [129, 129, 5]


def test_an_arm_without_experts_is_named():
    assert "every token on the same path: dense." in page()


def test_dead_experts_are_named_in_text():
    html = page()
    assert "Dead: expert 3 in blocks.0.moe." in html
    assert html.count("No dead expert.") == 1
    # Declared deaths replace the guess from the load.
    html = page(dead={"top-k": {"blocks.0.moe": [False, True, True, False]}})
    assert "Dead: experts 1, 2 in blocks.0.moe." in html
    assert loads_table(html, "top-k")[1][1:] == ["40.0%", "30.0%dead", "30.0%dead", "0.0%"]


def test_the_shade_follows_the_load_relative_to_an_even_share():
    html = page(loads={"a": {"b": [0.7, 0.25, 0.04, 0.01]}})
    assert re.findall(r'<td class="shade-(\d)', html) == ["5", "3", "1", "0"]


def test_little_is_not_nothing():
    rows = loads_table(page(loads={"a": {"b": [1.0, 1e-6]}}), "a")
    assert rows[1] == ["b", "100.0%", "<0.1%"]


def test_a_layer_without_any_token_has_only_dead_experts():
    html = page(loads={"a": {"b": [0.0, 0.0]}})
    assert "Dead: experts 0, 1 in b." in html


@pytest.mark.parametrize("field", ["title", "summary", "command"])
def test_text_is_escaped(field):
    html = page(**{field: "<img src=x onerror=alert(1)>"})
    assert "<img" not in html
    assert "&lt;img" in html


def test_names_and_values_are_escaped():
    evil = "<script>alert(1)</script>"
    html = page(
        settings={evil: evil},
        rows=[{"arm": evil, "accuracy": evil}],
        columns=[("arm", evil), ("accuracy", evil)],
        dead={evil: {"x & y": [True, False]}},
    )
    assert "script" not in parse(html).tags
    assert "x &amp; y" in html


def test_the_page_loads_nothing():
    html = page()
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert f'http-equiv="Content-Security-Policy" content="{policy}"' in html
    assert not re.search(r"https?://|//\w|@import|url\(", html)
    parser = parse(html)
    assert not {"script", "link", "img", "iframe"} & set(parser.tags)
    assert not {"src", "href"} & {name for name, _ in parser.attributes}


def test_tables_have_captions_and_scopes():
    parser = parse(page())
    assert parser.tags.count("caption") == parser.tags.count("table") == 3
    assert parser.tags.count("th") == sum(name == "scope" for name, _ in parser.attributes)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.1])
def test_an_impossible_load_is_refused(bad):
    with pytest.raises(ValueError, match=r"top-k, blocks\.0"):
        page(loads={"top-k": {"blocks.0": [0.5, bad]}})


def test_dead_of_another_length_is_refused():
    with pytest.raises(ValueError, match="has 4 loads, but `dead` names 1"):
        page(dead={"top-k": {"blocks.0.moe": [True]}})


def test_notes_are_shown_and_escaped():
    html = page(notes={"Accuracy": "on <b>test</b> images"})
    assert '<dl class="notes">' in html
    assert "Accuracy:</dt> <dd>on &lt;b&gt;test&lt;/b&gt; images." in html
    assert '<dl class="notes">' not in page()


# -- health -------------------------------------------------------------------------------------

EVIL = "<script>alert(1)</script>"


def layer(name="a", experts=2, **changes):
    values = {
        "name": name,
        "experts": experts,
        "tokens": 100,
        "slots": 200,
        "load": [1 / experts] * experts,
        "effective": float(experts),
        "peak": 1.0,
        "entropy": None,
        "relative_entropy": None,
        "dead": [],
        "drop_rate": 0.0,
        "padding": {
            "share": 0.0,
            "load": [0.0] * experts,
            "effective": float(experts),
            "peak": 1.0,
            "preferred": [],
            "to_preferred": 0.0,
            "real_there": 0.0,
            "distance": 0.0,
            "shift": 0.0,
        },
        "pairs": [],
        "together": None,
        "typical": None,
    }
    return values | changes


def health(*layers, findings=(), notes=()):
    values = {"layers": list(layers), "findings": list(findings), "examples": 7, "notes": notes}
    return health_page(values, title="Health", settings={"Seed": "0"}, command="moiety health")


def test_findings_come_first_and_minor_ones_look_minor():
    found = [
        {"kind": "dead", "layer": "a", "text": "expert 1 got no token"},
        {"kind": "little", "layer": "b", "text": "too few"},
    ]
    html = health(layer(), findings=found)
    assert '<li class="problem"><strong>a</strong>: expert 1 got no token.</li>' in html
    assert '<li class="minor"><strong>b</strong>: too few.</li>' in html
    assert html.index("expert 1 got no token") < html.index('id="layers"')
    assert "No problem found." not in html
    assert "No problem found." in health(layer())


def test_texts_of_tokens_and_layers_are_escaped():
    token = {"id": 5, "text": EVIL, "count": 9, "lift": 2.0}
    finding = {"kind": "dead", "layer": EVIL, "text": EVIL}
    html = health(layer(EVIL, typical=[[token], []]), findings=[finding], notes=[EVIL])
    assert "script" not in parse(html).tags
    assert html.count("&lt;script&gt;") >= 5


def test_white_space_of_tokens_is_visible():
    tokens = [{"id": i, "text": t, "count": 9, "lift": 2.0} for i, t in enumerate((" a", "\n", ""))]
    html = health(layer(typical=[tokens, []]))
    assert re.findall("<code>(.+?)</code>", html)[:3] == ["␣a", "↵", "#2"]
    assert "none stands out" in html


def test_tokens_that_cannot_be_seen_or_would_spoil_the_page_are_written_out():
    shown = {
        "\x00\x1b[31m": r"\x00\x1b[31m",
        "\u202eabc": r"\u202eabc",  # would turn the rest of the line around
        "\ud800": r"\ud800",
        "a\ufffd": "#7",  # bytes of half a character
        "x" * 5000: "x" * 40 + "…",
        "é😀مرحبا": "é😀مرحبا",
    }
    tokens = [{"id": 7, "text": t, "count": 9, "lift": 2.0} for t in shown]
    html = health(layer(typical=[tokens, []]))
    assert re.findall("<code>(.+?)</code>", html)[: len(shown)] == list(shown.values())


def test_padding_that_goes_where_text_goes_prefers_nobody():
    pad = layer()["padding"] | {"share": 0.3, "preferred": [0, 1], "to_preferred": 1.0}
    (row,) = parse(health(layer(padding=pad))).tables["What padding does to the balance"][1:]
    assert row == ["a", "30.0%", "2.00 → 2.00", "1.00 → 1.00", "–", "–", "–", "0.00", "0.0%"]
    pad = pad | {
        "shift": 0.2,
        "distance": 0.65,
        "preferred": [1],
        "to_preferred": 0.9,
        "real_there": 0.25,
    }
    (row,) = parse(health(layer(padding=pad))).tables["What padding does to the balance"][1:]
    assert row[4:] == ["1", "90.0%", "25.0%", "0.65", "20.0%"]
    assert "Padding took no slot" in health(layer())


def test_large_tables_of_pairs_show_shades_alone():
    pairs = [{"experts": [0, 1], "tokens": 30, "lift": 2.04}]
    for experts, numbers in ((4, True), (17, False)):
        lift = [[None if i == j else 2.04 for j in range(experts)] for i in range(experts)]
        html = health(layer(experts=experts, together=lift, pairs=pairs))
        assert html.count('<td class="shade-5"') == experts * (experts - 1)
        assert (">2.0</td>" in html) is numbers
        assert "Most together: 0 and 1 (2.0×, 30 tokens)." in html
    assert "there are no pairs" in health(layer())


def window(step, effective, dead):
    figures = {"effective": effective, "dead": dead, "entropy": None, "drop_rate": 0.0}
    return {"step": step, "steps": 10, "layers": {"a": figures}}


def test_the_course_says_since_when_an_expert_is_dead():
    rows = [window(10, 4.0, [1]), window(20, 3.0, []), window(30, 2.0, [1]), window(40, 1.0, [1])]
    html = course_page(rows, {"a": [0.4, 0.0, 0.3, 0.3]}, every=10)
    assert "a: expert 1 has had no token since step 21." in html
    effective, dead = re.findall(r'<polyline points="([^"]+)"', html)
    assert effective == "0.0,0.0 80.0,9.0 160.0,18.0 240.0,27.0"
    assert dead == "0.0,27.0 80.0,36.0 160.0,27.0 240.0,27.0"
    assert "Every expert got tokens" in course_page(rows[:2], {}, every=10)


def test_a_long_course_is_thinned_out():
    rows = [window(10 * i, 4.0, []) for i in range(1, 5001)]
    html = course_page(rows, {}, every=10)
    lengths = [len(points.split()) for points in re.findall(r'<polyline points="([^"]+)"', html)]
    assert max(lengths) <= 202


def test_health_pages_load_nothing():
    for html in (health(layer()), course_page([window(10, 1.0, [])], {}, every=10)):
        assert "default-src 'none'" in html
        assert not re.search(r"https?://|//\w|@import|url\(", html)
        assert not {"script", "link", "img", "iframe"} & set(parse(html).tags)
