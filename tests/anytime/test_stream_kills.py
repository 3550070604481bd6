"""A run that is killed ends as if it had been left alone, whatever moment the kills choose.

The five kinds of moments in seconds here; all fifty kills: pytest -m slow tests/anytime
"""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

FEW = {
    "2": "step:5 checkpoint grown current journal",
    "plateau:0.01:4": "check version split:2 switched ledger anywhere",
}
# For each of two policies, 27 of them.
MANY = [
    *(f"step:{n}" for n in (1, 2, 5, 9, 14, 20)),
    *("check", "check:4"),
    *("checkpoint", "checkpoint:7", "state", "card", "form", "version"),
    *("link", "current", "current:2", "switched"),
    *("grow", "grown", "grown"),
    *("journal", "phases", "ledger"),
    *("anywhere", "anywhere", "anywhere"),
]


def killed(folder, wait, places):
    """Run `killed.py`; what must hold does."""
    script = Path(__file__).with_name("killed.py")
    # One thread, as the tests run: a forked process has no others.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(folder), wait, " ".join(places)]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["failures"] == []
    assert [name for name, held in found["holds"].items() if not held] == []
    return found


@pytest.mark.parametrize("wait", FEW)
def test_killed_at_any_moment_it_ends_as_if_it_had_been_left_alone(tmp_path, wait):
    found = killed(tmp_path, wait, FEW[wait].split())
    assert {"phase", "write", "current", "growth", "line"} <= set(found["kills"])
    assert found["growths"] >= 1
    assert found["loads"] > 20  # the reader was there, however slow the machine


@pytest.mark.slow
def test_fifty_kills(tmp_path):
    kinds, loads = Counter(), 0
    for number, wait in enumerate(FEW):
        places = random.Random(number).sample(MANY, len(MANY))
        found = killed(tmp_path / wait, wait, places)
        kinds.update(found["kills"])
        loads += found["loads"]
    assert kinds.total() >= 50
    assert kinds["phase"] >= 10
    assert min(kinds["write"], kinds["current"], kinds["growth"]) >= 5
    assert loads >= 500
