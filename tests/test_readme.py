"""The README keeps its word: code runs, the table names every router, links lead somewhere."""

import re
from pathlib import Path

import pytest

import moiety

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
GUIDES = ("architecture.md", "upcycle.md", "seeds.md", "multitask.md", "audit.md", "anytime.md")
GUIDES += ("adapt.md", "cosine.md", "robustness.md")
RUN = [README, *(ROOT / "docs" / name for name in GUIDES)]


def blocks(page):
    """The Python code of a page, block by block."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


# What a newcomer copies must not warn; what torch says of its own parts Python does not show.
@pytest.mark.filterwarnings("error", "ignore::DeprecationWarning:torch.*")
@pytest.mark.parametrize("page", RUN, ids=lambda p: p.name)
def test_the_code_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what it saves does not stay
    names = {}
    assert blocks(page)
    for code in blocks(page):
        exec(compile(code, page.name, "exec"), names)
    if "MyRouter" in names:
        moiety.routing.registry.unregister("my-router")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_in_the_docs_is_python(page):
    for code in blocks(page):
        compile(code, page.name, "exec")


def test_the_table_has_every_router_and_says_what_it_says_of_itself():
    rows = re.findall(
        r"^\| `([\w-]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", README.read_text(), re.M
    )
    assert [name for name, *_ in rows] == moiety.list_routers()
    for name, summary, paper, equation in rows:
        described = moiety.describe(name)
        assert summary == described.summary.rstrip(".")
        # The first name and year of the README are among those of the router.
        author = re.search(r"[A-Z][\w-]+", paper)
        assert author is None or author[0] in described.paper
        assert equation


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_picture_is_light():
    assert (ROOT / "docs" / "demo.png").stat().st_size < 300_000
