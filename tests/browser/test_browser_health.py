"""The pages of health and routing in a browser: silent, without network, and fit for a phone."""

import pytest

from moiety.report import course_page, routing_page
from test_report import LOADS, health, layer, window

pytestmark = pytest.mark.browser


def routing():
    rows = [{"arm": arm, "accuracy": 0.97} for arm in LOADS]
    columns = [("arm", "Router"), ("accuracy", "Accuracy", ".1%")]
    words = {"title": "Routers", "summary": "", "settings": {"Seed": "0"}, "command": "moiety demo"}
    return routing_page(rows=rows, columns=columns, loads=LOADS, **words)


PAGES = {
    "health": lambda: health(layer("blocks.0.moe", experts=64), layer("blocks.1.moe")),
    "course": lambda: course_page([window(10, 4.0, [])], {"a": [0.25] * 4}, every=10),
    "routing": routing,
}


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [390, 1200])
def test_a_page_is_silent_and_fits(visit, name, width):
    seen = visit(PAGES[name](), width)
    assert seen.page.locator("h1").is_visible()
    assert seen.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert seen.errors == [] and len(seen.requests) == 1


def test_what_is_planted_is_blocked(visit):
    planted = "<img src='http://127.0.0.1:9/x.png'><script>document.title = 'evil'</script>"
    seen = visit(routing().replace("<header>", f"<header>{planted}"))
    assert sum("Content Security Policy" in error for error in seen.errors) == 2
    assert seen.page.title() == "Routers"
