"""The page of a study in a browser: drawn, silent, usable by keyboard, on a phone and on paper."""

import time

import pytest

import studied
from browsing import FITS, fits, opened, other_requests, pixels, undrawn, without_table
from moiety.lab.headline import answers
from moiety.report import study_page

pytestmark = pytest.mark.browser

EVIL = (
    "</script><script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">"
)


@pytest.fixture(scope="module")
def html():
    result = studied.result()
    return study_page(result, answers(result))


@pytest.fixture(scope="module")
def desk(chromium, html, tmp_path_factory):
    """One wide page for all tests that leave it nearly as it was."""
    clipboard = ["clipboard-read", "clipboard-write"]
    with opened(chromium, tmp_path_factory.mktemp("desk"), html, permissions=clipboard) as seen:
        yield seen


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
    assert desk.page.locator(".plot.js-plotly-plot").count() == studied.PLOTS
    assert undrawn(desk.page) == []
    assert desk.errors == []


def test_nothing_but_the_file_is_asked_for(desk):
    desk.page.wait_for_timeout(300)
    assert desk.requests[0].startswith("file:") and other_requests(desk) == []
    assert desk.errors == []


def test_every_plot_is_followed_by_a_table_that_opens_by_keyboard(desk):
    assert desk.page.locator("figure:has(.plot)").count() == studied.PLOTS
    assert without_table(desk.page) == []


def test_the_answer_is_on_the_first_screen_and_a_verdict_opens_by_keyboard(visit, html):
    page = visit(html, 390, 844).page
    answer = page.locator(".answers")
    box = answer.bounding_box()
    assert "dselect-k: Accuracy 97.8%" in answer.inner_text() and box["y"] + box["height"] < 844
    claim = page.locator(".verdicts > li").first
    assert "dselect-k is better than top-k" in claim.inner_text()
    assert not claim.get_by_text(studied.QUOTE).is_visible()
    claim.locator("summary").press("Enter")
    assert claim.get_by_text(studied.QUOTE).is_visible() and fits(page)


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


def test_the_command_is_copied(desk):
    desk.page.locator("#copy").press("Enter")
    until(desk.page, "document.getElementById('copy').textContent === 'Copied'")
    assert desk.page.evaluate("navigator.clipboard.readText()") == studied.RESULT["command"]


def test_a_phone_does_not_scroll_sideways(visit, html):
    seen = visit(html, 390, 844, has_touch=True, is_mobile=True)
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
    until(page, FITS)  # the other plots follow


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


def test_a_wide_table_does_not_shrink_the_paper(visit, monkeypatch):
    monkeypatch.setattr("moiety.report.study.plotly_script", lambda: "")
    result = studied.smallest()
    names = [f"Accuracy of target_number_{i}, mean" for i in range(10)]
    result["metrics"] |= {name: studied.METRICS["accuracy"] | {"label": name} for name in names}
    reached = {"mean": 0.9, "low": 0.89, "high": 0.91, "n": 5, "values": {}}
    result["arms"][0]["metrics"] |= dict.fromkeys(names, reached)
    page = visit(study_page(result), 700, 1000).page
    assert page.evaluate("document.querySelector('.sortable').offsetWidth") > 700
    page.emulate_media(media="print")
    assert fits(page)


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
    assert seen.errors == [] and other_requests(seen) == []


PLANTED = [
    '<img src="http://127.0.0.1:9/x.png">',
    "<script>document.title = 'evil'</script>",
    '<script src="http://127.0.0.1:9/x.js"></script>',
    '<link rel="stylesheet" href="http://127.0.0.1:9/x.css">',
    '<iframe src="http://127.0.0.1:9/"></iframe>',
    '<p onclick="document.title = \'evil\'" id="planted">x</p>',
]


def test_what_is_planted_in_the_file_is_blocked(visit):
    page = study_page(studied.smallest())
    seen = visit(page.replace("<header>", f"<header>{''.join(PLANTED)}"))
    seen.page.locator("#planted").click()
    seen.page.wait_for_timeout(200)
    blocked = [error for error in seen.errors if "Content Security Policy" in error]
    assert len(blocked) == len(PLANTED)
    assert seen.page.title() == studied.RESULT["title"]


def test_what_these_tests_look_for_is_found(visit, html):
    """Faults that are planted, one after the other, in a page that has none."""
    seen = visit(html)
    page = seen.page
    page.evaluate("Plotly.react('plot-2', [], {})")
    page.evaluate("document.querySelector('#plot-3 .svg-container').style.opacity = 0")
    page.evaluate("document.querySelectorAll('#plot-4 .trace').forEach(t => t.remove())")
    page.evaluate("document.querySelectorAll('#plot-4 .legend').forEach(t => t.remove())")
    found = ["plot 2 has no data", "plot 3 is blank", "plot 4 has no colour"]
    assert undrawn(page)[:3] == found
    page.evaluate("document.querySelector('#plot-5').parentNode.querySelector('table').remove()")
    assert len(without_table(page)) == 1
    page.evaluate("document.querySelector('h1').style.width = '3000px'")
    assert not fits(page)
    assert seen.errors == [] and other_requests(seen) == []
    page.evaluate("setTimeout(() => { throw new Error('planted') })")
    page.evaluate("console.error('said')")
    page.evaluate("location.href = 'http://127.0.0.1:9/'")
    page.wait_for_timeout(300)
    assert any("planted" in error for error in seen.errors) and "said" in seen.errors
    assert other_requests(seen) == ["http://127.0.0.1:9/"]


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


def many_tasks():
    """128 tasks in an arm, long names in another."""
    names = [f"task {i}" for i in range(128)]
    rows = [[1.0 if i == j else 0.5 * (i // 32 == j // 32) for j in range(128)] for i in range(128)]
    gate = {"selected": 4.0, "binary": 1.0, "binary_step": 9e5, "weights": [1 / 64] * 64}
    long = [f"a-very-long-name-without-end{i}" * 4 for i in range(12)]
    square = [[0.5] * 12 for _ in range(12)]
    return studied.result(
        similarity={
            "many": {"tasks": names, "values": rows},
            "long": {"tasks": long, "values": square},
        },
        gates={"many": dict.fromkeys(names, gate), "long": dict.fromkeys(long, gate)},
    )


def many_claims():
    result = studied.result()
    return result | {"claims": result["claims"] * 6}


def lost_arm():
    """An arm that always failed, and one that a search left without settings."""
    result = studied.result()
    nothing = {"mean": None, "low": None, "high": None, "n": 0, "values": {}}
    for arm in result["arms"][:2]:
        arm |= {"metrics": dict.fromkeys(arm["metrics"], nothing), "finished": 0, "failed": 5}
        arm["cost"] = dict.fromkeys(arm["cost"])
    result["tuning"]["arms"]["dense"] |= {"chosen": None, "best": [None], "failure": "none is left"}
    return result


@pytest.mark.parametrize(
    "result", [studied.smallest, long_names, many_experts, many_tasks, many_claims, lost_arm]
)
def test_odd_results_fit(visit, result):
    made = result()
    seen = visit(study_page(made, answers(made)))
    assert fits(seen.page)
    seen.page.set_viewport_size({"width": 390, "height": 844})
    until(seen.page, FITS)
    assert seen.errors == []


def test_gates_and_similarity_are_seen_in_both_schemes(visit, html):
    for scheme in ("light", "dark"):
        page = visit(html, color_scheme=scheme).page
        bars = page.locator(".gates .bars").last
        back, front = (
            page.evaluate(
                f"getComputedStyle(document.querySelector('.bars {part}')).backgroundColor"
            )
            for part in ("span", "i")
        )
        assert back != front and bars.bounding_box()["width"] > 60
        heights = bars.locator("i").evaluate_all("all => all.map(i => i.clientHeight)")
        assert min(heights[:3]) > 15 and max(heights[3:]) == 0  # three experts of eight
        picture = page.locator("section:has(> h2#similarity) .plot").last
        image = pixels(picture)
        assert abs(image - image[5, 5]).max() > 100  # dark cells on light, light ones on dark
        texts = picture.locator(".annotation-text").all_text_contents()
        assert sorted(texts) == ["0.07", "0.07", "1.00", "1.00"]


def test_many_tasks_are_drawn(visit):
    seen = visit(study_page(many_tasks()))
    assert undrawn(seen.page) == [] and without_table(seen.page) == [] and seen.errors == []
    labels = seen.page.locator("section:has(> h2#similarity) .plot").first.locator(".ytick")
    assert 1 < labels.count() <= 16


def test_without_plotly_the_tables_are_there(visit, monkeypatch):
    monkeypatch.setattr("moiety.report.study.plotly_script", lambda: "")
    seen = visit(study_page(studied.result()), 390)
    assert seen.page.locator("figure details[open] table").count() == studied.PLOTS
    assert seen.page.locator("figure details table").first.is_visible()
    seen.page.locator(".sortable th button").first.press("Enter")
    assert column(seen.page, "Arm") == sorted(studied.ARMS)
    assert fits(seen.page) and seen.errors == []
