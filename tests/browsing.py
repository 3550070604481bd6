"""A page that is open in a browser, and what it said meanwhile."""

from contextlib import contextmanager
from types import SimpleNamespace


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
