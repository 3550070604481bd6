"""`moiety adapt`, killed at any moment, ends in the same files as if it had been left alone.

Eleven kills in seconds here; all of them: pytest -m slow tests/adapt/test_adapt_kills.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# By where they fall, in the order in which a run comes there.
PLACES = {
    "reading": ["tokens", "asked"],
    "warm-up": ["warm:3", "warm:4", "warmed", "initial"],
    "stage 1": ["step:3", "step:4", "saved", "line", "final"],
    "cache": ["between", "chunk", "written:2", "cached", "cached"],
    "stage 2": ["taught:2", "taught:3", "kept"],
    "between rounds": ["rounds", "heading", "headed"],
    "round 2": ["second:2", "remove"],
    "fine-tuning": ["tune", "tune:2", "tuning", "history", "scored"],
    "final save": ["tuned", "saving", "saved-half", "classifier", "check", "result"],
}
FEW = ["warm:4", "step:4", "cached", "taught:3", "rounds", "tune:2", "saving"]


def killed(folder, places, method="self-distill"):
    """Run `killed_command.py`; every life ended where it should, and nothing differs."""
    script = Path(__file__).with_name("killed_command.py")
    command = [sys.executable, str(script), str(folder), " ".join(places), method]
    # One thread, as the tests run: a forked process has no others.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout)
    assert found["ends"] == [0, 0], ran.stderr[-2000:]
    assert found["survived"] == []
    assert found["differ"] == []
    return found["files"]


def test_a_command_that_is_killed_ends_in_the_same_files(tmp_path):
    files = killed(tmp_path, FEW)
    assert {"adapted/model.safetensors", "classifier/model.safetensors"} <= set(files)
    assert {"result.json", "check.safetensors", "adapted/tokenizer.json"} <= set(files)


def test_so_does_a_comparison(tmp_path):
    files = killed(tmp_path, ["taught:3", "tune:17", "arm", "page"], "compare")
    assert {"compare.html", "result.json", "fine-tune/check.safetensors"} <= set(files)


@pytest.mark.slow
def test_three_kills_at_least_in_every_part(tmp_path):
    counts = {part: len(places) for part, places in PLACES.items()}
    assert min(counts[part] for part in counts if part not in ("reading", "round 2")) >= 3
    killed(tmp_path, [place for places in PLACES.values() for place in places])
