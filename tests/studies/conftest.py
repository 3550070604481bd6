"""Where studies find their data in tests: the real sets, and a MovieLens of our own making."""

import os
from pathlib import Path

import pytest

from moiety.data.named import find

DATA = Path(os.environ.get("MOIETY_DATA") or Path(__file__).parents[3] / "shared" / "data")
NEEDS = {
    "dselect-k/multi-mnist": ["mnist"],
    "dselect-k/multi-fashion": ["fashion-mnist"],
    "dselect-k/census": ["census-income"],
    "dselect-k/convergence": ["mnist", "fashion-mnist", "census-income"],
}


@pytest.fixture
def need():
    """A function that skips a test of a study whose data set is not here."""

    def check(name):
        for missing in (data for data in NEEDS.get(name, ()) if find(data, DATA) is None):
            pytest.skip(f"{missing} is not here: set MOIETY_DATA to the folder of data sets")

    return check


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A user's cache with ratings in the layout of MovieLens-100K, whose terms forbid sharing."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "moiety" / "ml-100k").mkdir(parents=True)
    rated = [(u, f) for u in range(1, 31) for f in range(1, 21) if (u * f + u + f) % 3]
    lines = [f"{u}\t{f}\t{1 + (u + f) % 5}\t881250949\n" for u, f in rated]
    (folder / "moiety" / "ml-100k" / "u.data").write_text("".join(lines))
    return folder


@pytest.fixture(autouse=True)
def _data_sets(request, need, cache, monkeypatch):
    """Let studies find the sets; the test that runs all of them skips those without."""
    monkeypatch.setenv("MOIETY_DATA", str(DATA))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    test = request.node
    if test.originalname == "test_a_study_runs_to_its_verdicts_and_then_has_nothing_to_do":
        need(test.callspec.params["name"])
