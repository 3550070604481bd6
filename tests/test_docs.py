"""What the docs promise exists: every test that docs/peers.md names."""

import ast
import re
from pathlib import Path

from moiety.testing import checks

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "docs" / "peers.md"
# file::function, or file::function[*-check] for one check of a contract.
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[\*-(\w+)\])?`")
CONTRACTS = {
    "tests/testing/test_check_router.py": "router",
    "tests/testing/test_check_experts.py": "experts",
}


def rows():
    """The cells of each row below the head of the table."""
    lines = [line for line in PEERS.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def functions(path):
    """The names of the functions of a file, without running it."""
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def missing(text):
    """What is named in a text and does not exist."""
    lost = []
    for file, function, check in NAMED.findall(text):
        path = ROOT / file
        if not path.exists() or function not in functions(path):
            lost.append(f"{file}::{function}")
        elif check and check not in map(str, checks(CONTRACTS[file])):
            lost.append(f"{file}::{function}[{check}]")
    return lost


def test_every_test_that_peers_names_exists():
    assert missing(PEERS.read_text()) == []


def test_every_complaint_has_a_test_or_says_that_it_has_none():
    assert len(rows()) == 19
    for complaint, _, tests in rows():
        named = NAMED.findall(tests)
        assert named or tests == "none yet", complaint
        # Nothing in the cell that looks like a test escapes the pattern above.
        assert len(named) == tests.count("::"), complaint


def test_a_test_that_does_not_exist_is_found():
    here = "tests/test_docs.py"
    contract = "tests/testing/test_check_router.py::test_router"
    assert missing(f"`{here}::test_nothing`") == [f"{here}::test_nothing"]
    assert missing("`tests/test_nowhere.py::test_it`") == ["tests/test_nowhere.py::test_it"]
    assert missing(f"`{contract}[*-no_such_check]`") == [f"{contract}[no_such_check]"]
