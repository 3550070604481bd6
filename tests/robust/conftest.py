"""What several tests of the audit start from."""

import pytest
from audit_cases import audited, plain


@pytest.fixture
def model():
    """A small trained mixture; do not write to it."""
    return plain()


@pytest.fixture
def found():
    """The result of its audit; do not write to it."""
    return audited()
