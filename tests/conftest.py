"""What every test starts from."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    """Every test draws the same numbers, whatever ran before it."""
    torch.manual_seed(0)
