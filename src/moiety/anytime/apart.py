"""The test set and the stream have no rows in common, or few.

check_apart(examples, row_keys(test), share=0.01, what="mega-batch 3 (monday.csv)")
apart = Apart(Path("test.csv"), share=0.01)
apart.check(read, examples)                  # of a file that arrives, before it is journalled
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .data import Examples, key_rows, row_keys

Read = Callable[[Path], Examples]


class BadTest(ValueError):
    """The test file itself cannot be read in the form of mega-batch 1; the text says why."""


def check_share(share: float) -> None:
    """Raise for what is no share of the rows of a file."""
    if not 0 <= share <= 1:
        raise ValueError(f"overlap must be a share from 0 to 1, got {share:g}")


def check_apart(examples: Examples, tested: set[bytes], share: float, what: str, then: str) -> None:
    """Raise where more than a share of the rows is in the test set, too."""
    both = sum(key in tested for key in key_rows(examples))  # also a row that repeats
    if both > share * len(examples):
        raise ValueError(
            f"{both} of the {len(examples)} rows of {what} are in the test set, too; {then}, "
            f"or allow more than {share:g} of them: --overlap (in Python, overlap=…)"
        )


class Apart:
    """A test file, from which what arrives in a folder is kept apart."""

    def __init__(self, path: Path, share: float) -> None:
        check_share(share)
        self.path, self.share = path, share
        self._form: object = None
        self._keys: set[bytes] = set()

    def check(self, read: Read, examples: Examples, name: str) -> None:
        """Raise where examples of a file, made by `read`, overlap the test file."""
        form = getattr(read, "form", read)
        if form is not self._form:  # of the first file that is taken, and of candidates for it
            self._keys, self._form = row_keys(self.read(read)), form
        check_apart(examples, self._keys, self.share, name, "take them out of it")

    def read(self, read: Read) -> Examples:
        """The examples of the test file, in the form that `read` has."""
        try:
            return read(self.path)
        except ValueError as error:
            raise BadTest(f"the test set cannot be used: {error}") from None
