"""The page of a study in a browser: drawn, silent, usable by keyboard, on a phone and on paper."""

import io
import time

import numpy as np
import pytest
from PIL import Image

import studied
from browsing import opened
from moiety.report import study_page

pytestmark = pytest.mark.browser

EVIL = (
    "</script><script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">"
)


@pytest.fixture(scope="module")
def html():
    return study_page(studied.result())


@pytest.fixture(scope="module")
def desk(chromium, html, tmp_path_factory):
    """One wide page for all tests that leave it nearly as it was."""
    with opened(chromium, tmp_path_factory.mktemp("desk"), html) as seen:
        yield seen


def pixels(element):
    return np.asarray(Image.open(io.BytesIO(element.screenshot())).convert("RGB")).astype(float)


def fits(page):
    """Whether nothing makes the page scroll sideways."""
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def until(page, expression):
    """Wait until JavaScript says so; Playwright's own waiting needs eval, which pages forbid."""
    end = time.monotonic() + 20
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"not within 20 s: {expression}"
        page.wait_for_timeout(50)


def column(page, name):
    """The texts of a column of the table of arms, from top to bottom."""
    heads = [text.strip() for text in page.locator(".sortable th button").all_inner_texts()]
    place = heads.index(name) + 1
    return page.locator(f".sortable tbody tr > :nth-child({place})").all_inner_texts()


def test_every_plot_is_drawn_with_data(desk):
    seen = desk
    plots = seen.page.locator(".plot.js-plotly-plot")
    assert plots.count() == studied.PLOTS
    for i in range(studied.PLOTS):
        plot = plots.nth(i)
        traces = plot.evaluate("p => p.data.map(t => (t.x || t.z).length)")
        assert traces and all(traces)
        plot.scroll_into_view_if_needed()
        image = pixels(plot)
        assert image.std(axis=(0, 1)).max() > 5, f"plot {i + 1} is blank"
        # Lines, bars and cells have colours of their own; axes and text alone are grey.
        assert (np.ptp(image, axis=2) > 40).mean() > 0.001, f"plot {i + 1} has no colour"
    assert seen.errors == []


def test_nothing_but_the_file_is_asked_for(desk):
    seen = desk
    seen.page.wait_for_timeout(300)
    assert all(url.startswith(("file:", "data:")) for url in seen.requests)
    assert sum(url.startswith("file:") for url in seen.requests) == 1
    assert seen.errors == []


def test_every_plot_is_followed_by_a_table_that_opens_by_keyboard(desk):
    page = desk.page
    figures = page.locator("figure:has(.plot)")
    assert figures.count() == studied.PLOTS
    for i in range(studied.PLOTS):
        table = figures.nth(i).locator("details table")
        assert not table.is_visible()
        figures.nth(i).locator("summary").focus()
        page.keyboard.press("Enter")
        assert table.is_visible()
        assert len(table.inner_text().split()) > 10


def test_arms_are_sorted_by_keyboard(desk):
    page = desk.page
    before = column(page, "Arm")
    assert before == studied.ARMS
    head = page.locator(".sortable th", has_text="Accuracy")
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"  # the best first
    shown = [float(text.split("%")[0]) for text in column(page, "Accuracy")]
    assert shown == sorted(shown, reverse=True)
    page.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "ascending"
    assert column(page, "Arm")[0] == "dense"
    dead = page.locator(".sortable th", has_text="Dead experts")
    for _ in range(2):  # what has no number is last, whichever way
        dead.locator("button").press("Enter")
        assert column(page, "Arm")[-1] == "dense"
    assert head.get_attribute("aria-sort") is None


def test_the_skip_link_is_first_and_focus_is_seen(visit, html):
    page = visit(html).page
    page.keyboard.press("Tab")
    link = page.locator(":focus")
    assert link.inner_text() == "Skip to the results"
    assert link.bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('nav') === null")
    button = page.locator(".sortable th button").first
    button.press("Tab")
    style = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(style) == "solid"


def test_the_command_is_copied(visit, html):
    seen = visit(html, permissions=["clipboard-read", "clipboard-write"])
    seen.page.locator("#copy").press("Enter")
    until(seen.page, "document.getElementById('copy').textContent === 'Copied'")
    assert seen.page.evaluate("navigator.clipboard.readText()") == studied.RESULT["command"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_does_not_scroll_sideways(visit, html, scheme):
    seen = visit(html, 390, 844, color_scheme=scheme, has_touch=True, is_mobile=True)
    assert fits(seen.page)
    edges = "[...document.querySelectorAll('.plot .main-svg')].map(RIGHT)"
    edges = edges.replace("RIGHT", "s => s.getBoundingClientRect().right")
    assert max(seen.page.evaluate(edges)) <= 390
    seen.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert fits(seen.page)
    assert seen.errors == []


def test_plots_follow_the_width_of_the_window(visit, html):
    page = visit(html).page
    width = "document.querySelector('.plot .main-svg').getBoundingClientRect().width"
    assert page.evaluate(width) > 900
    page.set_viewport_size({"width": 390, "height": 844})
    until(page, f"{width} < 390")
    assert fits(page)


def test_the_dark_scheme_is_dark_also_in_plots_and_when_it_switches(visit, html):
    page = visit(html, color_scheme="dark").page
    plot = page.locator(".plot").nth(1)
    assert pixels(plot).mean() < 60
    text = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    dark = page.evaluate(text)
    page.emulate_media(color_scheme="light")
    until(page, f"{text} !== '{dark}'")
    assert pixels(plot).mean() > 200
    page.emulate_media(color_scheme="dark")
    until(page, f"{text} === '{dark}'")


def test_paper_is_white_and_shows_plots_and_tables(visit, html):
    seen = visit(html, 700, 1000, color_scheme="dark")
    seen.page.emulate_media(media="print")
    until(
        seen.page,
        "[...document.querySelectorAll('.plot .main-svg')].every(s => s.clientWidth === 680)",
    )
    assert fits(seen.page)
    assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    tables = seen.page.locator("figure details table")
    assert tables.count() == studied.PLOTS
    for i in range(studied.PLOTS):
        assert tables.nth(i).bounding_box()["height"] > 20
    for i in range(studied.PLOTS):
        assert pixels(seen.page.locator(".plot").nth(i)).mean() > 120  # not on black
    assert len(seen.page.pdf(format="A4")) > 50_000
    assert seen.errors == []


def test_scripts_in_names_do_not_run(visit):
    result = studied.result(title=EVIL, command=EVIL)
    for arm in result["arms"]:
        old, arm["name"] = arm["name"], f"{EVIL} {arm['name']}"
        for where in (*result["curves"].values(), result["loads"], result["trajectories"]):
            if old in where:
                where[arm["name"]] = where.pop(old)
    seen = visit(study_page(result))
    assert seen.page.locator(".plot.js-plotly-plot").count() == studied.PLOTS
    assert seen.page.locator("img").count() == 0
    assert seen.page.title() == EVIL  # as text; run, it would be "evil"
    assert seen.page.locator(".legendtext", has_text="</script>").count() > 0
    assert seen.errors == [] and len([u for u in seen.requests if u.startswith("file:")]) == 1


@pytest.mark.parametrize(
    "planted",
    [
        '<img src="http://127.0.0.1:9/x.png">',
        "<script>document.title = 'evil'</script>",
        '<script src="http://127.0.0.1:9/x.js"></script>',
        '<link rel="stylesheet" href="http://127.0.0.1:9/x.css">',
        '<iframe src="http://127.0.0.1:9/"></iframe>',
        '<p onclick="document.title = \'evil\'" id="planted">x</p>',
    ],
)
def test_what_is_planted_in_the_file_is_blocked(visit, planted):
    seen = visit(study_page(studied.smallest()).replace("<header>", f"<header>{planted}"))
    if seen.page.locator("#planted").count():
        seen.page.locator("#planted").click()
    seen.page.wait_for_timeout(200)
    assert any("Content Security Policy" in error for error in seen.errors)
    assert seen.page.title() == studied.RESULT["title"]


def long_names():
    result, name = studied.result(), "a-very-long-name-without-end" * 4
    result["claims"][0] |= {"a": name, "b": name, "quote": name * 3}
    result["arms"][0]["name"] = result["title"] = name
    result["arms"][0]["settings"] = {name: name}
    result["loads"] = {name: {name: [0.5, 0.5]}}
    result["curves"] = {name: {name: studied.RESULT["curves"]["loss"]["dense"]}}
    result["failures"] = [{"arm": name, "seed": 0, "error": name * 5}]
    return result


def many_experts():
    return studied.result(loads={"wide": {f"block {b}": [1 / 128] * 128 for b in range(4)}})


@pytest.mark.parametrize("result", [studied.smallest, long_names, many_experts])
@pytest.mark.parametrize("width", [390, 1200])
def test_odd_results_fit(visit, result, width):
    seen = visit(study_page(result()), width)
    assert fits(seen.page)
    assert seen.errors == []


def test_without_plotly_the_tables_are_there(visit, monkeypatch):
    monkeypatch.setattr("moiety.report.study.plotly_script", lambda: "")
    seen = visit(study_page(studied.result()), 390)
    assert seen.page.locator("figure details[open] table").count() == studied.PLOTS
    assert seen.page.locator("figure details table").first.is_visible()
    seen.page.locator(".sortable th button").first.press("Enter")
    assert column(seen.page, "Arm") == sorted(studied.ARMS)
    assert fits(seen.page) and seen.errors == []
