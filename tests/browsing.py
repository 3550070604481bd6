"""A page that is open in a browser, what it said meanwhile, and what is wrong with it."""

import io
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
from PIL import Image

FITS = "document.documentElement.scrollWidth <= window.innerWidth"


@contextmanager
def opened(browser, folder, html, width=1200, height=900, **options):
    """Write a page to disk and open it: `page`, `errors` it logged, addresses in `requests`."""
    path = folder / "page.html"
    path.write_text(html, encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    page, errors, requests = context.new_page(), [], []
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    yield SimpleNamespace(page=page, errors=errors, requests=requests)
    context.close()


def pixels(element):
    return np.asarray(Image.open(io.BytesIO(element.screenshot())).convert("RGB")).astype(float)


def fits(page):
    """Whether nothing makes the page scroll sideways."""
    return page.evaluate(FITS)


def undrawn(page):
    """What is wrong with each plot that is not as it should be."""
    wrong = []
    for i, plot in enumerate(page.locator(".plot").all(), 1):
        traces = plot.evaluate("p => (p.data || []).map(t => (t.x || t.z).length)")
        plot.scroll_into_view_if_needed()
        image = pixels(plot)
        if not traces or not all(traces):
            wrong.append(f"plot {i} has no data")
        elif image.std(axis=(0, 1)).max() <= 5:
            wrong.append(f"plot {i} is blank")
        # Lines, bars and cells have colours of their own; axes and text alone are grey.
        elif (np.ptp(image, axis=2) > 40).mean() <= 0.001:
            wrong.append(f"plot {i} has no colour")
    return wrong


def without_table(page):
    """The titles of the figures whose numbers cannot be read by opening a table by keyboard."""
    wrong = []
    for figure in page.locator("figure:has(.plot)").all():
        table = figure.locator("details table")
        closed = table.count() == 1 and not table.is_visible()
        if closed:
            figure.locator("summary").focus()
            page.keyboard.press("Enter")
        if not closed or not table.is_visible() or len(table.inner_text().split()) <= 10:
            wrong.append(figure.locator("h3").inner_text())
    return wrong


def other_requests(seen):
    """Addresses that were asked for besides the page itself and what it carries."""
    return [url for url in seen.requests[1:] if not url.startswith("data:")]
