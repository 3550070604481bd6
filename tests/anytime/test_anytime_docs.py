"""docs/anytime.md can be run again where it was run before."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "anytime.md"


def test_the_first_lines_of_the_page_write_the_same_bytes_again(tmp_path, monkeypatch):
    """A file that changes after it became a mega-batch would stop the run."""
    monkeypatch.chdir(tmp_path)
    code = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)[1]
    written = []
    for now in (1e9, 2e9):
        monkeypatch.setattr("time.time", lambda now=now: now)
        exec(compile(code, PAGE.name, "exec"), {})
        written.append({path.name: path.read_bytes() for path in tmp_path.rglob("*.gz")})
    assert written[0] == written[1]
    assert len(written[0]) == 7
