"""A model at rest for a while.

with at_rest(model), torch.no_grad():
    logits = model(x)
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """In eval mode inside; every part gets its own mode back: a frozen one may stay in eval."""
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
