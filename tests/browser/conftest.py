"""A Chromium for tests that look at pages."""

import os
import shutil
from contextlib import ExitStack

import pytest

from browsing import opened

REQUIRED = os.environ.get("MOIETY_BROWSER") == "required"  # set by `make test-browser`


def absent(reason):
    """Skip, or fail where looking at pages is what was asked for."""
    (pytest.fail if REQUIRED else pytest.skip)(f"{reason}; run make test-browser")


@pytest.fixture(scope="session")
def chromium():
    """The Chromium on the PATH, driven by Playwright."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("playwright is not installed")
    path = shutil.which("chromium")
    if path is None:
        absent("there is no chromium on the PATH")
    with sync_playwright() as playwright:
        # Root, as in a container, may run Chromium only without its sandbox.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium, tmp_path):
    """Open pages from disk, which are closed when the test ends."""
    with ExitStack() as stack:
        yield lambda html, width=1200, height=900, **options: stack.enter_context(
            opened(chromium, tmp_path, html, width, height, **options)
        )
