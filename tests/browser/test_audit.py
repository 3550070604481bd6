"""The page of an audit in a browser: drawn, silent, readable in both schemes and on a phone."""

import numpy as np
import pytest

import audited
from browsing import fits, other_requests, pixels
from moiety.report import AuditPart, audit_page, routing_page

pytestmark = pytest.mark.browser

EVIL = "</svg><script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">"
PAGES = {
    "all": audited.result,
    "dense": audited.dense,
    "batch": audited.batch,
    "deep": audited.deep,
}


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [390, 1200])
def test_a_page_is_silent_and_fits(visit, name, width):
    seen = visit(audit_page(PAGES[name]()), width)
    assert seen.page.locator("h1").is_visible() and fits(seen.page)
    seen.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert fits(seen.page)
    assert seen.errors == [] and other_requests(seen) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_is_drawn_in_colour(visit, scheme):
    page = visit(audit_page(audited.result()), color_scheme=scheme).page
    charts = page.locator("svg.chart").all()
    assert len(charts) == 2 + len(audited.ERRORS)
    for chart in charts:
        chart.scroll_into_view_if_needed()
        image = pixels(chart)
        assert (image.mean() > 200) == (scheme == "light")
        assert (np.ptp(image, axis=2) > 40).mean() > 0.002  # axes and text alone are grey


def test_lines_are_told_apart_and_the_union_is_the_ink_of_the_page(visit):
    page = visit(audit_page(audited.result())).page
    lines = page.locator("svg.chart").first.locator("polyline")
    style = "l => [getComputedStyle(l).stroke, getComputedStyle(l).strokeDasharray]"
    looks = [tuple(line.evaluate(style)) for line in lines.all()]
    assert len(set(looks)) == len(looks) == len(audited.ERRORS) + 1
    ink = page.evaluate("getComputedStyle(document.body).color")
    assert looks[0][0] == ink and looks[-1][0] != ink  # below the others, which it would hide


def test_the_five_sizes_of_the_command_are_seen_without_scrolling(visit):
    """Those that `moiety audit` takes by default: the largest matters most, and comes last."""
    result = audited.result(eps=sorted([*audited.EPS, 4 / 255]))
    for each in (*result["attacks"].values(), result["union"]):
        for key in {"error", "low", "high", "loss", "changed"} & set(each):
            each[key].insert(3, each[key][2])
    for layer in result["routing"].values():
        for each in layer["attacks"].values():
            for values in each.values():
                values.insert(3, values[2])
    page = visit(audit_page(result)).page
    tables = page.locator(".beside .scroll").all()
    assert len(tables) == 2 and "8/255" in tables[0].inner_text()
    assert all(table.evaluate("t => t.scrollWidth <= t.clientWidth") for table in tables)


def test_text_of_a_chart_stays_inside_it_and_apart(visit):
    for width in (390, 1200):
        page = visit(audit_page(audited.result()), width).page
        for chart in page.locator("svg.chart").all():
            frame = chart.bounding_box()
            boxes = [text.bounding_box() for text in chart.locator(".ticks text").all()]
            boxes = [box for box in boxes if box and box["width"]]
            assert min(box["height"] for box in boxes) > 9  # readable on a phone
            for box in boxes:
                assert box["x"] >= frame["x"] - 1
                assert box["x"] + box["width"] <= frame["x"] + frame["width"] + 1
            for i, a in enumerate(boxes):
                assert not any(_overlap(a, b) for b in boxes[i + 1 :])


def _overlap(a, b):
    across = min(a["x"] + a["width"], b["x"] + b["width"]) - max(a["x"], b["x"])
    down = min(a["y"] + a["height"], b["y"] + b["height"]) - max(a["y"], b["y"])
    return across > 1 and down > 3  # the height of a line is more than that of its letters


def test_the_batch_threat_model_is_loud_on_the_first_screen(visit):
    for scheme in ("light", "dark"):
        page = visit(audit_page(audited.batch()), 390, 844, color_scheme=scheme).page
        label = page.locator(".threat strong")
        box = label.bounding_box()
        assert box["y"] + box["height"] < 844 and box["height"] > 20
        band = "getComputedStyle(document.querySelector('.threat')).backgroundColor"
        assert page.evaluate(band) != page.evaluate(
            "getComputedStyle(document.body).backgroundColor"
        )
        assert label.evaluate("l => getComputedStyle(l).textTransform") == "uppercase"


def test_the_answer_is_on_the_first_screen_of_a_phone(visit):
    page = visit(audit_page(audited.result()), 390, 844).page
    answer = page.get_by_text("of the answers are wrong at ε = 8/255")
    box = answer.bounding_box()
    assert box["y"] + box["height"] < 844


def test_the_skip_link_leads_to_the_results(visit):
    page = visit(audit_page(audited.result())).page
    page.keyboard.press("Tab")
    assert page.locator(":focus").inner_text() == "Skip to the results"
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#error"


def test_every_link_leads_somewhere(visit):
    for make in PAGES.values():
        page = visit(audit_page(make())).page
        lost = "[...document.links].filter(a => !document.getElementById(a.hash.slice(1))).length"
        assert page.evaluate(lost) == 0


def test_scripts_in_names_do_not_run(visit):
    result = audited.result(command=EVIL)
    result["attacks"] = {EVIL: result["attacks"]["pgd"], **result["attacks"]}
    result["model"]["name"] = EVIL
    for layer in result["routing"].values():
        layer["attacks"][EVIL] = layer["attacks"]["pgd"]
    seen = visit(audit_page(result))
    assert seen.page.title() == f"Audit of {EVIL}"  # as text; run, it would be "evil"
    assert seen.page.locator("img").count() == 0 and seen.errors == []
    assert seen.page.locator(".keys li", has_text="</svg>").count() > 0 and fits(seen.page)


def test_paper_is_white_and_shows_the_charts(visit):
    page = visit(audit_page(audited.result()), 700, 1000, color_scheme="dark").page
    page.emulate_media(media="print")
    assert fits(page)
    for chart in page.locator("svg.chart").all():
        assert pixels(chart).mean() > 200
    assert len(page.pdf(format="A4")) > 30_000


@pytest.mark.parametrize("width", [390, 1200])
def test_the_picture_on_the_page_of_the_demo(visit, width):
    part = AuditPart(title="Under attack", summary="Of top-k.", result=audited.batch())
    about = {"title": "T", "summary": "", "rows": [], "columns": [], "loads": {}}
    html = routing_page(**about, settings={}, command="", audit=part)
    seen = visit(html, width)
    chart = seen.page.locator("svg.chart")
    assert chart.count() == 1 and (np.ptp(pixels(chart), axis=2) > 40).mean() > 0.002
    assert seen.page.get_by_text("Batch threat model").is_visible()
    assert fits(seen.page) and seen.errors == []
