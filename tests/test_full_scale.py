"""The script that repeats the committed results: it names what there is, and runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moiety.lab.loading import list_studies

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "full_scale.sh"


def run(folder, *words, **env):
    env = {**os.environ, "PYTHON": sys.executable, "SCALE": "smoke", "DEVICE": "cpu", **env}
    asked = ["bash", SCRIPT, *words]
    return subprocess.run(asked, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def named():
    """The studies that the script runs."""
    text = SCRIPT.read_text()
    found = set(re.findall(r"study ([\w-]+/[\w-]+) \d", text))
    for names, room in re.findall(r"for name in ([^;]+); do\s+study (\w+)/\$name", text):
        found |= {f"{room}/{name}" for name in names.split()}
    return found


def test_it_runs_every_study_of_four_papers_and_no_other():
    rooms = ("adapt/", "anytime/", "cosine/", "robust/")
    assert named() == {name for name in list_studies() if name.startswith(rooms)}


def test_a_batch_that_does_not_exist_is_answered_with_those_that_do(tmp_path):
    done = run(tmp_path, "everything")
    assert done.returncode == 2 and "mnist, cifar, language" in done.stdout


def test_a_study_that_fails_is_named(tmp_path):
    done = run(tmp_path, "language", PYTHON="false")
    assert done.returncode == 1
    assert "anytime--sequential failed, see runs/log/anytime--sequential.log" in done.stdout


@pytest.mark.slow
def test_a_batch_ends_in_results(tmp_path):
    done = run(tmp_path, "mnist")
    assert done.returncode == 0, done.stdout
    for name in ("mnist", "adaptive-wait", "routers"):
        assert (tmp_path / f"runs/anytime--{name}/smoke/result.json").is_file()
